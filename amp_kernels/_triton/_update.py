"""A step of any rule in Triton, over a list of parameters: kernels that know the optimizer by two functions alone, which are
what ``<name>.py`` holds. The formula is csrc/update/rules/<name>.h.

``prepare_kernel``, one lane a parameter: increments the step count and derives from it, in double, the few scalars that
all elements of the parameter share. It runs before the update, so no program ever reads a count that another one is about
to change. ``update_kernel``, a persistent grid over the chunks of a list (``_tables.py``): reads gradient, moments and
weight, writes moments and weight. Bandwidth is the limit.

Parameters that store alike (dtypes, master, shadow, moments, average, rounding, alignment) make a class, and each class is
one launch of its own specialization; a model has one or two. Gradients may start at any element (views into a
communication bucket) while the state is always aligned, so no peel could align both: such parameters are a class whose
accesses are scalar. A skip (``found_inf``) must leave every byte as it was, the count too.

Every fused multiply-add is written out, divisions and roots are the correctly rounded ones, and the compiler may not fuse
any other: results have the bits of the CPU and CUDA kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._updates.state import MAXIMIZE, STOCHASTIC
from . import _tables
from ._rounding import round_stochastic, rounding_bits
from ._split_master import join_master, split_master
from ._tables import chunk_ends, find_chunk

ROW = tl.constexpr(16)  # words a parameter that prepare_kernel writes:
EMA_TAKE, STEP, INDEX, SCALARS = map(tl.constexpr, (2, 3, 4, 5))  # behind inverse scale and clip factor
FIRST_OPERAND = tl.constexpr(3)  # column; before: chunks up to and including this parameter, numel, place in `rows`
FIRST_OPTION = tl.constexpr(3)  # column of a group: the learning rate
FLAG_MAXIMIZE = tl.constexpr(MAXIMIZE)
PREPARE_BLOCK = 128
BLOCK = 1024
PROGRAMS_PER_SM = 4
FEW_OPERANDS = 6  # with more, a program takes more registers than the 128 a thread that four on an SM leave it

ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int16: tl.int16}


@triton.jit
def real(address):
    """The double whose bits a table holds."""
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit
def read_scalars(row, COUNT: tl.constexpr):
    """What ``prepare_kernel`` derived for a parameter."""
    scalars = ()
    for i in tl.static_range(COUNT):
        scalars += (tl.load(row + SCALARS + i),)
    return scalars


@triton.jit
def power(base, exponent):
    """base^exponent by squaring, for an unsigned exponent: the bits of csrc/base."""
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(32):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base *= base
        exponent >>= 1
    return result


@triton.jit
def learning_rate(group, LRS: tl.constexpr):
    """Of the group whose row is ``group``, as a double."""
    return tl.load(tl.load(group).to(tl.pointer_type(tl.float32))).to(tl.float64) if LRS else real(group + FIRST_OPTION)


@triton.jit
def weight_decay(group, GROUP_COLUMNS: tl.constexpr, DECAYS: tl.constexpr):
    """Of the group whose row is ``group``."""
    address = tl.load(group + 1).to(tl.pointer_type(tl.float64))
    return tl.load(address) if DECAYS else real(group + (GROUP_COLUMNS - 2))


@triton.jit
def pointer(address, begin, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    if ELEMENT is None:
        return address
    else:
        # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
        address += begin * (ELEMENT.primitive_bitwidth // 8)
        return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16 if ALIGNED else 1)


@triton.jit
def prepare_kernel(
    counters,
    n,
    groups,
    rows,
    grad_scale,
    found_inf,
    sum_sq,
    max_norm,
    DERIVE: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    LRS: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``counters``: address of the step count, group, index. ``groups``: addresses of learning rate and weight decay, flags, the
    options of the rule's declaration, and last the decay of the average. ``DERIVE(options, flags, step)`` gives the scalars."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if found_inf is not None:
        n = tl.where(tl.load(found_inf) > 0.0, 0, n)
    mask = place < n
    row = tl.where(mask, place, 0)  # lanes beside the list do as the first one does, but store nothing
    counter = tl.load(counters + row * 3).to(tl.pointer_type(tl.float32))
    group = groups + tl.load(counters + row * 3 + 1) * GROUP_COLUMNS
    flags = tl.load(group + 2)
    options = (learning_rate(group, LRS),)
    for i in tl.static_range(FIRST_OPTION + 1, GROUP_COLUMNS - 2):
        options += (real(group + i),)
    options += (weight_decay(group, GROUP_COLUMNS, DECAYS),)
    step = tl.load(counter) + 1.0

    scale = 1.0 if grad_scale is None else tl.load(grad_scale)
    inv_scale = (1.0 / tl.cast(scale, tl.float64)).to(tl.float32)
    clip = tl.cast(1.0, tl.float32)
    if sum_sq is not None:
        ratio = tl.div_rn(tl.cast(max_norm, tl.float32), tl.sqrt_rn(tl.load(sum_sq)) + 1e-6)
        clip = tl.where(ratio > 1.0, 1.0, ratio)
    out = rows + row * ROW
    tl.store(out, tl.broadcast_to(inv_scale, (BLOCK,)), mask=mask)
    tl.store(out + 1, tl.where((flags & FLAG_MAXIMIZE) != 0, -clip, clip), mask=mask)
    tl.store(out + EMA_TAKE, (1.0 - real(group + (GROUP_COLUMNS - 1))).to(tl.float32), mask=mask)
    words = out.to(tl.pointer_type(tl.uint32))
    tl.store(words + STEP, step.to(tl.uint32), mask=mask)
    tl.store(words + INDEX, tl.load(counters + row * 3 + 2).to(tl.uint32), mask=mask)
    scalars = DERIVE(options, flags, step)
    for i in tl.static_range(len(scalars)):
        tl.store(out + SCALARS + i, scalars[i], mask=mask)
    tl.debug_barrier()  # lanes beside the list have read the first counter, in warps that do not store it
    tl.store(counter, step, mask=mask)


@triton.jit
def fetch_state(pointers, offsets, mask, ELEMENTS: tl.constexpr):
    """Weight, moments and average of one block, as fp32. Everything is fetched before anything is converted: a conversion
    waits for its load, and a load issued after one might wait too."""
    SPLIT: tl.constexpr = tl.int16 == ELEMENTS[2]
    main_at = pointers[1].to(tl.pointer_type(tl.int16)) if SPLIT else pointers[1]
    fetched = ()
    for k in tl.static_range(3, len(ELEMENTS)):
        fetched += (tl.load(pointers[k] + offsets, mask=mask, cache_modifier=".cg"),)
    weight = tl.load(main_at + offsets, mask=mask, cache_modifier=".cg")
    if SPLIT:
        weight = join_master(weight, tl.load(pointers[2] + offsets, mask=mask, cache_modifier=".cg"), ELEMENTS[1])
    state = (weight.to(tl.float32),)
    for k in tl.static_range(len(fetched)):
        state += (fetched[k].to(tl.float32),)
    return state


@triton.jit
def _update_elements(
    pointers,
    offsets,
    mask,
    first,
    inv_scale,
    clip,
    scalars,
    ema_take,
    key,
    ELEMENTS: tl.constexpr,
    APPLY: tl.constexpr,
):
    """One block, whose first element is number ``first``.

    ``ema_take``: ``None`` without an average. ``key``: seed, step and index for stochastic rounding, or ``None``.
    """
    MOMENTS_END: tl.constexpr = len(ELEMENTS) if ema_take is None else len(ELEMENTS) - 1
    GRAD: tl.constexpr = ELEMENTS[0]
    MAIN: tl.constexpr = ELEMENTS[1]
    SECOND: tl.constexpr = ELEMENTS[2]
    SPLIT: tl.constexpr = tl.int16 == SECOND
    main_at = pointers[1].to(tl.pointer_type(tl.int16)) if SPLIT else pointers[1]
    grad = tl.load(pointers[0] + offsets, mask=mask, cache_modifier=".cg") if GRAD is not None else None
    state = fetch_state(pointers, offsets, mask, ELEMENTS)
    moments = ()
    for k in tl.static_range(3, MOMENTS_END):
        moments += (state[k - 2],)
    effective = grad.to(tl.float32) * inv_scale * clip if GRAD is not None else None
    updated = APPLY(state[0], moments, effective, scalars)

    if GRAD is not None:
        for k in tl.static_range(3, MOMENTS_END):
            tl.store(pointers[k] + offsets, updated[k - 2].to(ELEMENTS[k]), mask=mask, cache_modifier=".cs")
    if SPLIT:
        half, remainder = split_master(updated[0], MAIN)
        tl.store(main_at + offsets, half, mask=mask, cache_modifier=".cs")
        tl.store(pointers[2] + offsets, remainder, mask=mask, cache_modifier=".cs")
    elif key is not None:
        random16 = rounding_bits(key[0], key[1], key[2], first, offsets.shape[0])
        half = round_stochastic(updated[0], random16, MAIN)
        tl.store(pointers[1].to(tl.pointer_type(tl.int16)) + offsets, half, mask=mask, cache_modifier=".cs")
    else:
        tl.store(main_at + offsets, updated[0].to(MAIN), mask=mask, cache_modifier=".cs")
        if SECOND is not None:
            tl.store(pointers[2] + offsets, updated[0].to(SECOND), mask=mask, cache_modifier=".cs")
    if ema_take is not None:
        average = state[MOMENTS_END - 2]
        average = tl.fma(ema_take, updated[0] - average, average)
        tl.store(pointers[MOMENTS_END] + offsets, average, mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["seed"])
def update_kernel(
    table,
    tensors,
    rows,
    found_inf,
    seed: tl.int64,
    ELEMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EMA: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALAR_COUNT: tl.constexpr,
    APPLY: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``APPLY(weight, moments, effective gradient, scalars)`` for every element of the parameters of a class.

    ``ELEMENTS``: dtypes of the operands. The first is the gradient, only read; ``None`` if it and the moments have done
    their part: then it is not touched, and they are only read. The second is the weight, read and written;
    the third what is kept beside it: nothing, or a copy (the weight of an fp32 master, or the shadow of an fp32 weight),
    only written, or int16, the remainder of a split master; the rest are the moments and, with ``EMA``, the average of
    the weights. ``STOCHASTIC``: how the weight is rounded.
    """
    COLUMNS: tl.constexpr = FIRST_OPERAND + len(ELEMENTS)
    ends, chunks = chunk_ends(table, tensors, COLUMNS, TENSORS)
    if found_inf is not None:
        chunks = tl.where(tl.load(found_inf) > 0.0, 0, chunks)
    offsets = tl.arange(0, BLOCK)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, begin, count = find_chunk(table, ends, chunk, COLUMNS)
        shared = rows + tl.load(row + 2) * ROW
        inv_scale, clip, scalars = tl.load(shared), tl.load(shared + 1), read_scalars(shared, SCALAR_COUNT)
        words = shared.to(tl.pointer_type(tl.uint32))
        ema_take = tl.load(shared + EMA_TAKE) if EMA else None
        key = (seed, tl.load(words + STEP), tl.load(words + INDEX)) if STOCHASTIC else None
        pointers = ()
        for k in tl.static_range(len(ELEMENTS)):
            pointers += (pointer(tl.load(row + FIRST_OPERAND + k), begin, ELEMENTS[k], ALIGNED),)
        whole = count // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            _update_elements(
                pointers, i + offsets, None, begin + i, inv_scale, clip, scalars, ema_take, key, ELEMENTS, APPLY
            )
        if whole < count:
            at = whole + offsets
            _update_elements(
                pointers, at, at < count, begin + whole, inv_scale, clip, scalars, ema_take, key, ELEMENTS, APPLY
            )


@dataclass(frozen=True)
class Rule:
    """An optimizer: two jitted functions.

    ``derive(options, flags, step)`` computes float32 scalars of a parameter from the options of its group, doubles in the
    order of the declaration; ``apply(weight, moments, grad, scalars)`` is the step of an element, weight and moments.
    ``scalars``: how many ``apply`` is given.

    ``first_pass(classes, tables, rows, found_inf, squares, second)``, for an optimizer of two passes over memory, updates the moments and
    may add scalars to rows; ``grad`` is ``None`` then, and ``apply`` returns the weight alone.
    """

    derive: Callable
    apply: Callable
    scalars: int
    first_pass: Callable | None = None

    def launch(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        moments: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor],
        shadows: Sequence[torch.Tensor],
        emas: Sequence[torch.Tensor],
        layout: torch.Tensor,
        lrs: Sequence[torch.Tensor],
        weight_decays: Sequence[torch.Tensor],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        sum_sq: torch.Tensor | None,
        options: Sequence[float],
        ema_decay: Sequence[float],
        flags: Sequence[int],
        max_norm: float,
        seed: int,
        squares: torch.Tensor | None = None,
        second: bool = True,
    ) -> None:
        """One step; the op's signature (:class:`amp_kernels._updates.op.UpdateOp`). With ``squares`` half a step."""
        device, state = params[0].device, (moments, steps, masters, shadows, emas, layout.tolist(), flags)
        counters, classes = classes_of(params, grads, *state)
        with _tables.on(device):
            tables = Tables.of(counters, options, ema_decay, flags, lrs, weight_decays, device)
            rows = prepare(self, tables, grad_scale, found_inf, sum_sq, max_norm)
            if self.first_pass is not None:
                self.first_pass(classes, tables, rows, found_inf, squares, second)
                if not second:
                    return
                _, classes = classes_of(params, None, *state)
            update(self, classes, rows, found_inf, seed)


@dataclass(frozen=True)
class Tables:
    """What ``prepare_kernel`` wants to know of parameters and groups."""

    counters: torch.Tensor
    params: int
    groups: torch.Tensor
    group_columns: int
    lrs: bool
    weight_decays: bool

    @classmethod
    def of(
        cls,
        counters: tuple[tuple[int, int, int], ...],
        options: Sequence[float],
        ema_decay: Sequence[float],
        flags: Sequence[int],
        lrs: Sequence[torch.Tensor],
        weight_decays: Sequence[torch.Tensor],
        device: torch.device,
    ) -> Tables:
        count = len(options) // len(flags)
        groups = tuple(
            (
                *(scalars[i].data_ptr() if scalars else 0 for scalars in (lrs, weight_decays)),
                flag,
                *map(_tables.bits, (*options[i * count :][:count], ema_decay[i])),
            )
            for i, flag in enumerate(flags)
        )
        counted, grouped = (_tables.upload(rows, device) for rows in (counters, groups))
        return cls(counted, len(counters), grouped, len(groups[0]), bool(lrs), bool(weight_decays))


def prepare(
    rule: Rule,
    tables: Tables,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    max_norm: float,
) -> torch.Tensor:
    """Counts the step of every parameter; returns their rows of scalars."""
    rows = torch.empty(tables.params * ROW.value, dtype=torch.float32, device=tables.counters.device)
    prepare_kernel[(triton.cdiv(tables.params, PREPARE_BLOCK),)](
        tables.counters,
        tables.params,
        tables.groups,
        rows,
        grad_scale,
        found_inf,
        sum_sq,
        max_norm,
        DERIVE=rule.derive,
        GROUP_COLUMNS=tables.group_columns,
        LRS=tables.lrs,
        DECAYS=tables.weight_decays,
        BLOCK=PREPARE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return rows


def update(
    rule: Rule,
    classes: dict[tuple, list[tuple[int, ...]]],
    rows: torch.Tensor,
    found_inf: torch.Tensor | None,
    seed: int,
) -> None:
    """Updates the parameters of every class by their rows."""
    for (elements, aligned, ema, stochastic), tensors in classes.items():
        programs = _tables.programs(rows.device, programs_per_sm(elements))
        for table in _tables.tensor_tables(tensors, rows.device):
            update_kernel[(min(programs, table.chunks),)](
                table.rows,
                table.tensors,
                rows,
                found_inf,
                seed,
                ELEMENTS=elements,
                ALIGNED=aligned,
                EMA=ema,
                STOCHASTIC=stochastic,
                SCALAR_COUNT=rule.scalars,
                APPLY=rule.apply,
                TENSORS=table.capacity,
                BLOCK=BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )


def programs_per_sm(elements: Sequence[tl.dtype | None]) -> int:
    return PROGRAMS_PER_SM if len(elements) <= FEW_OPERANDS else PROGRAMS_PER_SM - 1


def classes_of(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor] | None,
    moments: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    shadows: Sequence[torch.Tensor],
    emas: Sequence[torch.Tensor],
    layout: Sequence[tuple[int, int, int, int, int]],
    flags: Sequence[int],
) -> tuple[tuple[tuple[int, int, int], ...], dict[tuple, list[tuple[int, ...]]]]:
    """The rows of ``prepare_kernel``, and the parameters of each class: numel, place, operands.

    A class is the dtypes of the operands (``None``: there is no second, no gradient), whether all are aligned to 16 bytes, whether the
    last is an average of the weights, and whether the weight is rounded stochastically.
    """
    # Blocks are few and parameters many: what a block says is looked up once.
    buffers = [
        [
            (b.data_ptr(), b.element_size(), b.dtype) if b.numel() else None
            for b in (masters[block], shadows[block], emas[block], *moments[block :: len(steps)])
        ]
        for block in range(len(steps))
    ]
    counts = [b.data_ptr() for b in steps]
    counters, classes = [], {}
    for place, (param, grad, row) in enumerate(zip(params, grads or params, layout, strict=True)):
        block, offset, slot, group, index = row
        counters.append((counts[block] + 4 * slot, group, index))
        numel = param.numel()
        if numel == 0:
            continue
        own = param.data_ptr(), param.dtype
        master, shadow, ema, *state = (b and (b[0] + offset * b[1], b[2]) for b in buffers[block])
        if master and master[1] is torch.float32:
            main, second = master, own
        else:
            main, second = own, master or shadow
        kept = filter(None, (*state, ema))
        gradient = (grad.data_ptr(), grad.dtype) if grads else (0, None)
        operands = [gradient, main, second or (0, None), *kept]
        stochastic = bool(flags[group] & STOCHASTIC) and not master and own[1] is not torch.float32
        addresses, dtypes = zip(*operands, strict=True)
        aligned = functools.reduce(operator.or_, addresses) % 16 == 0
        key = dtypes, aligned, ema is not None, stochastic
        classes.setdefault(key, []).append((numel, place, *addresses))
    # Triton's dtypes last: to hash one takes a microsecond.
    return tuple(counters), {
        (tuple(dtype and ELEMENTS[dtype] for dtype in dtypes), *rest): tensors
        for (dtypes, *rest), tensors in classes.items()
    }
