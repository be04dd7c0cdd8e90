"""Lists of parameters with all their state, for the samples of the update ops and their tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES, flat
from .._dispatch.library import Sample
from .._raw._block8 import FIRST, SECOND, encode
from .._raw._split_master import SPLITS
from .arguments import UpdateArguments
from .declaration import Declaration
from .state import ALIGN, STOCHASTIC


@dataclass(frozen=True)
class Kind:
    """Storage of a weight."""

    param: torch.dtype = torch.float32
    master: torch.dtype | None = None
    shadow: torch.dtype | None = None
    stochastic: bool = False
    ema: bool = False

    def __str__(self) -> str:
        parts = [self.param, self.master and f"master {self.master}", self.shadow and f"shadow {self.shadow}"]
        parts += [self.stochastic and "stochastic", self.ema and "ema"]
        return "-".join(str(p).replace("torch.", "") for p in parts if p)


def _falling(count: int) -> Tensor:
    return torch.exp2(-(torch.arange(count) % 32).float())


def _weight_and_gradient(shape: tuple[int, ...], generator: torch.Generator, spread: bool) -> tuple[Tensor, Tensor]:
    weight, grad = (torch.randn(shape[::-1], generator=generator) for _ in range(2))
    if len(shape) == 2:
        return weight.t(), grad.t()
    weight, grad = weight.reshape(shape), grad.reshape(shape)
    return weight, grad * _falling(grad.numel()) if spread else grad


class Blocks:
    """A block per entry of ``kinds``, each with a parameter per shape; block i is also param group i. Random, on the CPU.

    Matrices are transposed in memory. A shadow, which is only written, holds NaN.

    Args:
        shapes: of the parameters of a block.
        grad_dtype: ``None`` for the parameter's.
        optional: whether blocks have the optional moments.
        first: moments and steps are zero.
        spread: gradients of vectors, and moments, fall by a factor of 2 from element to element of a block of 32.
        start, size: offset of the first parameter in a block's buffers, rounded up for 8-bit moments (uint8), and the size of the
            others; ``None``: as needed.
    """

    def __init__(
        self,
        declared: Declaration,
        kinds: Sequence[Kind],
        *,
        shapes: Sequence[tuple[int, ...]],
        seed: int = 0,
        grad_dtype: torch.dtype | None = None,
        moment_dtype: torch.dtype = torch.float32,
        optional: bool = True,
        first: bool = False,
        spread: bool = False,
        start: int = 0,
        size: int | None = None,
    ):
        self.declared, self.kinds = declared, list(kinds)
        g = torch.Generator().manual_seed(seed)
        align = ALIGN if moment_dtype == torch.uint8 else 16
        start = -(-start // align) * align
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        #: By kind, then by block.
        self.moments: list[list[Tensor]] = [[] for _ in declared.moments]
        self.steps, self.masters, self.shadows, self.emas = ([] for _ in range(4))
        rows: list[tuple[int, ...]] = []
        for block, kind in enumerate(kinds):
            offsets = [start]
            for shape in shapes:
                offsets.append(offsets[-1] + -(-math.prod(shape) // align) * align)
            total = size or offsets[-1]
            master = torch.zeros(total if kind.master else 0, dtype=kind.master or torch.float32)
            for slot, (shape, offset) in enumerate(zip(shapes, offsets, strict=False)):
                weight, grad = _weight_and_gradient(shape, g, spread)
                param, part = weight.to(kind.param), slice(offset, offset + weight.numel())
                if kind.master in SPLITS:
                    half, master[part] = SPLITS[kind.master](flat(weight), kind.param)
                    flat(param).copy_(half)
                elif kind.master is not None:
                    master[part] = flat(weight)
                self.params.append(param)
                self.grads.append(grad.to(grad_dtype or kind.param))
                rows.append((block, offset, slot, block, 7 * len(rows), 0, 0))
            self.masters.append(master)
            self.shadows.append(
                torch.full((total if kind.shadow else 0,), torch.nan, dtype=kind.shadow or torch.float16)
            )
            self.emas.append(torch.randn(total if kind.ema else 0, generator=g))
            self.steps.append(torch.arange(float(len(shapes))) * (not first))
            for name, buffers in zip(declared.moments, self.moments, strict=True):
                values = torch.randn(total, generator=g) * (not first)
                if spread:
                    values *= _falling(total)
                if name in declared.unsigned or moment_dtype != torch.uint8:
                    values = values.square()  # a second moment is never negative
                if moment_dtype == torch.uint8:
                    values = torch.cat(encode(values, SECOND if name in declared.unsigned else FIRST))
                there = optional or name not in declared.optional
                buffers.append((values if there else values[:0].clone()).to(moment_dtype))
        self.layout = torch.tensor(rows)

    def arguments(
        self,
        *,
        lrs: Sequence[float] = (),
        weight_decays: Sequence[float] = (),
        grad_scale: float | None = None,
        found_inf: float | None = None,
        sum_sq: float | None = None,
        factors: Sequence[float] | None = None,
        ema_decay: float | Sequence[float] = 0.875,
        flags: int | Sequence[int] = 0,
        max_norm: float = 0.0,
        seed: int = 0x1234567 << 32 | 0x89ABCDEF,  # bits in both words of the key
        device: str = "cpu",
        **options: float | Sequence[float],
    ) -> UpdateArguments:
        """Those of a call of the op. ``options``, ``ema_decay`` and ``flags``: a value, or one per group."""
        unknown = set(options) - set(self.declared.options)
        if unknown:
            raise TypeError(f"{self.declared.name} has no {', '.join(sorted(unknown))}")

        def each(value) -> list:
            return list(value) if isinstance(value, (list, tuple)) else [value] * len(self.kinds)

        def there(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [t.to(device) for t in tensors]

        rounding = [STOCHASTIC if kind.stochastic else 0 for kind in self.kinds]
        of_groups = zip(*map(each, {**self.declared.options, **options}.values()), strict=True)
        scalars = [None if s is None else torch.tensor(s, device=device) for s in (grad_scale, found_inf, sum_sq)]
        return UpdateArguments(
            there(self.params),
            there(self.grads),
            there([buffer for buffers in self.moments for buffer in buffers]),
            *map(there, (self.steps, self.masters, self.shadows, self.emas)),
            self.layout,
            there([torch.tensor(lr) for lr in lrs]),
            there([torch.tensor(decay, dtype=torch.float64) for decay in weight_decays]),
            *scalars,
            [value for of_group in of_groups for value in of_group],
            each(ema_decay),
            [flag | bit for flag, bit in zip(each(flags), rounding, strict=True)],
            max_norm,
            seed,
            None if factors is None else torch.tensor(factors, device=device),
        )


def sample(
    declared: Declaration,
    device: str,
    seed: int,
    dtypes: Sequence[torch.dtype],
    *,
    master: torch.dtype | None = None,
    shadow: torch.dtype | None = None,
    ema: bool = False,
    grad_dtype: torch.dtype | None = None,
    moment_dtype: torch.dtype = torch.float32,
    optional: bool = True,
    flags: int = 0,
    lrs: bool = False,
    decays: bool = False,
    scale: float | None = None,
    found: float | None = None,
    max_norm: float | None = None,
    factors: bool = False,
    **options: float,
) -> Sample:
    """A call with one group per dtype, of three params each, one of them empty and one transposed.

    ``master`` is for 16-bit params, ``shadow`` for the others; ``options`` replace those of the declaration.
    """
    kinds = [
        Kind(dtype, master if dtype in HALF_DTYPES else None, None if dtype in HALF_DTYPES else shadow, ema=ema)
        for dtype in dtypes
    ]
    blocks = Blocks(
        declared,
        kinds,
        shapes=((7, 5), (0,), (300,)),
        seed=seed,
        grad_dtype=grad_dtype,
        moment_dtype=moment_dtype,
        optional=optional,
        spread=moment_dtype == torch.uint8,  # codes of all binades
        size=512,
    )
    for buffer in blocks.shadows:  # opcheck compares without equal_nan
        buffer.zero_()
    groups = range(1, len(dtypes) + 1)
    lr = options.pop("lr", declared.options["lr"])
    arguments = blocks.arguments(
        lrs=[0.01 * i for i in groups] if lrs else (),
        weight_decays=[0.1 * (i - 1) for i in groups] if decays else (),
        grad_scale=scale,
        found_inf=found,
        sum_sq=None if max_norm is None else 400.0,
        factors=[(0.25, 1.0, 2.0, 0.5)[i % 4] for i in range(len(blocks.params))] if factors else None,
        ema_decay=0.75,
        flags=flags,
        max_norm=max_norm or 0.0,
        seed=seed << 32 | 5,
        device=device,
        lr=[lr * i for i in groups],
        **options,
    )
    return arguments.of_op(), {}
