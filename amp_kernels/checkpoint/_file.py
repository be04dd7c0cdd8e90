"""The file format: the zip of ``torch.save``, which ``torch.load(path, weights_only=True)`` reads, written as a stream.

Every tensor is a separate record. Its bytes are written in chunks directly from the tensor, and a tensor that exists only on
disk (:class:`Lazy`) is computed while it is written, so there is never a second copy of the state in memory. The zip has a CRC-32
for each record. Its first record, ``manifest.json``, has the format version and the tensors' names for error messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import pickle
import stat
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._checks.types import type_name
from .._dispatch.memory import translated

FORMAT = 1
_ROOT = "amp_kernels-checkpoint"  # the folder of all records, which identifies our files by their first bytes
_MANIFEST = "manifest.json"
_MANIFEST_LIMIT = 1 << 26  # bytes: the names of 600,000 tensors
_ALIGNMENT = 64  # of each record in the file, as torch aligns them for mmap
_PIECE = 1 << 20  # bytes per write: the host memory used for a tensor on another device
_SCALARS = (bool, int, float, str, bytes)
_TORCH_VALUES = (torch.dtype, torch.device, torch.Size)


@dataclass(eq=False)
class Lazy:
    """A contiguous tensor computed elementwise from tensors of its shape when it is written."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.inputs[0].shape


@dataclass
class _Storage:
    key: str
    numel: int  # bytes


def plain(value: Any, name: str) -> Any:
    """Convert ``value`` to types that ``weights_only`` loads; subclasses of numbers, lists and dicts become their base class.

    Raises:
        TypeError: it holds another type; the message names its position.
    """
    if value is None or type(value) in (*_SCALARS, *_TORCH_VALUES, Lazy):
        return value
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise TypeError(
                f"checkpoint.save: {name} has type {type_name(value)}; accepted: plain tensors "
                "(torch.distributed.checkpoint saves tensors that are distributed over processes)"
            )
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(
                f"checkpoint.save: {name} is a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}; "
                "accepted: dense tensors with data"
            )
        return value
    if isinstance(value, dict):
        items = {plain(key, f"a key of {name}"): plain(entry, f"{name}.{key}") for key, entry in value.items()}
        if isinstance(value, Counter):
            return Counter(items)
        if isinstance(value, OrderedDict):
            ordered = OrderedDict(items)
            if hasattr(value, "_metadata"):  # versions of a model's modules, for their load_state_dict
                ordered._metadata = plain(value._metadata, f"{name}._metadata")  # type: ignore[attr-defined]
            return ordered
        return items
    if isinstance(value, (list, tuple)):
        entries = [plain(entry, f"{name}[{i}]") for i, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(
        f"checkpoint.save: {name} has type {type_name(value)}; accepted: tensors, numbers, strings, bytes, None, dtypes, "
        "devices, and lists, tuples and dicts of these (what torch.load reads with weights_only=True)"
    )


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | Lazy]]:
    """The tensors of a tree with their positions."""
    if isinstance(value, (Tensor, Lazy)):
        yield name, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from named_tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from named_tensors(entry, f"{name}[{i}]")


def map_tensors(function: Callable[[Any], Tensor], value: Any) -> Any:
    """Apply ``function`` to each tensor of a tree; shared tensors stay shared."""
    done: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, (Tensor, Lazy)):
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]
        if isinstance(value, dict):
            copy = (
                type(value)((key, walk(entry)) for key, entry in value.items()) if type(value) is not Counter else value
            )
            if hasattr(value, "_metadata"):
                copy._metadata = value._metadata
            return copy
        return type(value)(map(walk, value)) if type(value) in (list, tuple) else value

    return walk(value)


# ---- writing ----


class _Pickler(pickle.Pickler):
    """Writes the pickle of torch.save and collects the tensors."""

    def __init__(self, file: BinaryIO):
        super().__init__(file, protocol=2)  # the protocol that torch.load reads with weights_only
        self.tensors: list[Tensor | Lazy] = []
        self._storages: dict[Any, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (Tensor, Lazy)):
            return NotImplemented
        lazy = isinstance(value, Lazy)
        # Store tied weights, and views of the same elements, once; lazily conjugated or negated views are different.
        if lazy or not value.numel():
            key: Any = id(value)
        else:
            key = value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
        if key not in self._storages:
            numel = value.shape.numel() * value.dtype.itemsize
            self._storages[key] = _Storage(str(len(self.tensors)), numel)
            self.tensors.append(value)
        stride = torch.empty(value.shape, device="meta").stride()
        arguments = (self._storages[key], 0, tuple(value.shape), stride, False, OrderedDict(), value.dtype)
        return torch._utils._rebuild_tensor_v3, arguments

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", torch.UntypedStorage, value.key, "cpu", value.numel
        return None


def pieces(tensor: Tensor | Lazy, size: int = _PIECE) -> Iterator[Tensor]:
    """The elements of a tensor in index order, about ``size`` bytes at a time, on the host."""
    inputs = tensor.inputs if isinstance(tensor, Lazy) else (tensor,)
    flat = [value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for value in inputs]
    for parts in zip(*(value.split(size // tensor.dtype.itemsize) for value in flat), strict=True):
        yield (tensor.function(*parts) if isinstance(tensor, Lazy) else parts[0]).cpu()


def on_host(tensor: Tensor | Lazy) -> Tensor:
    """Copy to the host."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    begin = 0
    for piece in pieces(tensor):
        copy.view(-1)[begin : begin + piece.numel()] = piece
        begin += piece.numel()
    return copy


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write(file: BinaryIO, content: dict[str, Any]) -> None:
    """Write a tree of :func:`plain` values."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    names: dict[str, str] = {}
    positions = {id(tensor): f"data/{i}" for i, tensor in enumerate(pickler.tensors)}
    for name, tensor in named_tensors(content):
        if id(tensor) in positions:
            names.setdefault(positions[id(tensor)], name)
    manifest = json.dumps({"format": FORMAT, "sections": list(content), "tensors": names}).encode()
    if len(manifest) > _MANIFEST_LIMIT:
        raise ValueError(
            f"checkpoint.save: the names of the tensors take {len(manifest)} bytes; accepted: up to {_MANIFEST_LIMIT}"
        )
    with zipfile.ZipFile(file, "w") as archive:
        _record(archive, _MANIFEST, manifest)
        _record(archive, "data.pkl", pickled.getbuffer())
        _record(archive, "byteorder", sys.byteorder.encode())
        for i, tensor in enumerate(pickler.tensors):
            size = tensor.shape.numel() * tensor.dtype.itemsize
            with archive.open(_entry(archive, f"data/{i}", size), "w") as record:
                for piece in filter(Tensor.numel, pieces(tensor)):
                    record.write(_bytes(piece))
        _record(archive, "version", b"3\n")


def _record(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    with archive.open(_entry(archive, name, len(data)), "w") as record:
        record.write(data)


def _entry(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """A record whose data starts at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = size
    header = 30 + len(info.filename) + (20 if size * 1.05 > zipfile.ZIP64_LIMIT else 0)  # as ZipFile.open writes it
    padding = -(archive.fp.tell() + header + 4) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"\0" * padding
    return info


# ---- reading ----


class _Damaged(ValueError):
    """The bytes of a file are not those of a checkpoint that this version reads. The message is only the reason."""


def is_ours(path: Path) -> bool:
    """True if a file starts like a checkpoint of this module, intact or not, of any version.

    Only regular files are opened: a FIFO would wait for its writer.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(30 + len(_ROOT))
    except FileNotFoundError:
        return False
    return head[:4] == b"PK\x03\x04" and head[30:] == _ROOT.encode()


def verify(path: Path) -> None:
    """Read the whole file, compare its checksums and unpickle everything but the tensors.

    Raises:
        ValueError: the bytes are damaged, not a checkpoint or of a newer format; the message is only the reason.
        OSError, MemoryError, torch.OutOfMemoryError: they could not be read, which says nothing about them.
    """
    if not is_ours(path):
        raise _Damaged(_foreign(path))
    with path.open("rb") as file, _damage("it is cut short or damaged"):
        _verify_records(file)
        file.seek(0)
        torch.load(file, map_location="meta", weights_only=True)


def read(path: Path) -> dict[str, Any]:
    """Verify a file as :func:`verify` does and return its content. Tensors are memory-mapped: clone those to keep."""
    verify(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Raise errors that bytes cause as damage, and others as they are: the readers raise many types for damaged files."""
    try:
        yield
    except _Damaged:
        raise
    except Exception as error:
        system = _of_system(error)
        if system is not None:
            raise system from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _Damaged(f"{what} ({reason})") from error


def _of_system(error: BaseException | None) -> BaseException | None:
    """The error of the system behind an error of a reader: zipfile calls a file that it cannot read no zip."""
    while error is not None:
        if isinstance(error, RuntimeError):
            error = translated("checkpoint", error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return error
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek to where the bytes say, before the file
            return error
        error = error.__context__
    return None


def _foreign(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):
        return "it is not a regular file"
    with path.open("rb") as file:
        head = file.read(4)
    if not head:
        return "it is empty"
    return "it is a zip, but not a checkpoint of amp_kernels" if head[:2] == b"PK" else "it is not a checkpoint"


def _verify_records(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        record = archive.getinfo(f"{_ROOT}/{_MANIFEST}")
        if record.compress_type or record.file_size > _MANIFEST_LIMIT:
            raise _Damaged(f"it is damaged: its {_MANIFEST} is compressed or larger than {_MANIFEST_LIMIT} bytes")
        manifest = json.loads(archive.read(record))
        if manifest["format"] > FORMAT:
            raise _Damaged(f"it has format {manifest['format']}, of a newer amp_kernels; accepted: up to {FORMAT}")
        expected = [_MANIFEST, "data.pkl", "byteorder", *manifest["tensors"], "version"]
        records = [(record.filename, record.compress_type) for record in archive.infolist()]
        if records != [(f"{_ROOT}/{name}", zipfile.ZIP_STORED) for name in expected]:
            raise _Damaged("it is damaged: its records are not the uncompressed ones that its manifest lists")
        for name in expected:
            with (
                _damage(f"it is damaged: {manifest['tensors'].get(name, name)}"),
                archive.open(f"{_ROOT}/{name}") as record,
            ):
                while record.read(_PIECE):
                    pass
