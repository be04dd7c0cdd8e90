"""A file is a zip of ``torch.save``, which brings tensors to the host one at a time. ``torch.load`` does not compare its CRC-32s, so
:func:`verify` does. Modification times are in the order of saving."""

import contextlib
import errno
import functools
import logging
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.serialization import config

from .._checks.types import type_name
from .._dispatch.devices import host_memory
from .._dispatch.files import TEMPORARY, replacing
from .._dispatch.memory import translated

logger = logging.getLogger("amp_kernels")

FORMAT = 2  # the first value of the saved dict; files of format 1 have none
#: Among the first bytes of our files: the first key, pickled, or the folder of all records of format 1.
_MARKS = (b"\0\0\0amp_kernelsq", b"amp_kernels-checkpoint/")


class Later(torch.UntypedStorage):
    """A tensor to save, pickled as one on the CPU. torch.save calls :meth:`cpu` of a storage on another device to write it: ``make`` then
    returns the elements, in order and alone in their storage."""

    def __new__(cls, shape: torch.Size, dtype: torch.dtype, make: Callable[[], Tensor]) -> "Later":
        later = super().__new__(cls, shape.numel() * dtype.itemsize, device="meta")
        later.shape, later.dtype, later.make = shape, dtype, make
        return later

    def __reduce__(self) -> Any:
        storage = torch.storage.TypedStorage(wrap_storage=self, dtype=torch.uint8, _internal=True)
        storage._fake_device = torch.device("cpu")
        shape, stride = tuple(self.shape), torch.empty(self.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v3, (storage, 0, shape, stride, False, OrderedDict(), self.dtype)

    def cpu(self) -> torch.UntypedStorage:
        return self.make().untyped_storage()


def plain(value: Any, name: str, tensors: dict[Any, Later]) -> Any:
    """Convert ``value`` to types that ``weights_only`` loads, subclasses to their base class. ``tensors`` collects a
    :class:`Later` for each tensor, one for tied weights. Another type is a TypeError that names its position."""
    if isinstance(value, Tensor):
        usual = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.layout == torch.strided
        if usual and not value.is_quantized and not value.is_meta:
            same = value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
            later = Later(value.shape, value.dtype, lambda: host_memory(value.shape, value.dtype).copy_(value))
            return tensors.setdefault(same if value.numel() else id(later), later)
        name += f" (of layout {value.layout} on {value.device})"
    if isinstance(value, Later):
        return tensors.setdefault(id(value), value)
    if value is None or isinstance(value, (torch.dtype, torch.device)):
        return value
    entries = value
    if isinstance(value, dict):
        entries = {plain(k, f"a key of {name}", tensors): plain(v, f"{name}.{k}", tensors) for k, v in value.items()}
    elif isinstance(value, (list, tuple)):
        entries = [plain(entry, f"{name}[{i}]", tensors) for i, entry in enumerate(value)]
    for kind in (Counter, OrderedDict, dict, torch.Size, list, tuple, bool, int, float, str, bytes):
        if isinstance(value, kind):
            result = kind(entries)
            if hasattr(value, "_metadata"):  # versions of a model's modules, for their load_state_dict
                result._metadata = value._metadata
            return result
    accepted = "dense tensors (DTensors: torch.distributed.checkpoint), numbers, strings, lists, tuples and dicts"
    raise TypeError(f"checkpoint.save: {name} has type {type_name(value)}; accepted: {accepted}")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a tree of :func:`plain` values to the disk, and read it back before the file has its name."""
    with replacing(path, functools.partial(verify, damaged=functools.partial(OSError, errno.EIO))) as file:
        try:
            with config.patch("save.compute_crc32", True):
                torch.save({"amp_kernels": FORMAT, **content}, file)
        except RuntimeError as error:  # torch ends the zip after a write that failed, and fails again
            raise (error.__context__ or error) from None
        others = [at + 1 for at, _ in newest_first(path.parent, passed=OSError)]
        newest = max([os.fstat(file.fileno()).st_mtime_ns, *others])  # clocks are coarse and may be set back
        os.utime(file.fileno(), ns=(newest, newest))


def newest_first(folder: Path, names: str = ".*", passed: type[OSError] = FileNotFoundError) -> list[tuple[int, Path]]:
    """The times and paths of the checkpoints, intact or not, whose names match ``names``, but for files whose error is ``passed``."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(passed):  # removed in the meantime, or a link to nothing
            if re.fullmatch(names, path.name) and not path.name.startswith(TEMPORARY) and foreign(path) is None:
                found.append((path.stat().st_mtime_ns, path))
    return sorted(found, reverse=True)


def newest_intact(folder: Path) -> Path | None:
    tried: set[tuple[int, Path]] = set()
    while files := [file for file in newest_first(folder) if file not in tried]:
        tried.add(files[0])
        path = files[0][1]
        try:
            verify(path)
            return path
        except FileNotFoundError:
            pass  # removed in the meantime, perhaps by one who wrote another: the folder is listed again
        except ValueError as error:
            logger.warning("%s is skipped: %s", path, error)
    return None


def foreign(path: Path) -> str | None:
    """Why the first bytes of a file are not a checkpoint's; ``None`` if they are, of an intact or a damaged one."""
    if path.exists() and not path.is_file():
        return "it is not a regular file"  # a FIFO would wait for its writer
    with path.open("rb") as file:
        head = file.read(128)
    ours = head.startswith(b"PK\3\4") and any(mark in head for mark in _MARKS)
    return None if ours else "it is not a checkpoint of amp_kernels" if head else "it is empty"


def verify(path: Path, damaged: Callable[[str], Exception] = ValueError) -> None:
    """Read the whole file, compare its checksums and unpickle everything but the tensors. The reason is ``damaged`` if the bytes are not
    those of a checkpoint, and an OSError, MemoryError or torch.OutOfMemoryError if they could not be read."""
    reason = foreign(path)
    try:
        if reason is None:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                bad = archive.testzip() or next((it.filename for it in archive.infolist() if it.compress_type), None)
                if bad is not None:
                    raise ValueError(f"{bad} does not fit its checksum or is compressed")
                found = torch.load(path, map_location="meta", weights_only=True, mmap=True).get("amp_kernels", 1)
            reason = f"it has format {found}, of a newer amp_kernels" if found > FORMAT else None
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # zipfile calls a file that it cannot read no zip
            cause = translated("checkpoint", cause) if isinstance(cause, RuntimeError) else cause
            # A seek to where the bytes say, before the file, fails with EINVAL.
            system = cause.errno != errno.EINVAL if isinstance(cause, OSError) else isinstance(cause, MemoryError)
            if system or isinstance(cause, torch.OutOfMemoryError) or "unable to mmap" in str(cause):
                raise cause from None
            cause = cause.__context__
        reason = f"it is cut short or damaged ({(str(error) or type(error).__name__).splitlines()[0]})"
    if reason is not None:
        raise damaged(reason)
