"""Checkpoints that are either whole or absent: written beside the target, flushed to the disk, then renamed over it."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch

FORMAT = 1


def save(path: Path, content: dict) -> None:
    """Writes `content` (tensors, numbers, strings, lists, dicts) to `path`.

    Atomic: a crash at any moment leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # The rename itself is only on the disk once the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict:
    """Reads a checkpoint without running any code from it (`weights_only=True`), tensors on the CPU.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or of another format.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: nothing to resume")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises half a dozen types for a damaged or foreign file
        raise ValueError(f"{path} is no readable checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this version (format {FORMAT})")
    return content
