"""Many adapters in one process, a step of all of them: 16 matrices each, with a norm and a clip factor of each adapter, against an
optimizer for each, torch's and ours, and against one optimizer that clips them all by one norm.

Parameters of one element leave the host's time; "others each step": another adapter has no gradients in each step, as on a server. No
norm is above the limit, so that all have the same results.

Bytes: the first pass reads the gradients (4 an element), the second reads and writes 28 an element; 24 for each run of 32 KB, where
partial sums are kept, and 110 an adapter.
"""

import itertools
from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak

from ..harness.case import Call, Case, Prepare, Scope, Tensors
from . import layouts, lists
from .layouts import ADAMW, Inputs
from .providers import compared

TENSORS, MAX_NORM, RUN_BYTES = 16, 1e9, 2**15
Make = Callable[
    [list[Tensors]], Callable[[int | None], None]
]  # of adapters; the step, which one adapter takes no part in


def adapters(scope: Scope) -> Iterator[Case]:
    for count in scope.pick((8, 128, 1024), (8, 128, 1024), (8,)):
        for shape in ((16, 256), (1,)):
            for others in (False, True):
                yield case(count, shape, others, scope.device)


def case(count: int, shape: lists.Shape, others: bool, device: torch.device) -> Case:
    shapes = [shape] * (count * TENSORS)
    elements = lists.numel(shapes)
    runs = len(shapes) * -(-4 * lists.numel([shape]) // RUN_BYTES)

    def prepared(make: Make) -> Prepare:
        return lambda inputs: _prepare(inputs, make, others)

    return compared(
        "adamw_",
        device,
        prepared(_independent),
        {"torch": prepared(_torchs)},
        {"amp_kernels:one norm": prepared(_one_norm), "amp_kernels:optimizers": prepared(_optimizers)},
        op="adapters",
        shape=f"{count} x {TENSORS} x {list(shape)}{', others each step' if others else ''}",
        dtype="fp32",
        bytes=32 * elements + 24 * runs + 110 * count,
        written=12 * elements,
        flops=17 * elements,
        inputs=lambda generator: layouts.draw(layouts.LAYOUTS[0], shapes, generator),
        reference=lambda inputs: layouts.reference(layouts.LAYOUTS[0], inputs, None),
        check_calls=layouts.STEPS,
        host_time=True,
        sets=1,
        memory=lists.BYTES_PER_PARAM * elements,
    )


def _prepare(inputs: Inputs, make: Make, others: bool) -> Call:
    for param, grad in zip(inputs.params, inputs.grads, strict=True):
        param.grad = grad
    units = [inputs.params[i : i + TENSORS] for i in range(0, len(inputs.params), TENSORS)]
    step, calls = make(units), itertools.count()

    def give(unit: int, has: bool) -> None:
        for i in range(unit * TENSORS, (unit + 1) * TENSORS):
            inputs.params[i].grad = inputs.grads[i] if has else None

    def call():
        number, absent = next(calls), None
        if others and number >= layouts.STEPS:  # all take part in the steps of the check
            absent = number % len(units)
            give((number - 1) % len(units), True)
            give(absent, False)
        step(absent)
        return {"params": inputs.params}

    return call


def _torchs(units: list[Tensors]) -> Callable[[int | None], None]:
    made = [torch.optim.AdamW(unit, fused=True, capturable=unit[0].is_cuda, **ADAMW) for unit in units]

    def step(absent: int | None) -> None:
        for i, (unit, optimizer) in enumerate(zip(units, made, strict=True)):
            if i != absent:
                torch.nn.utils.clip_grad_norm_(unit, MAX_NORM)
                optimizer.step()

    return step


def _optimizers(units: list[Tensors]) -> Callable[[int | None], None]:
    made = [ak.optim.AdamW(unit, max_grad_norm=MAX_NORM, **ADAMW) for unit in units]
    return lambda absent: [optimizer.step() for i, optimizer in enumerate(made) if i != absent]


def _one_norm(units: list[Tensors], **options) -> Callable[[int | None], None]:
    groups = [{"params": unit} for unit in units]
    optimizer = ak.optim.AdamW(groups, max_grad_norm=MAX_NORM, **options, **ADAMW)
    return lambda absent: optimizer.step()


def _independent(units: list[Tensors]) -> Callable[[int | None], None]:
    return _one_norm(units, independent_groups=True)


CASES = (adapters,)
