"""Update ops: one step of an optimizer over a list of parameters in place, in one or two passes over memory.

:func:`define_update` makes one from a declaration and the formula for one parameter. All take :class:`UpdateArguments`, so
one implementation serves them in every backend; the moments and options of an optimizer are packed into ``moments`` and
``options``, in the order of the declaration. The compiled rule of the same op, ``csrc/update/rules/<name>.h``, and
``_triton/<name>.py`` rely on that order.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch.library import KernelOp, Op, Sample, call_together, define
from .arguments import VARIANTS, UpdateArguments, schema
from .declaration import Declaration
from .samples import sample
from .state import MAXIMIZE, STOCHASTIC, Moment, StepScalars, Weight

#: The update ops by name.
RULES: dict[str, UpdateOp] = {}

#: ``rule(weight, moments, grad, o)``: weight and moments after the step of one parameter. All are float32, in memory
#: order; ``moments`` are those that are present, ``grad`` is unscaled, clipped and negated when maximizing. ``o`` has the
#: group's options by name and its ``flags``, and the count of the ``step``, from 1. With a stage, the rule is the second
#: pass: it gets the moments as stored and the stage's result as ``o.stage``, and returns the weight alone.
Rule = Callable[[Tensor, list[Tensor], Tensor, SimpleNamespace], tuple[Tensor, ...]]


class WholeTensor(NamedTuple):
    """A tensor before a stage: ``sums`` are those that the first pass took of it; ``o`` as in :data:`Rule`."""

    shape: torch.Size
    sums: Tensor
    o: SimpleNamespace


@dataclass(frozen=True)
class Stage:
    """The part of a step that needs whole tensors (norms, matrix products) before the first weight moves.

    Args:
        moments: ``moments(weight, moments, grad, o)``, the first pass: the moments after the step.
        sums: ``sums(weight, moments, o)``, from the moments as stored; float64 ``[2]``. Sums of pieces add up.
        run: ``run(tensors)`` gets every tensor of the step and returns a result for each, the second pass's ``o.stage``.
    """

    moments: Rule
    sums: Callable[[Tensor, list[Tensor], SimpleNamespace], Tensor]
    run: Callable[[list[WholeTensor]], list[Any]]


class UpdateOp:
    """One step of a list of parameters in place, skipped on the device if ``found_inf`` says so. No host sync.

    The effective gradient is ``grad / grad_scale * clip`` with ``clip = min(1, max_norm / (sqrt(sum_sq) + 1e-6))`` (the
    formula of :func:`torch.nn.utils.clip_grad_norm_`). Arithmetic is float32 whatever is stored. The weight that a rule
    changes is the float32 master if there is one; parameter and shadow receive it rounded, and the average becomes
    ``ema += (1 - ema_decay) * (weight - ema)``. State is laid out as :mod:`.state` says.

    Args: those of :class:`UpdateArguments`, which the kernels check (csrc/update/call.h).
    """

    def __init__(
        self, declared: Declaration, rule: Rule, stage: Stage | None, samples: Callable[[str], Iterable[Sample]]
    ):
        self.declared, self.rule, self.stage = declared, rule, stage
        name, family = declared.name, rule.__module__.rpartition(".")[2]
        self.op = define(schema(name), self.reference, samples=samples, family=family)
        #: The same step from the addresses in a table, which replaces ``params``, ``grads`` and ``layout``.
        self.of_table = KernelOp(schema(f"_{name}table_", table=True))
        #: Both in two halves, for a rule with a stage: see ``squares`` in :class:`UpdateArguments`.
        self.half_op = self.half_of_table = None
        if stage is not None:
            self.half_op = define(
                schema(f"{name}half_", half=True),
                self.reference,
                samples=lambda device: _halves(samples(device)),
                family=family,
            )
            self.half_of_table = KernelOp(schema(f"_{name}half_table_", table=True, half=True))
        own = {"moments": declared.moments, "optional": declared.optional, "options": tuple(declared.options)}
        words = [f"{key}: {', '.join(names)}" for key, names in own.items() if names]
        self.__doc__ = "\n".join([sys.modules[rule.__module__].__doc__ or name, *words, "", inspect.getdoc(type(self))])

    def step(self, arguments: UpdateArguments, table: Tensor | None = None) -> None:
        """Take the step, or half of it with ``squares``; from the addresses in ``table`` if there is one."""
        op, values = self.bound(arguments, table)
        op(*values)

    def bound(self, arguments: UpdateArguments, table: Tensor | None) -> tuple[Op | KernelOp, tuple]:
        """The variant of the op for such a step, and its arguments."""
        half = arguments.squares is not None
        values = VARIANTS[table is not None, half](arguments)
        if table is None:
            return (self.half_op if half else self.op), values
        return (self.half_of_table if half else self.of_table), (table, *values)

    def reference(self, *args) -> None:
        arguments = UpdateArguments(*args).with_flat_buffers()
        if arguments.layout.is_meta:  # traced without data: nothing is returned, so there is nothing to compute
            return
        scalars = StepScalars.make(arguments)
        rows, factors = arguments.layout.tolist(), arguments.factors
        params = [_Param(self.declared, arguments, i, row) for i, row in enumerate(rows)]
        of_params = [scalars if factors is None else scalars.of(factors[i]) for i in range(len(rows))]
        if self.stage is not None:
            self._run_stage(arguments, params, of_params)
        for p, scalars in zip(params, of_params, strict=True):
            if arguments.second:
                grad = scalars.gradient(p.grad, p.o.flags)
                weight, *moments = self.rule(p.weight.load(), p.read_moments(), grad, p.o)
                p.weight.store(scalars, weight)
                if self.stage is None:
                    p.store_moments(scalars, moments)
            scalars.store(p.counter, p.o.step)

    def _run_stage(self, arguments: UpdateArguments, params: list[_Param], of_params: list[StepScalars]) -> None:
        """Up to the results of the stage, or to either side of the sums of pieces."""
        squares, stage, sums = arguments.squares, self.stage, []
        for i, (p, scalars) in enumerate(zip(params, of_params, strict=True)):
            if squares is not None and arguments.second:
                sums.append(squares[i])
                continue
            grad = scalars.gradient(p.grad, p.o.flags)
            p.store_moments(scalars, stage.moments(p.weight.load(), p.read_moments(), grad, p.o))
            sums.append(stage.sums(p.weight.load(), p.read_moments(), p.o))
            if squares is not None and p.grad.numel():
                scalars.store(squares[i], sums[i])
        if arguments.second:
            wholes = [WholeTensor(p.grad.shape, s, p.o) for p, s in zip(params, sums, strict=True)]
            for p, result in zip(params, stage.run(wholes), strict=True):
                p.o.stage = result


class _Param:
    """One parameter of a step: weight, gradient, moments and step counter, and ``o`` for its rule."""

    def __init__(self, declared: Declaration, arguments: UpdateArguments, i: int, row: list[int]):
        block, _, slot, group, _, _, _ = row
        blocks, count = len(arguments.steps), len(declared.options)
        self.grad, self.counter = arguments.grads[i], arguments.steps[block][slot]
        of_group = arguments.options[group * count : (group + 1) * count]
        self.o = SimpleNamespace(**dict(zip(declared.options, of_group, strict=True)))
        if arguments.lrs:
            self.o.lr = arguments.lrs[group].reshape(()).double()
        if arguments.weight_decays:
            self.o.weight_decay = arguments.weight_decays[group].reshape(())
        self.o.step, self.o.flags = self.counter + 1, arguments.flags[group]
        self._moments = [
            Moment.at(arguments, i, row, self.o.step, k, unsigned=name in declared.unsigned)
            for k, name in enumerate(declared.moments)
            if arguments.moments[k * blocks + block].numel() or name not in declared.optional
        ]
        self.weight = Weight.at(arguments, i, row, self.o.step)

    def read_moments(self) -> list[Tensor]:
        return [moment.load() for moment in self._moments]

    def store_moments(self, scalars: StepScalars, values: Iterable[Tensor]) -> None:
        for moment, value in zip(self._moments, values, strict=True):
            moment.store(scalars, value)


class UpdateCall(NamedTuple):
    """One call of an update op."""

    op: UpdateOp
    arguments: UpdateArguments
    table: Tensor | None
    kept: Sequence[Tensor] = ()  # what the table has addresses of and nothing else keeps alive


def take_together(calls: Sequence[UpdateCall]) -> None:
    """Make the calls of one step."""
    if len(calls) == 1:
        op, arguments, table, _ = calls[0]
        op, values = op.bound(arguments, table)
        op(*values)
    else:
        call_together([call.op.bound(call.arguments, call.table) for call in calls])


def _halves(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Both halves of each step."""
    for arguments, _ in samples:
        params = arguments[0]
        squares = torch.arange(2.0 * len(params), dtype=torch.float64, device=params[0].device).view(-1, 2)
        yield (*arguments, squares, False), {}
        yield (*arguments, squares.clone(), True), {}


def usual_samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    """Calls over the dtypes, kinds of weight and step scalars that concern every rule."""
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
    yield call(40, [bf16, f16, f32], master=torch.int16, scale=4.0, flags=MAXIMIZE, factors=True)  # some stay
    yield from samples8(call)


def samples8(call: Callable[..., Sample], first: int = 300, **options: Any) -> Iterator[Sample]:
    """Calls with moments in 8 bits and with masters of 24; ``first`` seed."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    call = functools.partial(call, **options)
    yield call(first, [f32, bf16, f16], moment_dtype=torch.uint8, shadow=bf16, max_norm=1.0, ema=True)
    yield call(first + 1, [bf16, f16], master=torch.int8, moment_dtype=torch.uint8, scale=8.0)
    yield call(first + 2, [bf16, f16], master=torch.int8)
    yield call(first + 3, [bf16, f32], master=torch.int8, moment_dtype=torch.uint8, found=1.0)  # skipped
    yield call(first + 4, [bf16, f32, bf16], master=torch.int8, moment_dtype=torch.uint8, factors=True)  # some stay


def define_update(
    name: str,
    rule: Rule,
    *,
    moments: tuple[str, ...],
    options: dict[str, float],
    flags: int,
    optional: tuple[str, ...] = (),
    unsigned: tuple[str, ...] = (),
    stage: Stage | None = None,
    samples: Callable[[Callable[..., Sample]], Iterable[Sample]] = usual_samples,
) -> UpdateOp:
    """Define the op of an optimizer: see :class:`UpdateOp`.

    Args:
        name: of the op, with its underscore.
        rule: the formula, for the reference; see :data:`Rule`.
        moments: names of the state kept of an element between steps, at least one, the optional ones last.
        options: names of a group's numbers, ``lr`` first and ``weight_decay`` last, with the values of samples and tests.
        flags: the bits that a group may have.
        optional: names of the moments that a block may lack; it has all of them or none.
        unsigned: names of the moments that are never negative.
        stage: for a rule that needs whole tensors; its op also exists in two halves.
        samples: ``samples(call)`` yields calls made by ``call(seed, dtypes, **options)`` (:func:`.samples.sample`).
    """
    declared = Declaration(name, moments, options, flags, optional, unsigned)

    def of_device(device: str) -> Iterable[Sample]:
        return samples(functools.partial(sample, declared, device))

    RULES[name] = update = UpdateOp(declared, rule, stage, of_device)
    return update
