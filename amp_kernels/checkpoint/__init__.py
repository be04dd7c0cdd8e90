"""Checkpoints of a training run: everything that its next step depends on, written atomically to one file.

A resumed run has the saved bits: weights, float32 masters (also split ones), moments in their own dtype, averages, the loss scale
with its counters, schedulers, random generators, the position in the data.

Examples:
    >>> import tempfile
    >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
    >>> optimizer = ak.optim.AdamW(model.parameters())
    >>> ak.checkpoint.save(f"{folder}/100.pt", model=model, optimizer=optimizer, extra={"step": 100}, keep=3)
    >>> ak.checkpoint.load(ak.checkpoint.latest(folder), model=model, optimizer=optimizer)
    {'step': 100}
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .._checks import lists
from . import _folder, _state
from ._file import map_tensors, on_host, read, write
from ._folder import latest

__all__ = ["latest", "load", "save", "wait"]


class Stateful(Protocol):
    """An object with a state to save."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    extra: Any = None,
    keep: int | None = None,
    pattern: str | None = None,
    background: bool = False,
) -> None:
    """Save the state of a training run between two steps.

    The write is atomic: the file appears under its name once all of it is on disk. A crash, a kill or a full disk leaves
    existing files untouched. Tensors are written one by one without a second copy. Each has a checksum.

    ``torch.load(path, weights_only=True)`` reads the file without this package, as a dict with the argument names as keys.
    ``load_state_dict`` accepts ``["model"]`` and ``["optimizer"]``, with masters in float32. The global random states of torch,
    Python and NumPy, and of all CUDA devices, are saved too.

    Args:
        path: the file; missing folders are created and an existing file is replaced. A symbolic link is refused, because
            neither replacing the link nor the file behind it is safe to guess.
        model, optimizer, scaler: of torch or of this package.
        scheduler, data: any objects with ``state_dict`` and ``load_state_dict``, such as a learning rate scheduler and a
            sampler with a position.
        extra: any nesting of tensors, numbers, strings, lists, tuples and dicts; :func:`load` returns it.
        keep: the number of newest checkpoints to keep, among those in the folder of ``path`` whose names differ from its name in
            numbers alone, as ``step-1.pt`` and ``step-20.pt``; older ones are removed. Others, such as ``best.pt``, and
            symbolic links are neither counted nor removed. ``None`` keeps all.
        pattern: a glob of the names that ``keep`` counts instead, such as ``"epoch-*.pt"`` for ``epoch-3-good.pt``.
        background: copy the state to host memory and write it in another thread. The next call, or :func:`wait`, waits for it
            and raises its error. A process that ends normally finishes the file first.

    Raises:
        OSError: the file could not be written, for example because the disk is full, or ``path`` is a folder, a symbolic link
            or a device. Existing files are untouched.
        TypeError: ``path`` is not a path; a state holds an object that ``weights_only`` does not load, or a tensor that is
            distributed over processes. The message names it. Nothing was written.
        ValueError: ``keep`` is below 1, or ``pattern`` is given without it or does not match the name of ``path``.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer, scaler = ak.optim.AdamW(model.parameters()), ak.GradScaler("cpu")
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ak.checkpoint.save(f"{folder}/1.pt", model=model, optimizer=optimizer, scaler=scaler, extra={"step": 1})
        >>> path = ak.checkpoint.latest(folder)
        >>> ak.checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler)
        {'step': 1}
        >>> torch.nn.Linear(4, 2).load_state_dict(torch.load(path, weights_only=True)["model"])
        <All keys matched successfully>
    """
    if keep is not None:
        lists.check_count("checkpoint.save", "keep", keep, 1)
    # Another thread, or a hook, may change the working directory.
    target = Path(os.path.abspath(_folder.as_path("save", "path", path)))
    matches = _folder.matcher(target, pattern)
    if pattern is not None and (keep is None or not matches(target.name)):
        raise ValueError(
            f"checkpoint.save: pattern is {pattern!r}, keep is {keep} and the file is {target.name!r}; accepted: with keep, a "
            "pattern that matches the file"
        )
    _folder.check_target(target)
    wait()
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "data": data}
    with torch.no_grad():
        content = _state.collect(parts, extra)
        if background:
            content = map_tensors(on_host, content)
    if background:
        _writer.start(target, content, keep, matches)
    else:
        _write(target, content, keep, matches)


def _write(path: Path, content: dict[str, Any], keep: int | None, matches: Callable[[str], bool]) -> None:
    with torch.no_grad():
        _folder.publish(path, lambda file: write(file, content))
    if keep is not None:
        _folder.remove_all_but(keep, path.parent, matches)


class _Writer:
    """Writes at most one file in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def start(self, *arguments: Any) -> None:
        with self._lock:
            self._join()
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="amp_kernels.checkpoint", daemon=False
            )
            self._thread.start()

    def _run(self, path: Path, *arguments: Any) -> None:
        try:
            _write(path, *arguments)
        except BaseException as error:
            _folder.logger.error("checkpoint.save: %s was not written: %s", path, error)
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        with self._lock:
            self._join()


_writer = _Writer()


def _after_fork() -> None:
    """The child does not have the thread, and the lock may have been held at the fork."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_after_fork)


def wait() -> None:
    """Wait for the file that ``save(..., background=True)`` is writing.

    Raises:
        OSError: the file could not be written.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ak.checkpoint.save(f"{folder}/1.pt", extra={"step": 1}, background=True)
        >>> ak.checkpoint.wait()
        >>> ak.checkpoint.latest(folder).name
        '1.pt'
    """
    _writer.wait()


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    rng: bool = True,
) -> Any:
    """Restore the state that :func:`save` saved, and return its ``extra``.

    Before anything changes, the whole file is verified by its checksums, and its content is compared with the given objects. No
    code from the file runs. Objects that are not given are not restored, so a model alone can be loaded for evaluation; the logger
    ``amp_kernels`` then warns of what the file has besides. Values are never converted: shapes and dtypes must match.

    Args:
        path: a checkpoint; :func:`latest` finds the newest.
        model, optimizer, scaler, scheduler, data: the objects saved under these names, or new ones built in the same way.
        rng: also restore the global random generators.

    Returns:
        The ``extra`` of :func:`save`, with tensors on the CPU.

    Raises:
        TypeError: ``path`` is not a path, such as the ``None`` of :func:`latest`.
        OSError, MemoryError, torch.OutOfMemoryError: there is no such file, or it could not be read.
        ValueError: the file is truncated, damaged, not a checkpoint, or of a newer version; the message names the newest intact
            checkpoint in its folder. Or its content does not fit; the message says where.

    Examples:
        >>> import tempfile
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
        >>> ak.checkpoint.save(f"{folder}/1.pt", model=model)
        >>> ak.checkpoint.load(f"{folder}/1.pt", model=torch.nn.Linear(4, 3))
        Traceback (most recent call last):
        ValueError: checkpoint.load: ...1.pt does not fit: its model.weight is torch.float32 of shape [2, 4], ...
    """
    file = _folder.as_path("load", "path", path, "; latest returns None for a folder without checkpoints")
    wait()
    if file.is_dir():
        raise IsADirectoryError(f"checkpoint.load: path is {file}, a folder; accepted: a file, such as latest(path)")
    try:
        content = read(file)
    except ValueError as error:
        raise _folder.refused(file, error) from None
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "data": data}
    try:
        _state.check(parts, content, rng)
    except ValueError as error:
        raise ValueError(f"checkpoint.load: {file} does not fit: {error}") from None
    with torch.no_grad():
        _state.restore(parts, content, rng)
    left = [name for name in _state.SECTIONS if name in content and parts[name] is None]
    if left and any(part is not None for part in parts.values()):
        _folder.logger.warning(
            "checkpoint.load: %s also has %s, not restored: not given to load", file, ", ".join(left)
        )
    return map_tensors(Tensor.clone, content["extra"])
