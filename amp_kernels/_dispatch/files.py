"""Files that appear under their name once all of their bytes are on disk."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".amp_kernels-"  # prefix of files being written
_ABANDONED = 3600  # seconds without a write, after which the writer of such a file counts as killed


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[Path], object] = Path.stat) -> Iterator[BinaryIO]:
    """A temporary file beside ``path``. At the end of the block it is written to the disk, passed to ``check``, and renamed to ``path``.
    After an error it is removed, and after a crash by a later call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _ABANDONED:
                left.unlink()
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the check reads the disk, not its cache
        check(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
