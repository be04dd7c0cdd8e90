"""The rows that a run leaves in its folder: one JSON object for each case and provider."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

OURS, TRITON = "amp_kernels", "amp_kernels:triton"
CASE = ("op", "shape", "dtype")
KEY = (*CASE, "provider")
TRAINING = "training step"


def load(folder: Path) -> list[dict]:
    return read(folder / "rows.jsonl")


def load_training(folder: Path) -> list[dict]:
    """The training steps that `bench.gpt2` timed, as rows of one more op."""
    rows = read(folder / "gpt2.jsonl")
    return [
        {
            **row,
            "op": TRAINING,
            "shape": f"{row['model']}, batch {row['batch']}",
            "p50_us": 1e3 * row["ms"],
            "status": "ok",
        }
        for row in rows
    ]


def record(path: Path, rows: list[dict]) -> list[dict]:
    """Writes the rows as JSON lines. Rows of earlier runs stay, unless the same thing (KEY) was timed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {tuple(row[key] for key in KEY): row for row in [*read(path), *rows]}
    path.write_text("".join(json.dumps(row) + "\n" for row in merged.values()))
    return list(merged.values())


def read(path: Path) -> list[dict]:
    """The rows of a file, if it exists, without a line that a killed run left incomplete."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def cases(rows: Iterable[dict]) -> dict[tuple[str, ...], dict[str, dict]]:
    """Rows by case, then by provider."""
    found: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in CASE), {})[row["provider"]] = row
    return found


def triton_ratio(providers: dict[str, dict]) -> float | None:
    """CUDA's time over Triton's of the same op, on the device where that was timed alone; None unless both were timed."""
    ours, triton = providers.get(OURS, {}), providers.get(TRITON, {})
    for key in ("device_us", "p50_us"):
        if key in ours and key in triton:
            return ours[key] / triton[key]
    return None


def copy_share(row: dict) -> float:
    """Bandwidth of the bytes that a provider moved over that of a copy in the same run: on the device where that was
    timed alone. 1 for a case that arithmetic bounds, at its bound."""
    return row.get("device_share", row["roofline_share"]) * row.get("moved_bytes", row["bytes"]) / row["bytes"]
