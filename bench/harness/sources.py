"""The kernel sources behind a figure: a hash of each family, so that a page can name those that changed since."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = "sources.json"
_INCLUDE = re.compile(r'#include "(\w+)/')
_OP = re.compile(r'(?:m\.impl\(|kName = )"(\w+)"')
#: The kernels of an op that csrc has under other names: how those begin.
_KERNELS = {
    **dict.fromkeys(("linear", "mlp"), ("gemm", "activation_", "column_sums")),
    **dict.fromkeys(("layer_norm", "rms_norm"), ("norm_",)), "step": ("adamw_", "check_and_norm"),
}  # fmt: skip


def families(root: Path = ROOT) -> dict[str, str]:
    """By folder of csrc, and for the Triton kernels: a hash of the names and texts of its files. Empty without a source tree."""
    folders = {path.name: path for path in sorted((root / "csrc").glob("*")) if path.is_dir()}
    if folders:
        folders["Triton"] = root / "amp_kernels" / "_triton"
    return {name: _hash(folder) for name, folder in folders.items()}


def _hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def record(folder: Path, commit: str | None, root: Path = ROOT) -> None:
    """Writes the hashes of a commit next to the rows that name it."""
    if found := families(root):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps({**read(folder), str(commit): found}, indent=1) + "\n")


def read(folder: Path) -> dict[str, dict[str, str]]:
    """By commit: the hashes of its families."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else {}


def stands(folder: Path, root: Path = ROOT) -> Callable[[dict], bool]:
    """For rows of a folder: true of one whose op's kernels have the sources of today, with all that they include."""
    recorded, now = read(folder), families(root)
    texts = ((path.relative_to(root / "csrc").parts[0], path.read_text()) for path in (root / "csrc").glob("*/**/*.*"))
    ops = [(name, folder) for folder, text in texts for name in _OP.findall(text)]

    @functools.cache
    def used(op: str) -> set[str]:
        starts = _KERNELS.get(op, (op,))
        return _included({folder for name, folder in ops if name.startswith(starts)} or now, root)

    def unchanged(row: dict) -> bool:
        then = recorded.get(str(row["commit"]), {})
        return all(name in then and then[name] == now[name] for name in used(row["op"]))

    return unchanged


def _included(folders: Iterable[str], root: Path) -> set[str]:
    """These folders of csrc and those whose headers they include, at any depth."""
    found, new = set(), set(folders)
    while new:
        found |= new
        files = [path for name in new for path in (root / "csrc" / name).glob("**/*.*")]
        included = {name for path in files for name in _INCLUDE.findall(path.read_text())}
        new = {name for name in included if (root / "csrc" / name).is_dir()} - found
    return found


def told(folder: Path, commits: Iterable[str], root: Path = ROOT) -> str:
    """Sentences for the page of a folder whose rows were measured at these commits."""
    recorded, now = read(folder), families(root)
    then = [recorded[commit] for commit in commits if commit in recorded]
    unknown = [commit for commit in commits if commit not in recorded]
    names = {name for hashes in then for name in {*hashes, *now} if hashes.get(name) != now.get(name)}
    said = (
        [f"Kernels whose sources changed since: {', '.join(sorted(names, key=str.lower)) or 'none'}."] if then else []
    )
    if unknown:
        said.append(f"The sources of {', '.join(unknown)} were not recorded; the kernels have changed since.")
    return " ".join(said)
