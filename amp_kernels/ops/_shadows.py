"""Shadows: 16-bit copies of float32 weights, written by an optimizer's step and read by matrix products under autocast.

A shadow is found by its weight, and holds as long as the weight's version counter and address are those it was written at. A call
that records no gradient reads no shadow: evaluation may run on weights that averaging put in through ``.data``, which no counter sees.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .._checks.modules import check_module
from .._dispatch import walks

_CHECK = os.environ.get("AMP_KERNELS_CHECK_SHADOWS") == "1"


class Stamps:
    """The version counters and addresses of parameters at the time when their shadows were written."""

    __slots__ = ("addresses", "versions")

    def __init__(self, count: int):
        self.versions, self.addresses = array("q", bytes(8 * count)), [0] * count


class Shadow:
    """A parameter's 16-bit copy. Owns neither of the two. Its stamp is number ``place`` of ``stamps``."""

    __slots__ = ("param", "place", "stamps", "view")

    def __init__(self, param: Tensor, view: Tensor, stamps: Stamps, place: int):
        # Bound now: while the interpreter exits, a parameter may outlive this module's names.
        key, forget = id(param), _shadows.pop
        self.param = weakref.ref(param, lambda _: forget(key, None))
        self.view = weakref.ref(view)
        self.stamps, self.place = stamps, place
        self.stamp(param)

    def stamp(self, param: Tensor) -> None:
        self.stamps.versions[self.place], self.stamps.addresses[self.place] = param._version, param.data_ptr()

    def fresh(self, param: Tensor) -> bool:
        stamps, place = self.stamps, self.place
        return stamps.versions[place] == param._version and stamps.addresses[place] == param.data_ptr()


_shadows: dict[int, Shadow] = {}  # by id(param)


def shadows_exist() -> bool:
    """True if any parameter has a shadow."""
    return bool(_shadows)


def _shadow_of(param: Tensor) -> Shadow | None:
    shadow = _shadows.get(id(param))
    return shadow if shadow is not None and shadow.param() is param else None


def refresh_shadow(param: Tensor, view: Tensor) -> None:
    """Copy ``param`` into ``view``, rounded to nearest even, and declare that its up-to-date shadow.

    The optimizer keeps ``view`` alive; the shadow dies with the optimizer.
    """
    with torch.no_grad():
        view.copy_(param)
    shadow = _shadow_of(param)
    if shadow is not None and shadow.view() is view:
        shadow.stamp(param)
    else:
        _shadows[id(param)] = Shadow(param, view, Stamps(1), 0)


def forget_shadows(params: Iterable[Tensor]) -> None:
    """Declare that parameters have none until the next :func:`refresh_shadow`."""
    for param in params:
        _shadows.pop(id(param), None)


class ShadowList:
    """Parameters with shadows that are stepped together. The usual case, that all are up to date, at the speed of C."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]):
        self.pairs = pairs
        self.params = [param for param, _ in pairs]
        self.keys = list(map(id, self.params))
        self.stamps = Stamps(len(pairs))
        self.shadows: list[Shadow] = []  # of these stamps

    def renew(self) -> None:
        """Before a step: copy what is out of date, because a step that is skipped writes no shadow."""
        if (
            walks.same_objects(list(map(_shadows.get, self.keys)), self.shadows)
            and walks.same_versions(self.params, self.stamps.versions)
            and list(map(Tensor.data_ptr, self.params)) == self.stamps.addresses
        ):
            return
        for place, (param, view) in enumerate(self.pairs):
            shadow = _shadow_of(param)
            if shadow is None or shadow.view() is not view or not shadow.fresh(param):
                refresh_shadow(param, view)
                shadow = _shadows[id(param)]
            if shadow.stamps is not self.stamps:
                _shadows[id(param)] = Shadow(param, view, self.stamps, place)
        self.shadows = list(map(_shadows.get, self.keys))

    def stamp(self) -> None:
        """After a step, which has written weights and shadows."""
        walks.note_versions(self.params, self.stamps.versions)


def fresh_shadow(weight: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """The up-to-date 16-bit copy of ``weight`` in ``dtype``, autocast's, that an optimizer keeps, or ``None``.

    Up to date means that the version counter and the address of ``weight`` are those seen when the copy was written.
    Writes through ``.data`` change neither and need :func:`amp_kernels.refresh_shadows` before training goes on. ``None`` where no
    gradient is recorded, and while torch.compile traces. ``AMP_KERNELS_CHECK_SHADOWS=1``, set before the import, compares
    the values at each use and raises if they differ (slow).
    """
    if dtype is None or weight.dtype is dtype or not _shadows or torch.compiler.is_compiling():
        return None
    shadow, param = _shadow_of(weight), weight
    if shadow is None and weight._is_view():
        param = weight._base  # of a transposed weight, as GPT-2's Conv1D has it, the parameter
        transposed = param.ndim == 2 and weight.shape == param.shape[::-1] and weight.stride() == param.stride()[::-1]
        shadow = _shadow_of(param) if transposed else None
    if shadow is None or not torch.is_grad_enabled():
        return None
    view = shadow.view()
    if view is None or view.dtype is not dtype or not shadow.fresh(weight):
        return None
    view = view if param is weight else view.t()
    if _CHECK and not torch.equal(view, weight.detach().to(dtype)):
        raise RuntimeError(
            f"the {dtype} shadow of a weight of shape {list(weight.shape)} is out of date: the weight "
            "was written through .data or by compiled or captured code; call amp_kernels.refresh_shadows(model) after that"
        )
    return view


def with_shadow(place: int) -> Callable[[tuple, dict, torch.dtype], tuple[tuple, dict]]:
    """A function that completes a call under autocast with the shadow of its second argument; ``shadow`` is argument number
    ``place``."""

    def complete(args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
        if len(args) > place or "shadow" in kwargs:
            return args, kwargs
        shadow = fresh_shadow(args[1], dtype)
        return args, kwargs if shadow is None else {**kwargs, "shadow": shadow}

    return complete


def refresh_shadows(model: torch.nn.Module) -> None:
    """Bring the 16-bit shadows of a model's parameters up to date after writes that version counters do not see.

    That is: writes through ``.data``, and by compiled or captured code. Call it before training goes on; evaluation without gradients
    reads the weights themselves. Parameters without a shadow are passed over.

    Examples:
        >>> model = ak.nn.Linear(4, 2, bias=False)
        >>> optimizer = ak.optim.AdamW(model.parameters(), shadow_dtype=torch.bfloat16)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()  # makes the bfloat16 copy of the weight
        >>> model.weight.data.fill_(2.0)[0, 0]
        tensor(2.)
        >>> ak.refresh_shadows(model)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     model(torch.ones(1, 4)).data
        tensor([[8., 8.]], dtype=torch.bfloat16)
    """
    check_module("refresh_shadows", model)
    for param in model.parameters():
        shadow = _shadow_of(param)
        view = None if shadow is None else shadow.view()
        if view is not None:
            refresh_shadow(param, view)
