"""Update ops: one step of an optimizer over a list of parameters in place, in one or two passes over memory.

:func:`define_update` makes one from a declaration and the formula for one parameter. All have the same signature, so that
one glue serves them in every backend; what an optimizer has of its own is packed into ``moments`` and ``options``, in
the order of the declaration. The compiled rule of the same op, ``csrc/update/rules/<name>.h``, counts on that order, and so does
``_triton/<name>.py``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import KernelOp, Sample, define
from . import declaration
from .declaration import Declaration
from .samples import sample
from .state import MAXIMIZE, STOCHASTIC, StepScalars, Weight

#: The update ops by name.
RULES: dict[str, UpdateOp] = {}

_STATE = "Tensor(b!)[] moments, Tensor(c!)[] steps, Tensor(d!)[] masters, Tensor(e!)[] shadows, Tensor(f!)[] emas"
_NUMBERS = (
    "Tensor[] lrs, Tensor[] weight_decays, Tensor? grad_scale, Tensor? found_inf, Tensor? sum_sq, float[] options, "
    "float[] ema_decay, int[] flags, float max_norm, int seed"
)

#: ``rule(weight, moments, grad, o)``: weight and moments after the step of one parameter. All are float32, in memory
#: order; ``moments`` are those that are there, ``grad`` is unscaled, clipped and negated when maximizing. ``o`` has the
#: group's options by name and its ``flags``, the count of the ``step``, from 1, and the ``dtypes`` the moments are kept
#: in by name.
Rule = Callable[[Tensor, list[Tensor], Tensor, SimpleNamespace], tuple[Tensor, ...]]


class UpdateOp:
    """One step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    The effective gradient is ``grad / grad_scale * clip`` with ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))`` (the
    formula of :func:`torch.nn.utils.clip_grad_norm_`). Arithmetic is float32 whatever is stored. The weight that a rule
    changes is the float32 master if there is one; parameter and shadow receive it rounded, and the average becomes
    ``ema += (1 - ema_decay) * (weight - ema)``. State lies as :mod:`.state` says.

    Args:
        params: float16, bfloat16 or float32, dense, one device; updated.
        grads: same shapes and strides as ``params``, float16, bfloat16 or float32 whatever the param's dtype; only read.
        moments: for each of the declaration's moments one flat float32 or bfloat16 buffer per block, kind after kind; updated.
            Optional ones have 0 elements for a block that does without.
        steps: one float32 buffer per block, one counter per param; incremented.
        masters: per block float32 masters or int16 remainders of 16-bit params, or 0 elements; updated.
        shadows: per block a float16 or bfloat16 copy of float32 params, or 0 elements; overwritten.
        emas: per block float32 exponential moving averages of the float32 weights, or 0 elements; updated.
        layout: int64 ``[n, 5]`` on the CPU, row ``(block, offset, slot, group, index)`` for each param.
        lrs: empty, or one float32 scalar per group that replaces ``lr`` and is read on the device.
        weight_decays: empty, or one float64 scalar per group that replaces ``weight_decay`` and is read on the device.
        grad_scale: loss scale the grads still carry, float32 scalar; ``None`` means 1.
        found_inf: float32 scalar; if it is above 0 nothing changes, step counters included. ``None`` never skips.
        sum_sq: squared norm of the unscaled grads (:func:`~amp_kernels._raw.check_and_norm.check_and_norm`); ``None`` does
            not clip.
        options: the numbers of the declaration, group after group.
        ema_decay: one value per group.
        flags: per group, a sum of bits out of the declaration's (:mod:`.state`).
        max_norm: norm to clip to; read only if ``sum_sq`` is given.
        seed: 0 to 2^63 - 1; with ``index``, step and element it decides the random bits (:mod:`.._raw._stochastic`).

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: lists, shapes, strides, devices or layout do not match, or a number is out of range or NaN. A message
            names a moment or an option by its name and block or group: ``exp_avg[1]``, ``beta1[2]``.
    """

    def __init__(self, declared: Declaration, rule: Rule, samples: Callable[[str], Iterable[Sample]]):
        self.declared, self.rule = declared, rule
        name, family = declared.name, rule.__module__.rpartition(".")[2]
        self.op = define(
            f"{name}(Tensor(a!)[] params, Tensor[] grads, {_STATE}, Tensor layout, {_NUMBERS}) -> ()",
            self.reference,
            samples=samples,
            family=family,
        )
        #: The same in two halves, for a rule that needs norms of tensors: see :meth:`half`.
        self.half_op = self.half_of_table = None
        if declared.norms:
            self.half_op = define(
                f"{name}half_(Tensor(a!)[] params, Tensor[] grads, {_STATE}, Tensor layout, {_NUMBERS}, "
                "Tensor(g!) squares, bool second) -> ()",
                self.half,
                samples=lambda device: _halves(samples(device)),
                family=family,
            )
            self.half_of_table = KernelOp(
                f"_{name}half_table_(Tensor table, {_STATE}, {_NUMBERS}, Tensor(g!) squares, bool second) -> ()"
            )
        #: The same step of the addresses in a table, which stands in the place of ``params``, ``grads`` and ``layout``.
        self.of_table = KernelOp(f"_{name}table_(Tensor table, {_STATE}, {_NUMBERS}) -> ()")
        self._signature = inspect.signature(self.reference)
        own = {"moments": declared.moments, "optional": declared.optional, "options": tuple(declared.options)}
        words = [f"{key}: {', '.join(names)}" for key, names in own.items() if names]
        self.__doc__ = "\n".join([sys.modules[rule.__module__].__doc__ or name, *words, "", inspect.getdoc(type(self))])

    def __call__(self, *args, **kwargs) -> None:
        """Check the arguments and take the step."""
        call = self._signature.bind(*args, **kwargs).args
        declaration.check(self.declared, *call)
        self.op(*call)

    def reference(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: Sequence[Tensor],
        steps: Sequence[Tensor],
        masters: Sequence[Tensor],
        shadows: Sequence[Tensor],
        emas: Sequence[Tensor],
        layout: Tensor,
        lrs: Sequence[Tensor],
        weight_decays: Sequence[Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_sq: Tensor | None,
        options: Sequence[float],
        ema_decay: Sequence[float],
        flags: Sequence[int],
        max_norm: float,
        seed: int,
        *,
        squares: Tensor | None = None,
        second: bool = True,
    ) -> None:
        if layout.is_meta:  # traced without data: nothing is returned, so there is nothing to compute
            return
        scalars = StepScalars.make(grad_scale, found_inf, sum_sq, max_norm)
        for i, (param, grad, row) in enumerate(zip(params, grads, layout.tolist(), strict=True)):
            block, offset, slot, group, _ = row
            count = len(self.declared.options)
            of_group = options[group * count : (group + 1) * count]
            o = SimpleNamespace(**dict(zip(self.declared.options, of_group, strict=True)))
            if lrs:
                o.lr = lrs[group].reshape(()).double()
            if weight_decays:
                o.weight_decay = weight_decays[group].reshape(())
            o.step, o.flags = steps[block][slot] + 1, flags[group]
            o.squares, o.second = None if squares is None else squares[i], second
            stored = {
                name: buffer[offset : offset + param.numel()]
                for name, buffer in zip(self.declared.moments, moments[block :: len(steps)], strict=True)
                if buffer.numel() or name not in self.declared.optional
            }
            o.dtypes = {name: moment.dtype for name, moment in stored.items()}
            weight = Weight.at(param, row, masters, shadows, emas, ema_decay, flags, seed, o.step)
            read = [moment.float() for moment in stored.values()]
            updated, *kept = self.rule(weight.load(), read, scalars.gradient(grad, flags[group]), o)
            if second:
                weight.store(scalars, updated)
            elif param.numel():
                scalars.store(squares[i], updated)
            for moment, value in zip(stored.values(), kept, strict=True):
                scalars.store(moment, value)
            scalars.store(steps[block][slot], o.step)

    def half(self, *args) -> None:
        """One half of a step whose tensors are pieces of larger ones, which must be added up in between.

        ``args`` end with ``squares``, float64 ``[n, 2]``, and ``second``. The first half moves the moments and writes into
        ``squares`` the sums of squares of each weight and its direction; rows of tensors without elements stay. The second
        half moves the weights by what ``squares`` holds by then, and writes no moment. Either half counts the step, so
        the first is given copies of the counters. A skipped half writes nothing.
        """
        *arguments, squares, second = args
        self.reference(*arguments, squares=squares, second=second)


def _halves(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Both halves of each step."""
    for arguments, _ in samples:
        params = arguments[0]
        squares = torch.arange(2.0 * len(params), dtype=torch.float64, device=params[0].device).view(-1, 2)
        yield (*arguments, squares, False), {}
        yield (*arguments, squares.clone(), True), {}


def usual_samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    """Calls over the dtypes, ways to keep a weight and decisions of a step that every rule meets."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    yield call(30, [f32])
    yield call(31, [f32, bf16, f16], scale=1024.0, found=0.0, max_norm=1.0)
    yield call(32, [f32], shadow=bf16, grad_dtype=f16)
    yield call(33, [bf16, f16], master=torch.int16, max_norm=100.0)
    yield call(34, [bf16, f32], master=f32, flags=MAXIMIZE, lrs=True, decays=True)
    yield call(35, [bf16], master=torch.int16, moment_dtype=bf16)
    yield call(36, [f32, f16], found=1.0, scale=4.0, master=f32, shadow=f16)  # skipped
    yield call(37, [bf16, f16, f32], flags=STOCHASTIC, ema=True)
    yield call(38, [bf16, f32], flags=STOCHASTIC, ema=True, found=1.0)  # skipped
    yield call(39, [bf16, f32], master=f32, shadow=bf16, ema=True)


def define_update(
    name: str,
    rule: Rule,
    *,
    moments: tuple[str, ...],
    options: dict[str, float],
    flags: int,
    optional: tuple[str, ...] = (),
    norms: bool = False,
    samples: Callable[[Callable[..., Sample]], Iterable[Sample]] = usual_samples,
) -> UpdateOp:
    """Define the op of an optimizer: see :class:`UpdateOp`.

    Args:
        name: of the op, with its underscore.
        rule: the formula, for the reference; see :data:`Rule`.
        moments: names of what is kept of an element between steps, at least one, the optional ones last.
        options: names of a group's numbers, ``lr`` first and ``weight_decay`` last, with the values that samples and tests take.
        flags: the bits a group may have.
        optional: names of the moments that a block may be without; it has all of them or none.
        norms: whether a step needs norms of whole tensors, so that one of pieces has two halves (:meth:`UpdateOp.half`).
        samples: ``samples(call)`` yields calls made by ``call(seed, dtypes, **options)``
            (:func:`.samples.sample`).
    """
    declared = Declaration(name, moments, options, flags, optional, norms)

    def of_device(device: str) -> Iterable[Sample]:
        return samples(functools.partial(sample, declared, device))

    RULES[name] = update = UpdateOp(declared, rule, of_device)
    return update
