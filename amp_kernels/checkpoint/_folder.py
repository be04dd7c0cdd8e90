"""The folder of checkpoints: files appear atomically, and their modification times are in the order of saving."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ._file import is_ours, read

logger = logging.getLogger("amp_kernels")

_TEMPORARY = ".amp_kernels-"  # prefix of files being written


def publish(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let ``write`` fill a temporary file and rename it once it is on disk.

    After a crash, ``path`` is the old or the new file. A leftover temporary file is removed by the next call.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held while the writer process lives
            write(file)
            file.flush()
            _make_newest(file, path)
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def _make_newest(file: BinaryIO, path: Path) -> None:
    """Make the modification time the newest in the folder: clocks are coarse and may be set back."""
    others = [_age(other) for other in path.parent.iterdir() if other != path and is_ours(other)]
    latest = max((time for time in others if time is not None), default=0)
    if os.fstat(file.fileno()).st_mtime_ns <= latest:
        os.utime(file.fileno(), ns=(latest + 1, latest + 1))


def _age(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed in the meantime
        return None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_left_over(folder: Path) -> None:
    """Remove files whose writers were killed, recognised by their free lock."""
    for temporary in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError), open(temporary, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


def newest_first(folder: Path) -> Iterator[Path]:
    """The checkpoints of a folder, intact or not."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            age = None if path.name.startswith(_TEMPORARY) or not is_ours(path) else _age(path)
            if age is not None:
                found.append((age, path))
    yield from (path for _, path in sorted(found, reverse=True))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest intact checkpoint of a folder; ``None`` if there is none.

    Candidates are read completely and verified by their checksums, newest first, until one is intact. The logger ``amp_kernels``
    warns of damaged ones. Other files are ignored. The newest file is the one saved last, by modification time: copy folders
    with these times (``cp -p``, ``rsync -t``).

    Args:
        folder: may not exist.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (100, 200):
        ...         ak.checkpoint.save(f"{folder}/step-{step}.pt", extra={"step": step})
        ...     ak.checkpoint.latest(folder).name
        'step-200.pt'
    """
    return _newest_whole(newest_first(Path(folder)))


def _newest_whole(candidates: Iterable[Path]) -> Path | None:
    for path in candidates:
        try:
            read(path)
        except FileNotFoundError:
            continue  # removed in the meantime
        except ValueError as error:
            logger.warning("%s is skipped: %s", path, error)
        else:
            return path
    return None


def remove_all_but(keep: int, folder: Path) -> None:
    """Remove checkpoints older than the ``keep`` newest."""
    for path in list(newest_first(folder))[keep:]:
        path.unlink(missing_ok=True)


def refused(path: Path, reason: Any) -> ValueError:
    """The error for an unusable file; names the newest intact one in its folder."""
    previous = _newest_whole(other for other in newest_first(path.parent) if other != path)
    saved = (
        "its folder has no intact checkpoint"
        if previous is None
        else f"the newest intact checkpoint in its folder is {previous}"
    )
    return ValueError(f"checkpoint.load: {path} cannot be loaded: {reason}; {saved}")
