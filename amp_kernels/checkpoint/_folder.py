"""The folder of checkpoints: files appear atomically, and their modification times are in the order of saving."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .._checks.types import type_name
from ._file import is_ours, verify

logger = logging.getLogger("amp_kernels")

_TEMPORARY = ".amp_kernels-"  # prefix of files being written
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)  # Lustre and some of FUSE
_ABANDONED = 24 * 3600  # seconds without a write


def as_path(function: str, name: str, value: Any, hint: str = "") -> Path:
    """The argument ``name`` of ``function`` as a path.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"checkpoint.{function}: {name} has type {type_name(value)}; accepted: a str or an os.PathLike{hint}"
        )
    return Path(value)


def check_target(path: Path) -> None:
    """Raise unless ``path`` is absent or a regular file, which a save may replace."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(
                f"checkpoint.save: path is {path}, a folder; accepted: a file, such as {path / 'step-1.pt'}"
            )
        if stat.S_ISLNK(mode):
            raise FileExistsError(
                f"checkpoint.save: path is {path}, a symbolic link to {os.readlink(path)}; accepted: a file, such as "
                "os.path.realpath(path), which replaces the file behind the link"
            )
        if not stat.S_ISREG(mode):
            raise FileExistsError(f"checkpoint.save: path is {path}, which is not a regular file; accepted: a new name")


def matcher(path: Path, pattern: str | None) -> Callable[[str], bool]:
    """Tells the names that count with ``path``: those that ``pattern`` matches, or that differ from it in numbers alone."""
    if pattern is not None:
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    alike = re.compile(re.sub("[0-9]+", "[0-9]+", re.escape(path.name)))
    return lambda name: alike.fullmatch(name) is not None


def publish(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let ``write`` fill a temporary file and rename it once it is on disk.

    After a crash, ``path`` is the old or the new file. A leftover temporary file is removed by the next call.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    with _temporary(path.parent) as (temporary, file):
        write(file)
        file.flush()
        _make_newest(file, path)
        os.fsync(file.fileno())
        os.replace(temporary, path)
    _sync(path.parent)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file, locked while the writer lives; removed after an error."""
    while True:
        path = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with open(path, "xb") as file:
                _lock(file, fcntl.LOCK_EX)
                if path.exists():  # else another save has removed it before it was locked
                    yield path, file
                    return
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise


def _lock(file: BinaryIO, kind: int) -> bool:
    """Lock a file; ``False`` if its file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _make_newest(file: BinaryIO, path: Path) -> None:
    """Make the modification time the newest in the folder: clocks are coarse and may be set back."""
    latest = 0
    for other in path.parent.iterdir():
        with contextlib.suppress(OSError):  # other files do not stop a save
            latest = max(latest, (other != path and _age(other)) or 0)
    if os.fstat(file.fileno()).st_mtime_ns <= latest:
        os.utime(file.fileno(), ns=(latest + 1, latest + 1))


def _age(path: Path) -> int | None:
    """The modification time of a regular file, also behind a symbolic link; ``None`` if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:  # removed in the meantime, or a link to nothing
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_left_over(folder: Path) -> None:
    """Remove files whose writers were killed, recognised by their free lock, or without locks by their age."""
    for temporary in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            status = temporary.lstat()
            if stat.S_ISREG(status.st_mode):
                with open(temporary, "rb") as file:
                    # Shared, because NFS locks exclusively only what is open for writing.
                    free = _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if free or time.time() - status.st_mtime > _ABANDONED:
                        temporary.unlink()


def newest_first(folder: Path, counts: Callable[[Path], bool] = lambda path: True) -> list[Path]:
    """The checkpoints of a folder, intact or not, that ``counts`` accepts."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        if not path.name.startswith(_TEMPORARY) and counts(path) and is_ours(path):
            age = _age(path)
            if age is not None:
                found.append((age, path))
    return [path for _, path in sorted(found, reverse=True)]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest intact checkpoint of a folder; ``None`` if there is none.

    Candidates are read completely and verified by their checksums, newest first, until one is intact. The logger ``amp_kernels``
    warns of damaged ones. Other files are ignored. The newest file is the one saved last, by modification time: copy folders
    with these times (``cp -p``, ``rsync -t``).

    Args:
        folder: may not exist, as before the first save of a run; the logger then warns and names it.

    Raises:
        TypeError: ``folder`` is not a path.
        OSError, MemoryError, torch.OutOfMemoryError: a file could not be read, so it is unknown which one is the newest intact
            one. Never for damaged files.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (100, 200):
        ...         ak.checkpoint.save(f"{folder}/step-{step}.pt", extra={"step": step})
        ...     ak.checkpoint.latest(folder).name
        'step-200.pt'
    """
    folder = as_path("latest", "folder", folder)
    try:
        candidates = newest_first(folder)
    except FileNotFoundError:
        logger.warning("checkpoint.latest: there is no folder %s", folder.absolute())
        return None
    return _newest_whole(candidates)


def _newest_whole(candidates: Iterable[Path]) -> Path | None:
    for path in candidates:
        try:
            verify(path)
        except FileNotFoundError:
            continue  # removed in the meantime
        except ValueError as error:
            logger.warning("%s is skipped: %s", path, error)
        else:
            return path
    return None


def remove_all_but(keep: int, folder: Path, matches: Callable[[str], bool]) -> None:
    """Remove checkpoints whose names match and which are older than the ``keep`` newest of them."""
    for path in newest_first(folder, lambda path: matches(path.name) and not path.is_symlink())[keep:]:
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
