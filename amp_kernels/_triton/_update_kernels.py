"""The kernels of a step of any rule, over a list of parameters; launched by ``_update.py``.

``prepare_kernel``, one lane a parameter: increments the step count and derives from it, in double, the few scalars that
all elements of the parameter share. It runs before the update, so no program reads a count that another one is about to
change. ``update_kernel``, a persistent grid over a list (``_tables.py``): reads gradient, moments and weight,
writes moments and weight. It is bandwidth-bound. A skip (``found_inf``) must leave every byte unchanged, the count too.

Every fused multiply-add is written out, divisions and roots are the correctly rounded ones, and the compiler may not fuse
any other: results have the bits of the CPU and CUDA kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._updates.state import MAXIMIZE
from ._rounding import round_stochastic, rounding_bits
from ._split_master import join_master, split_master
from ._tables import UNIT, find_span, pointer, unit_ends, units_of_run

ROW = tl.constexpr(16)  # words per parameter in the rows that prepare_kernel writes
EMA_TAKE, STEP, INDEX, SCALARS = map(tl.constexpr, (2, 3, 4, 5))  # words of a row, after inverse scale and clip factor
FIRST_OPERAND = tl.constexpr(3)  # column of a table, after: units up to and including this parameter, numel, row
FIRST_OPTION = tl.constexpr(3)  # column of a group: the learning rate
FLAG_MAXIMIZE = tl.constexpr(MAXIMIZE)


@triton.jit
def real(address):
    """The double whose bits a table holds."""
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit
def read_scalars(row, COUNT: tl.constexpr):
    """The scalars that ``prepare_kernel`` derived for a parameter."""
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
def cautious_direction(direction, g, cautious):
    """With ``cautious`` != 0 nothing where the direction has not the sign of the gradient; NaN stays."""
    return tl.where(direction * g <= 0.0, tl.where(cautious != 0.0, 0.0, direction), direction)


@triton.jit
def learning_rate(group, LRS: tl.constexpr):
    """The learning rate of the group whose row is ``group``, as a double."""
    return tl.load(tl.load(group).to(tl.pointer_type(tl.float32))).to(tl.float64) if LRS else real(group + FIRST_OPTION)


@triton.jit
def weight_decay(group, GROUP_COLUMNS: tl.constexpr, DECAYS: tl.constexpr):
    """The weight decay of the group whose row is ``group``."""
    address = tl.load(group + 1).to(tl.pointer_type(tl.float64))
    return tl.load(address) if DECAYS else real(group + (GROUP_COLUMNS - 2))


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
    """Counts the step of every parameter and derives its scalars.

    ``counters``: address of the step count, group, index. ``groups``: addresses of learning rate and weight decay, flags, the
    options of the rule's declaration, and last the decay of the average. ``DERIVE(options, flags, step)`` gives the scalars.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if found_inf is not None:
        n = tl.where(tl.load(found_inf) > 0.0, 0, n)
    mask = place < n
    row = tl.where(mask, place, 0)  # lanes out of bounds repeat the first parameter and store nothing
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
    tl.debug_barrier()  # lanes out of bounds, in other warps, have read the first counter
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


@triton.jit(do_not_specialize=["runs", "per_run", "longer", "seed"])
def update_kernel(
    table,
    tensors,
    runs,
    per_run,
    longer,
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

    ``ELEMENTS``: dtypes of the operands. The first is the gradient, only read; ``None`` after a first pass has moved the
    moments: then there is no gradient, and the moments are only read. The second is the weight, read and written. The
    third is ``None``; or the dtype of a copy (the weight of an fp32 master, or the shadow of an fp32 weight), only written;
    or int16, the remainder of a split master. The rest are the moments and, with ``EMA``, the average of the weights.
    ``STOCHASTIC``: round the weight stochastically.
    """
    COLUMNS: tl.constexpr = FIRST_OPERAND + len(ELEMENTS)
    ends = unit_ends(table, tensors, COLUMNS, TENSORS)
    end = runs
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) > 0.0, 0, runs)
    offsets = tl.arange(0, BLOCK)
    for run in range(tl.program_id(0), end, tl.num_programs(0)):
        at, stop = units_of_run(run, per_run, longer)
        while at < stop:
            row, begin, count, at = find_span(table, ends, at, stop, UNIT, COLUMNS)
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
                last = whole + offsets
                _update_elements(
                    pointers,
                    last,
                    last < count,
                    begin + whole,
                    inv_scale,
                    clip,
                    scalars,
                    ema_take,
                    key,
                    ELEMENTS,
                    APPLY,
                )
