"""Blocks: how an optimizer's state reaches the update ops, and what their references share.

Only parameters and gradients travel as lists of tensors. Everything else lives in flat 1-D buffers: a *block* is a set
of parameters of one device, dtype and group, and holds one buffer per kind of state (moments, masters, shadows) plus
one step counter per parameter. ``layout``, an int64 CPU tensor ``[n, 5]``, says where: row ``i`` is ``(block, offset,
slot, group, index)``; the state of parameter ``i`` is ``buffer[offset : offset + numel]`` in each buffer of ``block``,
its step counter is ``steps[slot]``, its hyper-parameters are entry ``group`` of the lists. ``index``, 0 to 2^32 - 1, is
its number in the optimizer, which its random bits depend on. Elements are taken in memory order, so state and parameter
match whatever the strides.

The C++ ops of the optimizers also take a *table*, int64 ``[n, 10]`` on the CPU, in the place of ``layout``, with
``params`` and ``grads`` empty: a row is ``(address of the parameter, address of the gradient, numel, dtype of the
parameter, dtype of the gradient)`` and the row of the layout; ``check_and_norm(grads, table=...)`` reads the gradients
from it, and of ``grads`` the device alone. That saves some 140 ns a tensor and list. An address cannot be checked:
:mod:`amp_kernels.optim._cached_step` makes tables for the optimizers, and nobody else should. References, Triton kernels
and the emulator know lists only.

A buffer with 0 elements means the block has no such state. Masters: float32 holds full masters of 16-bit parameters,
int16 the remainders of :mod:`._master`; without one the parameter is its own master, rounded to nearest even or, with
the flag ``STOCHASTIC`` of its group, stochastically (:mod:`._stochastic`). Shadows: float16 or bfloat16 copies of
float32 parameters. Emas: float32 exponential moving averages of the float32 weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._dispatch.library import Op, Sample
from . import _lists
from ._lists import HALF_DTYPES
from ._master import join_master, split_master
from ._stochastic import round_stochastic, rounding_bits

MAXIMIZE, NESTEROV, COUPLED_DECAY, STOCHASTIC, NO_BIAS_CORRECTION, ADAPT_ALL = 1, 2, 4, 8, 16, 32  # a group's flags
MAX_SEED = 2**63 - 1

TABLE_COLUMNS, TABLE_GRAD = 10, 1  # csrc/ops/tensor_table.h
TABLE_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # torch's own numbers
OPTIONAL = ("masters", "shadows", "emas", "momentum_buffers", "max_exp_avg_sqs")  # what a block may be without

PARAMS = (torch.float16, torch.bfloat16, torch.float32)
GRADS = (torch.float16, torch.bfloat16, torch.float32)


def refuse_table(op: str, table: Tensor | None) -> None:
    """Raise if a reference, which knows lists only, is handed a table."""
    if table is not None:
        raise NotImplementedError(f"{op}: only the compiled kernels take a table; accepted here: lists of tensors")


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """float32 ``a * b + c`` with one rounding, as the compiled kernels compute it (the product is exact in double)."""
    return (b.double() * a + c.double()).float()


def sqrt(x: Tensor) -> Tensor:
    """float32 root, correctly rounded: torch's own on the CPU (a vector math library) may be one unit off."""
    return x.double().sqrt().float()


def rounded(value: float | Tensor) -> float | Tensor:
    """A scalar derived in double, rounded once to float32."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu").item()


@dataclass
class StepScalars:
    """What the device decided about this step."""

    inv_scale: Tensor | float
    clip: Tensor | float
    taken: Tensor | None  # None: never skipped

    @classmethod
    def make(
        cls, grad_scale: Tensor | None, found_inf: Tensor | None, sum_sq: Tensor | None, max_norm: float
    ) -> StepScalars:
        clip: Tensor | float = 1.0
        if sum_sq is not None:
            clip = (max_norm / (sqrt(sum_sq.reshape(())) + 1e-6)).clamp(max=1.0)
        taken = None if found_inf is None else ~(found_inf.reshape(()) > 0)
        return cls(_lists.inverse_scale(grad_scale), clip, taken)

    def gradient(self, grad: Tensor, flags: int) -> Tensor:
        """The gradient that the update sees, float32 in memory order."""
        value = _lists.flat(grad).float() * self.inv_scale * self.clip
        return -value if flags & MAXIMIZE else value

    def store(self, target: Tensor, value: Tensor) -> None:
        """Write ``value`` rounded to nearest even, unless the step is skipped."""
        value = value.to(target.dtype)
        target.copy_(value if self.taken is None else torch.where(self.taken, value, target))


def piece(buffer: Tensor, offset: int, numel: int) -> Tensor | None:
    """One parameter's part of a block's buffer, or ``None`` if the block has none."""
    return None if buffer.numel() == 0 else buffer[offset : offset + numel]


@dataclass
class Weight:
    """One parameter's weight in every form that is kept of it."""

    param: Tensor  # in memory order, as all of them
    master: Tensor | None
    shadow: Tensor | None
    ema: Tensor | None
    ema_decay: float
    random16: Tensor | None  # bits for stochastic rounding

    @classmethod
    def at(
        cls,
        param: Tensor,
        row: Sequence[int],
        masters: Sequence[Tensor],
        shadows: Sequence[Tensor],
        emas: Sequence[Tensor],
        ema_decay: Sequence[float],
        flags: Sequence[int],
        seed: int,
        step: Tensor,
    ) -> Weight:
        """The weight that row ``row`` of the layout places; ``step``: its count after the increment."""
        block, offset, _, group, index = row
        n = param.numel()
        master, shadow, ema = (piece(buffers[block], offset, n) for buffers in (masters, shadows, emas))
        stochastic = flags[group] & STOCHASTIC and master is None and param.dtype in HALF_DTYPES
        random16 = rounding_bits(seed, step, index, n) if stochastic else None
        return cls(_lists.flat(param), master, shadow, ema, ema_decay[group], random16)

    def load(self) -> Tensor:
        """The float32 weight to be updated."""
        if self.master is None:
            return self.param.float()
        return self.master.clone() if self.master.dtype == torch.float32 else join_master(self.param, self.master)

    def store(self, scalars: StepScalars, weight: Tensor) -> None:
        if self.ema is not None:  # torch.lerp's form: an average that equals the weight stays
            scalars.store(self.ema, fma(rounded(1 - self.ema_decay), weight - self.ema, self.ema))
        if self.master is not None and self.master.dtype == torch.int16:
            half, remainder = split_master(weight, self.param.dtype)
            scalars.store(self.param, half)
            scalars.store(self.master, remainder)
            return
        if self.random16 is not None:
            scalars.store(self.param, round_stochastic(weight, self.param.dtype, self.random16))
        else:
            scalars.store(self.param, weight)
        if self.master is not None:
            scalars.store(self.master, weight)
        if self.shadow is not None:
            scalars.store(self.shadow, weight)


MOMENTS = (torch.float32, torch.bfloat16)
KEPT = {"masters": (torch.float32, torch.int16), "shadows": HALF_DTYPES, "emas": (torch.float32,)}
NUMBERS = {"lr": 0.0, "eps": 0.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": -math.inf}  # the least accepted
RATES = ("beta1", "beta2", "ema_decay")


def checked_call(op: Op, arguments: dict[str, Any]) -> None:
    """Check the arguments of an update op and take the step.

    Args:
        op: an op whose schema has the order that all updates have: params, grads, moments, steps, masters, shadows,
            emas, layout, lrs, grad_scale, found_inf, sum_sq, numbers by group, max_norm, seed.
        arguments: all of them, by name and in this order: the caller's ``locals()``.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lengths, shapes, strides, devices or places in a block do not match, or a number is out of range or
            NaN.
    """
    names = list(arguments)
    moments = names[names.index("grads") + 1 : names.index("steps")]
    numbers = names[names.index("sum_sq") + 1 : names.index("max_norm")]
    for name in numbers:
        if name in NUMBERS:
            for i, value in enumerate(arguments[name]):
                _lists.check_number(op.name, f"{name}[{i}]", value, NUMBERS[name])
        elif name in RATES:
            check_betas(op.name, name, arguments[name])
    dtypes = {**dict.fromkeys(moments, MOMENTS), **KEPT}
    _check_update(
        op.name,
        **{name: arguments[name] for name in ("params", "grads", "steps", "layout", "lrs", "max_norm", "seed")},
        buffers={name: (arguments[name], accepted) for name, accepted in dtypes.items()},
        scalars={name: arguments[name] for name in ("grad_scale", "found_inf", "sum_sq")},
        hyper={name: arguments[name] for name in numbers},
    )
    op(*arguments.values())


def _check_update(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    layout: Tensor,
    lrs: Sequence[Tensor],
    max_norm: float,
    seed: int,
    buffers: dict[str, tuple[Sequence[Tensor], tuple[torch.dtype, ...]]],
    scalars: dict[str, Tensor | None],
    hyper: dict[str, Sequence[float]],
) -> None:
    """Raise unless the tensors fit together. ``buffers`` maps each name to its list and accepted dtypes."""
    _lists.check_list(op, "params", params, PARAMS)
    _lists.check_list(op, "grads", grads, GRADS)
    device = params[0].device
    if len(grads) != len(params):
        raise ValueError(f"{op}: {len(params)} params and {len(grads)} grads; accepted: one grad for each param")
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if param.shape != grad.shape or param.device != grad.device or not _lists.same_order(param, grad):
            raise ValueError(
                f"{op}: params[{i}] is {_lists.describe(param)} and grads[{i}] {_lists.describe(grad)}; "
                "shape, strides and device must be the same"
            )
    _check_buffers(op, device, buffers, steps)
    _check_layout(op, params, buffers, steps, layout, len(hyper["lr"]))
    for name, scalar in scalars.items():
        if scalar is not None:
            _lists.check_scalar(op, name, scalar, device)
    groups = len(hyper["lr"])
    for name, values in hyper.items():
        if len(values) != groups:
            raise ValueError(f"{op}: {name} has {len(values)} entries and lr {groups}; accepted: one per param group")
    if lrs and len(lrs) != groups:
        raise ValueError(f"{op}: lrs has {len(lrs)} entries; accepted: none, or one per param group ({groups})")
    for i, lr in enumerate(lrs):
        _lists.check_scalar(op, f"lrs[{i}]", lr, device)
    if scalars["sum_sq"] is not None:
        _lists.check_number(op, "max_norm", max_norm, 0.0)
    _lists.check_number(op, "seed", seed, 0, MAX_SEED)


def check_betas(op: str, argument: str, values: Sequence[float]) -> None:
    """Raise unless every decay rate of an average is in [0, 1); NaN never passes."""
    for i, value in enumerate(values):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{op}: {argument}[{i}] is {value}; accepted: a number from 0 to below 1")


def _check_buffers(op: str, device: torch.device, buffers: dict, steps: Sequence[Tensor]) -> None:
    for name, (tensors, dtypes) in {**buffers, "steps": (steps, (torch.float32,))}.items():
        if len(tensors) != len(steps):
            raise ValueError(f"{op}: {name} has {len(tensors)} entries and steps {len(steps)}; accepted: one per block")
        for b, buffer in enumerate(tensors):
            if buffer.dtype not in dtypes:
                raise TypeError(f"{op}: {name}[{b}] is {buffer.dtype}; accepted: {_lists.names(dtypes)}")
            if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != device:
                raise ValueError(
                    f"{op}: {name}[{b}] is {_lists.describe(buffer)}; accepted: a flat, contiguous buffer on {device}"
                )


def _check_layout(
    op: str, params: Sequence[Tensor], buffers: dict, steps: Sequence[Tensor], layout: Tensor, groups: int
) -> None:
    if layout.dtype != torch.int64 or layout.device.type != "cpu" or tuple(layout.shape) != (len(params), 5):
        raise ValueError(f"{op}: layout is {_lists.describe(layout)}; accepted: int64[{len(params)}, 5] on the CPU")
    for i, (block, offset, slot, group, index) in enumerate(layout.tolist()):
        row = f"{op}: layout[{i}] is {(block, offset, slot, group, index)}"
        if not 0 <= block < len(steps):
            raise ValueError(f"{row}; there are {len(steps)} blocks")
        if not 0 <= slot < steps[block].numel():
            raise ValueError(f"{row}; steps[{block}] has {steps[block].numel()} slots")
        if not 0 <= group < groups:
            raise ValueError(f"{row}; there are {groups} param groups")
        if not 0 <= index < 2**32:
            raise ValueError(f"{row}; an index is from 0 to {2**32 - 1}")
        end = offset + params[i].numel()
        for name, (tensors, _) in buffers.items():
            size = tensors[block].numel()
            if offset < 0 or (end > size and not (size == 0 and name in OPTIONAL)):
                raise ValueError(f"{row}; {name}[{block}] has {size} elements, params[{i}] needs {offset} to {end}")
        for name, accepted in (("masters", HALF_DTYPES), ("shadows", (torch.float32,))):
            if buffers[name][0][block].numel() and params[i].dtype not in accepted:
                raise TypeError(
                    f"{op}: params[{i}] is {params[i].dtype} and block {block} has {name}; "
                    f"accepted: {_lists.names(accepted)}"
                )


def sample_blocks(
    device: str,
    seed: int,
    dtypes: Sequence[torch.dtype],
    moments: int,
    *,
    grad_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    master: torch.dtype | None = None,
    shadow: torch.dtype | None = None,
    ema: bool = False,
) -> dict:
    """Arguments for a small update: one block of three params (one empty, one transposed) and one group per dtype."""
    generator = torch.Generator().manual_seed(seed)
    out: dict = {
        "params": [],
        "grads": [],
        "moments": [[] for _ in range(moments)],
        "steps": [],
        "masters": [],
        "shadows": [],
        "emas": [],
    }
    rows = []
    for block, dtype in enumerate(dtypes):
        total = 0
        masters = torch.zeros(512, dtype=master) if master is not None and dtype in HALF_DTYPES else torch.zeros(0)
        for slot, shape in enumerate([(5, 7), (0,), (300,)]):
            weight = torch.randn(shape, generator=generator)
            grad = torch.randn(shape, generator=generator)
            if slot == 0:
                weight, grad = weight.t(), grad.t()
            param = weight.to(dtype)
            rows.append((block, total, slot, block, 7 * len(rows)))
            if masters.numel():
                part = masters[total : total + param.numel()]
                part.copy_(
                    _lists.flat(weight) if master == torch.float32 else split_master(_lists.flat(weight), dtype)[1]
                )
                if master == torch.int16:
                    _lists.flat(param).copy_(split_master(_lists.flat(weight), dtype)[0])
            out["params"].append(param.to(device))
            out["grads"].append(grad.to(device, grad_dtype or dtype))
            total += -(-param.numel() // 16) * 16
        out["masters"].append(masters.to(device))
        has_shadow = shadow is not None and dtype == torch.float32
        out["shadows"].append(torch.zeros(512 if has_shadow else 0, dtype=shadow or torch.float16, device=device))
        out["emas"].append(torch.randn(512 if ema else 0, generator=generator).to(device))
        out["steps"].append(torch.arange(3, dtype=torch.float32, device=device))
        for moment in out["moments"]:  # squares, because a second moment is never negative
            moment.append(torch.randn(512, generator=generator).square().to(device, state_dtype))
    return {**out, "layout": torch.tensor(rows)}


def sample_call(
    device: str,
    seed: int,
    dtypes: Sequence[torch.dtype],
    moments: int,
    *hyper: float,
    lr: float,
    flags: int = 0,
    lrs: bool = False,
    scale: float | None = None,
    found: float | None = None,
    max_norm: float | None = None,
    **options,
) -> Sample:
    """A call of an update op on :func:`sample_blocks`; ``hyper``: what stands between ``lr`` and ``ema_decay``."""
    b = sample_blocks(device, seed, dtypes, moments, **options)
    groups = len(dtypes)

    def scalar(value):
        return None if value is None else torch.tensor(value, device=device)

    return (
        b["params"],
        b["grads"],
        *b["moments"],
        b["steps"],
        b["masters"],
        b["shadows"],
        b["emas"],
        b["layout"],
        [scalar(0.01 * (i + 1)) for i in range(groups)] if lrs else [],
        scalar(scale),
        scalar(found),
        scalar(None if max_norm is None else 400.0),
        [lr * (i + 1) for i in range(groups)],
        *([value] * groups for value in hyper),
        [0.75] * groups,
        [flags] * groups,
        max_norm or 0.0,
        seed << 32 | 5,  # bits in both words of the key
    ), {}
