"""Checkpoints of a training run: everything that its next step depends on, written atomically to one file.

Examples:
    >>> ak.checkpoint.save("run/step-100.pt", model=torch.nn.Linear(4, 2), extra={"step": 100}, keep=3)
    >>> ak.checkpoint.load(ak.checkpoint.latest("run"), model=torch.nn.Linear(4, 2))
    {'step': 100}
"""

import contextlib
import copy
import fnmatch
import functools
import os
import re
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import lists
from .._checks.types import type_name
from .._dispatch import generators
from .._raw._split_master import join_on_host
from ..optim._base import FusedOptimizer
from ..optim._store import check_like
from . import _file

__all__ = ["latest", "load", "save", "wait"]

_BACKGROUND = "amp_kernels.checkpoint"  # the name of the threads that write
_errors: list[BaseException] = []  # of these threads, not raised yet
#: In the order of restoring: the last two do not fail after :func:`_check`, and cannot be undone.
_SECTIONS = ("data", "scheduler", "scaler", "optimizer", "model")
_KINDS = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "scaler": torch.amp.GradScaler}


def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    data: Any = None,
    extra: Any = None,
    keep: int | None = None,
    pattern: str | None = None,
    background: bool = False,
) -> None:
    """Save the state of a training run between two steps, with the random states of torch, Python, NumPy and all CUDA devices.

    The file appears under its name once all of it is on disk and was read back. A crash, a kill or a full disk leaves existing files
    untouched. ``torch.load(path, weights_only=True)`` reads it without this package, as a dict with the argument names as keys.

    Args:
        path: the file, made with its folders, or replaced. A symbolic link is refused: to replace the link or the file is a guess.
        model, optimizer, scaler, scheduler, data: objects with ``state_dict`` and ``load_state_dict``, of torch, this package or yours.
        extra: any nesting of tensors, numbers, strings, lists, tuples and dicts; :func:`load` returns it.
        keep: the number of checkpoints to keep, the newest of those whose names differ in numbers alone, as ``step-1.pt`` and
            ``step-20.pt``. Others, such as ``best.pt``, and symbolic links are neither counted nor removed. ``None`` keeps all.
        pattern: a glob of the names that ``keep`` counts instead, such as ``"epoch-*.pt"`` for ``epoch-3-good.pt``.
        background: copy the state to host memory and write it in another thread, which the next call or :func:`wait` waits for. They
            raise its error. A process that ends normally finishes the file first.

    Raises:
        OSError: the file could not be written, or differs when read back; or ``path`` is a folder, a link or a device.
        TypeError: ``path`` is not a path, or a state holds what ``weights_only`` does not load, or a tensor of several processes.
        ValueError: ``keep`` is below 1, or ``pattern`` is given without it or does not match ``path``.

    Examples:
        >>> ak.checkpoint.save("1.pt", model=torch.nn.Linear(4, 2), keep=3)
    """
    file = _path("save: path", path)
    parts = _given(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler, data=data)
    if keep is not None:
        lists.check_count("checkpoint.save", "keep", keep, 1)
    names = re.sub("[0-9]+", "[0-9]+", re.escape(file.name)) if pattern is None else fnmatch.translate(pattern)
    if pattern is not None and (keep is None or not re.fullmatch(names, file.name)):
        found = f"pattern is {pattern!r}, keep is {keep} and the file is {file.name!r}"
        raise ValueError(f"checkpoint.save: {found}; accepted: with keep, a pattern that matches the file")
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise FileExistsError(f"checkpoint.save: path is {file}, a link or a device; accepted: a file or a new name")
    wait()
    content: dict[str, Any] = {}
    tensors: dict[Any, _file.Later] = {}
    with torch.no_grad():
        for name, part in parts.items():
            fused = isinstance(part, FusedOptimizer)
            content[name] = part._state_dict_with(_joined, keep_codes=True) if fused else part.state_dict()
        content |= {"random": generators.states(), "extra": extra}
        content = {name: _file.plain(state, name, tensors) for name, state in content.items()}
        if not background:
            return _write(file, content, keep, names)
        for later in tensors.values():
            later.make = functools.partial(Tensor.detach, later.make())
    threading.Thread(target=_write, args=(file, content, keep, names, _errors), name=_BACKGROUND).start()


@torch.no_grad()
def _write(file: Path, content: dict[str, Any], keep: int | None, names: str, errors: list | None = None) -> None:
    try:
        _file.write(file, content)
        counted = [path for _, path in _file.newest_first(file.parent, names) if not path.is_symlink()]
        for path in counted[keep:] if keep else ():
            path.unlink(missing_ok=True)
    except BaseException as error:
        if errors is None:
            raise
        _file.logger.error("checkpoint.save: %s was not written: %s", file, error)
        errors.append(error)


def wait() -> None:
    """Wait for the file that ``save(..., background=True)`` is writing, and raise its error, such as an OSError.

    Examples:
        >>> ak.checkpoint.save("1.pt", background=True)
        >>> ak.checkpoint.wait()
    """
    for thread in [thread for thread in threading.enumerate() if thread.name == _BACKGROUND]:
        thread.join()
    if _errors:
        raise _errors.pop()


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    data: Any = None,
    rng: bool = True,
) -> Any:
    """Restore the state that :func:`save` saved, and return its ``extra``, with tensors on the CPU.

    Before anything changes, the whole file is verified by its checksums, and compared with the objects, old or new ones built in the
    same way: shapes and dtypes must match. No code from the file runs. ``rng=False`` leaves the global random generators alone. If
    some objects are given, the logger ``amp_kernels`` warns of the others in the file.

    Raises:
        OSError, MemoryError, torch.OutOfMemoryError: the file could not be read.
        ValueError: it is damaged, no checkpoint, or of a newer version, and the newest intact one is named. Or it does not fit.

    Examples:
        >>> ak.checkpoint.save("1.pt", extra={"step": 1})
        >>> ak.checkpoint.load("1.pt")
        {'step': 1}
    """
    file = _path("load: path", path, "; latest returns None for a folder without checkpoints")
    parts = _given(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler, data=data)
    wait()
    try:
        _file.verify(file)
    except ValueError as error:
        intact = f"the newest intact checkpoint in its folder: {_file.newest_intact(file.parent)}"
        raise ValueError(f"checkpoint.load: {file} cannot be loaded: {error}; {intact}") from None
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    try:
        _check(parts, content, rng)
    except ValueError as error:
        raise ValueError(f"checkpoint.load: {file} does not fit: {error}") from None
    with torch.no_grad():
        _restore(parts, content)
        if rng:
            generators.restore(content["random"])
    left = ", ".join(name for name in content if name in _SECTIONS and name not in parts)
    if left and parts:
        _file.logger.warning("checkpoint.load: %s also has %s, not restored: not given to load", file, left)
    return copy.deepcopy(content["extra"])


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest intact checkpoint of a folder; ``None`` if there is none, or, with a warning, no such folder.

    Files are read completely, the last saved first, by modification time: copy them with it (``cp -p``, ``rsync -t``). The logger
    ``amp_kernels`` warns of damaged ones. A file that cannot be read raises its OSError, MemoryError or torch.OutOfMemoryError.

    Examples:
        >>> ak.checkpoint.save("steps/200.pt")
        >>> ak.checkpoint.latest("steps").name
        '200.pt'
    """
    place = _path("latest: folder", folder)
    if place.exists():
        return _file.newest_intact(place)
    _file.logger.warning("checkpoint.latest: there is no folder %s", place)
    return None


def _path(argument: str, value: Any, hint: str = "") -> Path:
    """An absolute path: in a thread the working directory may be another."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"checkpoint.{argument} has type {type_name(value)}; accepted: a str or an os.PathLike{hint}")
    path = Path(os.path.abspath(value))
    if argument != "latest: folder" and path.is_dir():
        raise IsADirectoryError(f"checkpoint.{argument} is {path}, a folder; accepted: a file in it")
    return path


def _given(**parts: Any) -> dict[str, Any]:
    for name, part in (given := {name: part for name, part in parts.items() if part is not None}).items():
        right = next((other for other, kind in _KINDS.items() if name in _KINDS and isinstance(part, kind)), name)
        if right != name or not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            accepted = "an object with state_dict and load_state_dict" if right == name else f"as {right}="
            raise TypeError(f"checkpoint: {name} has type {type_name(part)}; accepted: {accepted}")
    return given


def _joined(param: Tensor, remainder: Tensor) -> _file.Later:
    return _file.Later(param.shape, torch.float32, lambda: join_on_host(param, remainder))


def _check(parts: dict[str, Any], content: dict[str, Any], rng: bool) -> None:
    """Raise a ValueError, whose message is only the reason, unless a checkpoint fits the objects to load."""
    for name, part in parts.items():
        if name not in content:
            there = ", ".join(filter(_SECTIONS.__contains__, content))
            raise ValueError(f"it has no {name}; what it has: {there}")
        saved = content[name]
        if isinstance(part, torch.nn.Module):
            here = part.state_dict()
            for verb, names in (("lacks", here.keys() - saved.keys()), ("has also", saved.keys() - here.keys())):
                if names:
                    raise ValueError(f"its model {verb} {', '.join(sorted(names)[:10])} ({len(names)} in all)")
            for key, value in here.items():
                if isinstance(value, Tensor):
                    check_like(f"model.{key}", saved[key], value.shape, value.dtype)
        elif isinstance(part, FusedOptimizer):
            part._store.check_form(part.param_groups, saved)
        elif isinstance(part, torch.amp.GradScaler) and part.is_enabled() != bool(saved):
            raise ValueError(f"it has the state of {'an enabled' if saved else 'a disabled'} scaler, and this is not")
    if rng:
        generators.check(content["random"])


def _restore(parts: dict[str, Any], content: dict[str, Any]) -> None:
    """Restore a checked state. If a part raises, it and the parts before it get their previous state back."""
    with contextlib.ExitStack() as undo:
        for name in filter(parts.__contains__, _SECTIONS):
            part, state = parts[name], content[name]
            if isinstance(part, FusedOptimizer):
                part._store.marks.clear()  # all that a file has is loaded
            if isinstance(part, (torch.nn.Module, FusedOptimizer)):
                part.load_state_dict(state)  # copies
            elif not isinstance(part, torch.amp.GradScaler) or part.is_enabled():
                undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
                part.load_state_dict(copy.deepcopy(state))  # what was read is a map of the file
        undo.pop_all()
    if isinstance(parts.get("optimizer"), FusedOptimizer):
        parts["optimizer"]._store.mark_clean()  # the model's load wrote the values that belong to the masters
