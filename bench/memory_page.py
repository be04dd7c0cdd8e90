"""The table and the picture of docs/guide/optimizer-memory.md, counted from the buffers of optimizers.

python -m bench.memory_page
"""

from __future__ import annotations

from pathlib import Path

import torch

import amp_kernels as ak
from amp_kernels.numerics import _svg

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "optimizer-memory.md"
PICTURE = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
F32, BF16 = torch.float32, torch.bfloat16
#: Optimizer, dtype of the parameters, options.
LAYOUTS = (
    ("AdamW", F32, {}),
    ("AdamW", F32, {"shadow_dtype": BF16}),
    ("AdamW", F32, {"state_dtype": "8bit"}),
    ("AdamW", BF16, {}),
    ("AdamW", BF16, {"master_weights": "split"}),
    ("AdamW", BF16, {"master_weights": "split", "state_dtype": BF16}),
    ("AdamW", BF16, {"master_weights": "split", "state_dtype": "8bit"}),
    ("AdamW", BF16, {"master_weights": "split24", "state_dtype": "8bit"}),
    ("AdamW", BF16, {"master_weights": "none", "state_dtype": "8bit"}),
    ("Lion", BF16, {"master_weights": "split24", "state_dtype": "8bit"}),
)


def held(name: str, dtype: torch.dtype, options: dict) -> dict[str, float]:
    """Bytes a parameter that stay between steps, by part."""
    param = torch.nn.Parameter(torch.ones(256, 256, dtype=dtype))
    optimizer = getattr(ak.optim, name)([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    (block,) = optimizer.store.blocks
    buffers = {
        "weight": [param],
        "master": [block.master],
        "16-bit copy": [block.shadow],
        "moments": block.moments.values(),
    }
    bytes_of = {part: sum(t.nbytes for t in tensors) / param.numel() for part, tensors in buffers.items()}
    return {part: size for part, size in bytes_of.items() if size}


def label(name: str, dtype: torch.dtype, options: dict) -> str:
    words = {"shadow_dtype": "16-bit copy", torch.bfloat16: "BF16 moments", "8bit": "8-bit moments"}
    values = [words.get(key) or words.get(value, value) for key, value in options.items()]
    return ", ".join([f"{name} {'FP32' if dtype == F32 else 'BF16'}", *values])


def table() -> str:
    head = ("optimizer", "weights", "options", "weight", "master", "16-bit copy", "moments", "total", "Llama-3 8B")
    lines = [head, ("---",) * len(head)]
    for name, dtype, options in LAYOUTS:
        parts = held(name, dtype, options)
        shown = ", ".join(f"`{key}={value!r}`" for key, value in options.items()) or "-"
        sizes = [f"{parts[part]:.5g}" if part in parts else "-" for part in head[3:7]]
        total = sum(parts.values())
        row = (f"`{name}`", "FP32" if dtype == F32 else "BF16", shown, *sizes, f"{total:.5g}", f"{total * 8.03:.0f} GB")
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture() -> str:
    return _svg.stacks("Bytes a parameter between steps", [(label(*layout), held(*layout)) for layout in LAYOUTS])


def page(text: str) -> str:
    """The page's text with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    PICTURE.write_text(picture())
