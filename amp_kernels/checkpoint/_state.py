"""The content of a checkpoint: collecting, checking and restoring the state of a training loop."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks.types import type_name
from .._raw._split_master import join_master
from ..optim._base import FusedOptimizer
from ..optim._moments8 import SCALE, moment_dtype, moment_of, scale_shape
from ._file import Lazy, map_tensors, plain

SECTIONS = ("model", "optimizer", "scaler", "scheduler", "data")


def collect(parts: dict[str, Any], extra: Any) -> dict[str, Any]:
    """Collect the content of a checkpoint, with the live tensors, not copies."""
    content: dict[str, Any] = {}
    for name, part in parts.items():
        if part is not None:
            _check_stateful(name, part)
            state = _of_optimizer(part) if isinstance(part, FusedOptimizer) else part.state_dict()
            content[name] = plain(state, name)
    content["random"] = _random_state()
    content["extra"] = plain(extra, "extra")
    return content


def _check_stateful(name: str, part: Any) -> None:
    if not all(callable(getattr(part, method, None)) for method in ("state_dict", "load_state_dict")):
        raise TypeError(
            f"checkpoint: {name} has type {type_name(part)}; accepted: an object with state_dict and load_state_dict"
        )


def _of_optimizer(optimizer: FusedOptimizer) -> dict[str, Any]:
    """The state_dict, with split float32 masters that are joined when they are written, and codes of 8-bit moments."""

    def later(param: Tensor, remainder: Tensor) -> Lazy:
        return Lazy(join_master, (param, remainder), torch.float32)

    return optimizer.state_dict_with(later, keep_codes=True)


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": [version, list(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, key.tolist(), *rest]
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


# ---- loading ----


def check(parts: dict[str, Any], content: dict[str, Any], rng: bool) -> None:
    """Check that a checkpoint fits the objects to load.

    Raises:
        TypeError, ValueError: it does not fit; the message is only the reason.
    """
    for name, part in parts.items():
        if part is None:
            continue
        _check_stateful(name, part)
        if name not in content:
            there = ", ".join(section for section in SECTIONS if section in content) or "none of them"
            raise ValueError(f"it has no {name}; what it has: {there}")
        if isinstance(part, torch.nn.Module):
            _check_model(part, content[name])
        elif isinstance(part, torch.optim.Optimizer):
            _check_optimizer(part, content[name])
        elif isinstance(part, torch.amp.GradScaler) and part.is_enabled() != bool(content[name]):
            saved = "an enabled" if content[name] else "a disabled"
            raise ValueError(f"it has the state of {saved} scaler, and this one is not")
    devices = len(content["random"].get("cuda", ()))
    if rng and devices and devices != torch.cuda.device_count():
        raise ValueError(
            f"it has random states of {devices} CUDA devices, and there are {torch.cuda.device_count()} here; accepted: "
            "as many, or rng=False"
        )


def _check_model(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    running = model.state_dict()
    for verb, names in (("lacks", running.keys() - saved.keys()), ("has also", saved.keys() - running.keys())):
        if names:
            raise ValueError(f"its model {verb} {', '.join(sorted(names)[:10])} ({len(names)} in all)")
    for name, value in running.items():
        if isinstance(value, Tensor):
            _check_like(f"model.{name}", saved[name], value.shape, value.dtype)


def _check_like(name: str, saved: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if saved.shape != shape or saved.dtype != dtype:
        raise ValueError(
            f"its {name} is {saved.dtype} of shape {list(saved.shape)}, and here it is {dtype} of shape {list(shape)}; "
            "for a conversion load what torch.load(path, weights_only=True) returns"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    params = [group["params"] for group in optimizer.param_groups]
    sizes, saved_sizes = list(map(len, params)), [len(group["params"]) for group in saved["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(f"its optimizer has groups of {saved_sizes} parameters, and here they are of {sizes}")
    members = optimizer.algorithm.members if isinstance(optimizer, FusedOptimizer) else ()
    moments = {moment for member in members for moment in member.declared.moments}
    for i, param in enumerate(param for group in params for param in group):
        for key, value in saved["state"].get(i, {}).items():
            name = f"optimizer.state[{i}].{key}"
            # SGD's momentum is None before its first step; the optimizer checks for missing entries.
            if not isinstance(value, Tensor):
                continue
            moment = moment_of(key) or key
            if moment in moments:
                _check_moment(name, value, param, optimizer.state_dtype, is_scale=key == moment + SCALE)
            elif value.numel() != 1 and value.shape != param.shape:
                _check_like(name, value, param.shape, value.dtype)


def _check_moment(name: str, saved: Tensor, param: Tensor, state_dtype: Any, is_scale: bool) -> None:
    """Codes are kept of row-major parameters alone."""
    dtype = moment_dtype(param.shape, state_dtype)
    if dtype == torch.uint8 and not param.is_contiguous():
        dtype = torch.float32
    _check_like(name, saved, scale_shape(param.shape) if is_scale else param.shape, dtype)


def restore(parts: dict[str, Any], content: dict[str, Any], rng: bool) -> None:
    """Restore a checked state. If a part raises, the parts before it get their previous state back."""
    undo: list[Callable[[], None]] = []
    try:
        for name in (
            "data",
            "scheduler",
            "scaler",
            "optimizer",
            "model",
        ):  # the last two cannot be undone, and do not fail after check
            part, state = parts[name], content.get(name)
            if isinstance(part, (torch.nn.Module, FusedOptimizer)):
                part.load_state_dict(state)  # copies
            elif part is not None and not (isinstance(part, torch.amp.GradScaler) and not part.is_enabled()):
                before = copy.deepcopy(part.state_dict())
                undo.append(lambda part=part, before=before: part.load_state_dict(before))
                part.load_state_dict(map_tensors(Tensor.clone, state))
    except BaseException:
        for step in reversed(undo):
            with contextlib.suppress(Exception):
                step()
        raise
    if isinstance(parts["optimizer"], FusedOptimizer):
        parts["optimizer"].store.mark_clean()  # the model's load wrote the values that belong to the masters
    if rng:
        _set_random_state(content["random"])
