"""The PTX in a binary that nvcc made, cut into kernels."""

import re
import tempfile
from pathlib import Path

from .cuobjdump import cuobjdump


class Source:
    """The PTX of one file for one architecture."""

    def __init__(self, text: str):
        self.target = re.search(r"\.target\s+sm_(\w+)", text)[1]
        self.number = int(re.match(r"\d+", self.target)[0])
        starts = [m.start() for m in re.finditer(r"^(\.visible |\.weak )?\.entry", text, re.MULTILINE)]
        module, self.kernels = [text[: starts[0]] if starts else text], {}
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            chunk = text[start:end]
            body_end = chunk.rindex("\n}") + 2
            self.kernels[re.search(r"\.entry\s+([\w$]+)", chunk)[1]] = chunk[:body_end]
            module.append(chunk[body_end:])
        self.module = "".join(module)

    def text(self, kernel: str) -> str:
        """The text outside of kernels, and this kernel."""
        return self.module + self.kernels[kernel]

    def fits(self, capability: int) -> bool:
        """True if the driver would compile it for a chip: no newer PTX, and PTX of an "a" target for that chip alone."""
        return self.number == capability or (self.number < capability and not self.target.endswith("a"))


def sources_in(binary: Path) -> list[Source]:
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-xptx", "all", binary.resolve(), cwd=folder)
        return [Source(path.read_text()) for path in sorted(Path(folder).glob("*.ptx"))]


def newest(found: list[Source], kernel: str, capability: int) -> Source | None:
    """The one that the driver would take for a kernel."""
    fits = [s for s in found if kernel in s.kernels and s.fits(capability)]
    return max(fits, key=lambda s: s.number, default=None)
