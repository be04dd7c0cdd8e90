"""The kernel sources behind a figure: a hash of each family, so that a page can name those that changed since."""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = "sources.json"


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


def record(folder: Path, root: Path = ROOT) -> None:
    """Writes the hashes beside the rows of a run."""
    if found := families(root):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(found, indent=1) + "\n")


def changed(folder: Path, root: Path = ROOT) -> list[str] | None:
    """The families whose sources differ from those of a folder's run; None if these were not recorded."""
    path = folder / FILE
    if not path.exists():
        return None
    then, now = json.loads(path.read_text()), families(root)
    return [name for name in sorted({*then, *now}, key=str.lower) if then.get(name) != now.get(name)]


def told(folder: Path, root: Path = ROOT) -> str:
    """A sentence for the page of a folder."""
    names = changed(folder, root)
    if names is None:
        return "The sources of this run were not recorded; the kernels have changed since."
    return f"Kernels whose sources changed since: {', '.join(names) or 'none'}."
