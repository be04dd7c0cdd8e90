"""The table and the picture of docs/guide/optimizer-memory.md, counted from the buffers of optimizers, and the table of what fits in
docs/guide/larger-models.md, computed from them.

python -m bench.memory_page
"""

from __future__ import annotations

import html
from pathlib import Path

import torch

import amp_kernels as ak

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "optimizer-memory.md"
FITS_PAGE = PAGE.with_name("larger-models.md")
PICTURE = PAGE.with_suffix(".svg")
STYLE = """
text { font-size: 12px; fill: #555 }
.title { font-size: 14px; fill: #222 }
.bar { fill: #3554a5 }
@media (prefers-color-scheme: dark) {
text { fill: #aaa }
.title { fill: #ddd }
.bar { fill: #8ea6ee }
}
"""
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

#: Memory of a card in GiB, and what of it activations and the gradients of one layer are given.
CARDS = ((8, 1.5), (16, 2.5), (24, 3.5), (48, 5.0), (80, 7.0))
USABLE = 0.96  # of a card's memory, beside what the driver and the kernels take


def held(name: str, dtype: torch.dtype, options: dict) -> dict[str, float]:
    """Bytes a parameter that stay between steps, by part; with ``state_device="cpu"`` those in host memory."""
    param = torch.nn.Parameter(torch.ones(256, 256, dtype=dtype))
    optimizer = getattr(ak.optim, name)([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    (block,) = optimizer._store.blocks
    buffers = {
        "weight": [param if block.weights is None else block.weights],
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


def fits() -> str:
    """The number of parameters that fit on a card, plain, released and with state in host memory, in units of 1e9."""
    split24, none = LAYOUTS[7], LAYOUTS[8]
    sizes = {
        "plain, `split24` and 8-bit": sum(held(*split24).values()) + 2,  # with a BF16 gradient
        "released": sum(held(*split24).values()),
        "released, `none` and 8-bit": sum(held(*none).values()),
        "released, host state": BF16.itemsize,
    }
    name, dtype, options = split24
    on_host = sum(held(name, dtype, {**options, "state_device": "cpu"}).values())
    lines = [("card", "left free", *sizes, "its host memory"), ("---",) * (3 + len(sizes))]
    for card, free in CARDS:
        room = (USABLE * card - free) * 2**30 / 1e9
        fitting = [f"{room / size:.1f}" for size in sizes.values()]
        lines.append((f"{card} GB", f"{free:g} GB", *fitting, f"{room / BF16.itemsize * on_host:.0f} GB"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture() -> str:
    """Horizontal bars of stacked parts with their sums. Parts keep their shade in all rows."""
    rows = [(label(*layout), held(*layout)) for layout in LAYOUTS]
    parts = list(dict.fromkeys(part for _, row in rows for part in row))
    width, left, step = 720, 240, 24
    scale = (width - left - 60) / max(sum(row.values()) for _, row in rows)
    shade = {
        part: f'class="bar" fill-opacity="{1 - 0.8 * i / max(len(parts) - 1, 1):.2f}"' for i, part in enumerate(parts)
    }
    drawn = ['<text class="title" x="8" y="16">Bytes a parameter between steps</text>']
    for i, part in enumerate(parts):
        x = left + 110 * i
        drawn.append(f'<rect {shade[part]} x="{x}" y="28" width="12" height="12"/>')
        drawn.append(f'<text x="{x + 17}" y="39">{html.escape(part)}</text>')
    for i, (name, row) in enumerate(rows):
        x, y = float(left), 52 + step * i
        drawn.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        for part, value in row.items():
            drawn.append(f'<rect {shade[part]} x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{step - 6}"/>')
            x += value * scale
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{sum(row.values()):.5g}</text>')
    size = f'viewBox="0 0 {width} {60 + step * len(rows)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" role="img">'
    return f"{head}<style>{STYLE}</style>{''.join(drawn)}</svg>\n"


def page(text: str, table: str) -> str:
    """The page's text with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


TABLES = {PAGE: table, FITS_PAGE: fits}

if __name__ == "__main__":
    for path, made in TABLES.items():
        path.write_text(page(path.read_text(), made()))
    PICTURE.write_text(picture())
