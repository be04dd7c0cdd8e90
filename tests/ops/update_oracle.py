"""Arguments of adamw_, sgd_, lion_ and lamb_ for tests, and what their results must be in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from amp_kernels import _host

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = {F16: "float16", BF16: "bfloat16"}
STOCHASTIC = 8  # bit of a group's flags
SEED = 0x1234567 << 32 | 0x89ABCDEF  # both words of the key
EMA_DECAY = 0.875

#: shapes with a tail, an empty one, a scalar and one that spans several chunks of the CPU kernels
SHAPES = ((7, 5), (0, 3), (), (1031,), (17003,))


@dataclass(frozen=True)
class Kind:
    """How a weight is kept."""

    param: torch.dtype = F32
    master: torch.dtype | None = None
    shadow: torch.dtype | None = None
    stochastic: bool = False
    ema: bool = False

    def __str__(self):
        parts = [self.param, self.master and f"master {self.master}", self.shadow and f"shadow {self.shadow}"]
        parts += [self.stochastic and "stochastic", self.ema and "ema"]
        return "-".join(str(p).replace("torch.", "") for p in parts if p)


KINDS = [
    Kind(F32),
    Kind(F32, shadow=F16),
    Kind(F32, shadow=BF16),
    Kind(F16),
    Kind(BF16),
    Kind(F16, master=F32),
    Kind(BF16, master=F32),
    Kind(F16, master=torch.int16),
    Kind(BF16, master=torch.int16),
    Kind(F16, stochastic=True),
    Kind(BF16, stochastic=True, ema=True),
    Kind(F32, shadow=BF16, ema=True),
    Kind(F16, master=torch.int16, ema=True),
]


def codes(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16).numpy().view(np.uint16)


def split(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight, remainder = _host.split_master(x.numpy(), NAMES[dtype])
    return torch.from_numpy(weight.view(np.int16)).view(dtype), torch.from_numpy(remainder)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_host.join_master(codes(weight), remainder.numpy(), NAMES[weight.dtype]))


def flat(t: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order."""
    return t.as_strided((t.numel(),), (1,))


@dataclass
class Update:
    """One call: a block per entry of ``kinds``, each with a parameter per shape; block i is also param group i."""

    kinds: list[Kind]
    seed: int = 0
    shapes: tuple = SHAPES
    grad_dtype: torch.dtype | None = None  # None: the param's
    moment_dtype: torch.dtype = F32
    moments: int = 2
    first: bool = False  # moments and steps zero
    amsgrad: bool = False  # adamw_ only: with a maximum of the second moment
    params: list = field(default_factory=list)
    grads: list = field(default_factory=list)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        self.buffers = [[] for _ in range(self.moments)]
        self.steps, self.masters, self.shadows, self.emas, self.maxima, rows = [], [], [], [], [], []
        for block, kind in enumerate(self.kinds):
            offsets, total = [], 16  # the first 16 elements belong to nobody
            for shape in self.shapes:
                offsets.append(total)
                total += -(-torch.Size(shape).numel() // 16) * 16
            master = torch.zeros(total if kind.master else 0, dtype=kind.master or F32)
            for slot, (shape, offset) in enumerate(zip(self.shapes, offsets, strict=True)):
                weight = torch.randn(shape, generator=g)
                n = weight.numel()
                param = weight.to(kind.param)
                if kind.master == F32:
                    master[offset : offset + n] = weight.flatten()
                elif kind.master == torch.int16:
                    half, remainder = split(weight.flatten(), kind.param)
                    param = half.reshape(shape)
                    master[offset : offset + n] = remainder
                self.params.append(param)
                self.grads.append(torch.randn(shape, generator=g).to(self.grad_dtype or kind.param))
                rows.append((block, offset, slot, block, 1000 * block + 7 * slot))
            for buffer in self.buffers:
                values = torch.randn(total, generator=g).square()
                buffer.append((values * (not self.first)).to(self.moment_dtype))
            average = torch.randn(total, generator=g)
            self.emas.append(average if kind.ema else average[:0].clone())
            largest = torch.randn(total, generator=g).square() * (not self.first)
            self.maxima.append((largest if self.amsgrad else largest[:0].clone()).to(self.moment_dtype))
            self.masters.append(master)
            self.shadows.append(torch.full((total if kind.shadow else 0,), torch.nan, dtype=kind.shadow or F16))
            self.steps.append(torch.zeros(len(self.shapes)) if self.first else torch.arange(len(self.shapes)).float())
        self.layout = torch.tensor(rows)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything the op may write, and the gradients."""
        lists = (self.params, self.grads, *self.buffers, self.maxima, self.steps, self.masters, self.shadows, self.emas)
        return [t for tensors in lists for t in tensors]

    def snapshot(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.tensors]

    def arguments(self, *moments, lrs=(), grad_scale=None, found_inf=None, sum_sq=None) -> tuple:
        scalars = (None if s is None else torch.tensor(s) for s in (grad_scale, found_inf, sum_sq))
        state = (*moments, self.steps, self.masters, self.shadows, self.emas, self.layout)
        return (self.params, self.grads, *state, [torch.tensor(x) for x in lrs], *scalars)

    def adamw(self, *, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01, op=None, **rest):
        """``lr`` and the others: one number, or one per group."""
        op = op or torch.ops.amp_kernels.adamw_.default
        self._call(op, [*self.buffers, self.maxima], [lr, beta1, beta2, eps, weight_decay], **rest)

    def sgd(self, *, lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.01, op=None, **rest):
        op = op or torch.ops.amp_kernels.sgd_.default
        self._call(op, self.buffers, [lr, momentum, dampening, weight_decay], **rest)

    def lion(self, *, lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, op=None, **rest):
        op = op or torch.ops.amp_kernels.lion_.default
        self._call(op, self.buffers, [lr, beta1, beta2, weight_decay], **rest)

    def lamb(self, *, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, op=None, **rest):
        op = op or torch.ops.amp_kernels.lamb_.default
        self._call(op, self.buffers, [lr, beta1, beta2, eps, weight_decay], **rest)

    def _call(self, op, moments, numbers, *, ema_decay=EMA_DECAY, flags=0, max_norm=0.0, seed=SEED, **tensors):
        groups = [per_group(x, len(self.kinds)) for x in (*numbers, ema_decay, flags)]
        for i, kind in enumerate(self.kinds[: len(groups[-1])]):
            groups[-1][i] |= STOCHASTIC if kind.stochastic else 0
        op(*self.arguments(*moments, **tensors), *groups, max_norm, seed)

    def pieces(self, i: int) -> tuple[Kind, slice, int, int]:
        """Of parameter i: how it is kept, its elements of the block's buffers, its block and its slot."""
        block, offset, slot, *_ = self.layout[i].tolist()
        return self.kinds[block], slice(offset, offset + self.params[i].numel()), block, slot

    def weight(self, i: int) -> torch.Tensor:
        """The fp32 weight that parameter i stands for, in memory order."""
        kind, piece, block, _ = self.pieces(i)
        if kind.master == F32:
            return self.masters[block][piece].clone()
        if kind.master == torch.int16:
            return join(flat(self.params[i]), self.masters[block][piece])
        return flat(self.params[i]).float()

    def moment(self, k: int, i: int) -> torch.Tensor:
        _, piece, block, _ = self.pieces(i)
        return (self.maxima if k == 2 else self.buffers[k])[block][piece].clone()

    def ema(self, i: int) -> torch.Tensor:
        _, piece, block, _ = self.pieces(i)
        return self.emas[block][piece].clone()

    def step(self, i: int) -> float:
        _, _, block, slot = self.pieces(i)
        return self.steps[block][slot].item()


def per_group(value, groups: int) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value] * groups


def store_error(kind: Kind, value: torch.Tensor) -> torch.Tensor:
    """What keeping a weight in this way may add to its error: half a unit in the last place (that of subnormal numbers
    included) of a 16-bit weight that is its own master, a whole one if the rounding is stochastic; a master split over
    fp16 ends at units of 2^-40."""
    units = 2.0 if kind.stochastic else 1.0
    if kind.master is None and kind.param == BF16:
        return units * (2.0**-8 * value.abs() + 2.0**-134)
    if kind.master is None and kind.param == F16:
        return units * (2.0**-11 * value.abs() + 2.0**-25)
    return torch.full_like(value, 2.0**-41)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    error = (actual.double() - expected).abs()
    worst = int((error / bound).argmax()) if error.numel() else 0
    assert (error <= bound).all(), (
        f"{what}[{worst}] is {actual[worst]}, expected {expected[worst]}: {(error / bound)[worst]:.2f} bounds"
    )


def assert_visible(update: Update, i: int) -> None:
    """What the model sees (the 16-bit weight, the shadow) is the fp32 weight, rounded by the rule of its kind."""
    kind, piece, block, _ = update.pieces(i)
    weight = update.weight(i)
    if kind.master == F32:
        assert torch.equal(flat(update.params[i]), weight.to(kind.param))
    if kind.master == torch.int16:
        assert np.array_equal(codes(flat(update.params[i])), _host.round_half_away(weight.numpy(), NAMES[kind.param]))
    if kind.shadow:
        assert torch.equal(update.shadows[block][piece], weight.to(kind.shadow))


def assert_averaged(update: Update, before: Update, i: int, weight: torch.Tensor, bound: torch.Tensor) -> None:
    """The average has gone 1 - EMA_DECAY of the way to the new weight, which is known to within ``bound`` and is not
    rounded to 16 bits before."""
    if update.pieces(i)[0].ema:
        old = before.ema(i).double()
        wanted = old + (1 - EMA_DECAY) * (weight - old)
        size = old.abs() + weight.abs()
        assert_close(update.ema(i), wanted, (1 - EMA_DECAY) * bound + 3 * 2.0**-24 * size, "ema")
