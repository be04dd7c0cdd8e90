"""Attention of transformers whose rotary embedding, with the norms of queries and keys in front of it, is :func:`amp_kernels.rotary`.

The attention's own forward runs, whatever it does besides, but finds another function under the name ``apply_rotary_pos_emb``. Its
norms return stand-ins for tensors. The rotary embedding makes the norm of a stand-in in its own pass; everything else that gets one
sees the normalised tensor. A function of that name counts only if it computes the formula on a few numbers.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch import autocast
from .._dispatch.library import PLAIN
from .._raw.rotary import MAX_WIDTH, turned
from ..ops.rotary import rotary
from . import copied_norm
from ._derived import base_of, shows
from ._probe import same, standing_in, values
from ._wrapped import is_untouched, own_class
from .norm import RMSNorm
from .stand_in import StandIn, plain

NAME = "apply_rotary_pos_emb"


class _Normed(StandIn):
    """Stands for ``norm(x)``, which is computed when somebody asks for it.

    As a tensor it is NaN, with a gradient that raises: for code that reads it past Python, such as a kernel of the user's."""

    module: torch.nn.Module
    x: Tensor

    @classmethod
    def of_norm(cls, norm: torch.nn.Module, x: Tensor) -> _Normed:
        recorded = torch.is_grad_enabled() and (x.requires_grad or norm.weight.requires_grad)
        unknown = _unknown(x.dtype, x.device, recorded).expand(x.shape)
        if recorded:
            unknown = torch._C._functions.DelayedError(_NO_GRADIENT, 1)(unknown)
        return cls.of(unknown, module=norm, x=x)

    @property
    def origin(self) -> Tensor:
        if "_origin" not in vars(self):
            self._origin = self.module(self.x)
        return self._origin

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        own = args[0] if args and type(args[0]) is cls else None
        if own is not None and function in _OF_SHAPE:
            return function(own.x, *args[1:])
        if own is not None and function is Tensor.transpose and not kwargs:
            last = own.x.ndim - 1
            if last not in (dim % own.x.ndim for dim in args[1:]):
                return cls.of_norm(own.module, own.x.transpose(*args[1:]))
        return function(*plain(args), **plain(kwargs or {}))


@functools.cache
def _unknown(dtype: torch.dtype, device: torch.device, recorded: bool) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device, requires_grad=recorded)


_NO_GRADIENT = "convert: with fuse_rotary, queries or keys went to an autograd.Function before their norm was computed"
_OF_SHAPE = {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.device.__get__, Tensor.dim, Tensor.size}


class _LazyNorm:
    """Calls a norm of heads later."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) in PLAIN and args[0].ndim == 4:
            return _Normed.of_norm(self.module, args[0])
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _can_wait(module: torch.nn.Module | None) -> bool:
    """True for a norm that has no hooks, which would see its heads in another order."""
    if module is None or not is_untouched(module):
        return False
    kind = own_class(module)
    return kind is RMSNorm or (kind.forward is copied_norm.forward and base_of(kind) is not None)


def _norms(q: Any, k: Any) -> dict[str, Any] | None:
    """The weights and the epsilon of the norms of two stand-ins, if the rotary embedding can make both."""
    if type(q) is not _Normed or type(k) is not _Normed:
        return None
    found = []
    for each in (q, k):
        norm, weight, columns = each.module, each.module.weight, each.x.shape[-1]
        if type(weight) not in PLAIN or weight.shape != (columns,):
            return None
        copied = type(norm) is not RMSNorm
        if copied and copied_norm.mixed(norm, each.x):
            return None
        eps = copied_norm.epsilon_of(norm) if copied else norm.eps
        found.append((weight.dtype, torch.finfo(torch.float32).eps if eps is None else eps))
    same_kind = found[0] == found[1] and (q.x.dtype == torch.float64) == (found[0][0] == torch.float64)
    return {"q_weight": q.module.weight, "k_weight": k.module.weight, "eps": found[0][1]} if same_kind else None


class _Rotary:
    """In place of a model's function of that name, ``own``."""

    def __init__(self, own: Callable, interleaved: bool, partial: bool):
        self.own, self.interleaved, self.partial = own, interleaved, partial

    def __call__(self, q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        norms = _norms(q, k)
        heads = (q.x, k.x) if norms else (plain(q), plain(k))
        if len(args) == 2 and not kwargs and self._takes(*heads, *args):
            return rotary(*heads, *args, interleaved=self.interleaved, **(norms or {}))
        return self.own(plain(q), plain(k), *args, **kwargs)

    def _takes(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        """True if the result has the dtype that it has without this package, or autocast's."""
        return (
            all(type(t) in PLAIN and t.dtype in FLOATS and t.device == q.device for t in (q, k, cos, sin))
            and q.ndim == k.ndim == 4
            and cos.ndim == 3
            and cos.shape == sin.shape
            and (cos.shape[-1] == q.shape[-1] or (self.partial and cos.shape[-1] < q.shape[-1]))
            and cos.shape[-1] % 2 == q.shape[-1] % 2 == 0
            and q.shape[-1] <= MAX_WIDTH
            and q.dtype == k.dtype
            and cos.dtype == sin.dtype
            and (q.dtype == torch.float64) == (cos.dtype == torch.float64)
            and (autocast.dtype_on(q.device.type) is not None or torch.promote_types(q.dtype, cos.dtype) == q.dtype)
        )


@functools.cache
def _replacement(function: Callable) -> _Rotary | None:
    """``None`` if ``function`` computes something else."""
    width = 8
    q, k = values(2, 3, 5, width, dtype=torch.float32), values(2, 1, 5, width, dtype=torch.float32, seed=0.3)

    def computes(interleaved: bool, rotary_width: int) -> bool:
        cos, sin = (values(2, 5, rotary_width, dtype=torch.float32, seed=seed) for seed in (0.7, 0.9))
        return same(
            lambda x: torch.cat(function(x, k, cos, sin), dim=1),
            lambda x: turned(torch.cat([x, k], dim=1), cos[:, None], sin[:, None], interleaved),
            q,
            1e-5,
        )

    for interleaved in (False, True):
        if computes(interleaved, width):
            return _Rotary(function, interleaved, computes(interleaved, width // 2))
    return None


class _Globals(dict):
    """A module's globals as they are at each look-up, but for one name."""

    def __init__(self, own: dict[str, Any], replacement: _Rotary):
        super().__init__({name: own[name] for name in ("__builtins__", "__name__")} | {NAME: replacement})
        self.own = own

    def __missing__(self, name: str) -> Any:
        return self.own[name]


@functools.cache
def _rebound(forward: Callable) -> Callable | None:
    """``forward`` with :func:`rotary` in place of the function that it calls, also inside decorators; ``None`` if it calls none."""
    if not isinstance(forward, types.FunctionType):
        return None
    closure, namespace = forward.__closure__, forward.__globals__
    if hasattr(forward, "__wrapped__"):
        inner = _rebound(forward.__wrapped__)
        cells = [cell.cell_contents is forward.__wrapped__ for cell in closure or ()]
        if inner is None or not any(cells):
            return None
        closure = tuple(types.CellType(inner) if is_it else cell for is_it, cell in zip(cells, closure, strict=True))
    else:
        replacement = _replacement(namespace[NAME]) if callable(namespace.get(NAME)) else None
        # Attributes would be set on a stand-in of the module.
        writes = any(instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(forward))
        if NAME not in forward.__code__.co_names or replacement is None or writes:
            return None
        namespace = _Globals(namespace, replacement)
    copy = types.FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def fusible(module: torch.nn.Module) -> bool:
    """True if the forward of ``module`` calls a rotary embedding that :func:`amp_kernels.rotary` can make."""
    kind = own_class(module)
    return "forward" not in vars(module) and base_of(kind) is None and _rebound(kind.forward) is not None


@shows("amp_kernels.convert(fuse_rotary=True)")
def forward(self, *args: Any, **kwargs: Any) -> Any:
    base = self._amp_kernels_base
    if torch.compiler.is_compiling():  # the compiler fuses these operations itself
        return base.forward(self, *args, **kwargs)
    norms = {name: _LazyNorm(child) for name, child in self._modules.items() if _can_wait(child)}
    view = standing_in(self, _modules=self._modules | norms) if norms else self
    return _rebound(base.forward)(view, *args, **kwargs)
