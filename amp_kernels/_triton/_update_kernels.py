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
from ._block8 import BLOCK8, block_mask, decode, encode
from ._rounding import bits_of_groups, round_stochastic
from ._split_master import join_master, split_master, split_master24
from ._tables import UNIT, find_span, pointer, unit_ends, units_of_run

ROW = tl.constexpr(20)  # words per parameter in the rows that prepare_kernel writes
EMA_TAKE, STEP, SCALARS = map(tl.constexpr, (2, 3, 4))  # words of a row, after inverse scale and clip factor
PLACE = tl.constexpr(15)  # the last words of a row, of the place of random bits
COUNTER = tl.constexpr(7)  # columns of ``counters``: address of the step count, group, and the place of random bits
FIRST_OPERAND = tl.constexpr(3)  # column of a table, after: units up to and including this parameter, numel, row
FIRST_OPTION = tl.constexpr(3)  # column of a group: the learning rate
FLAG_MAXIMIZE = tl.constexpr(MAXIMIZE)
LEAVE = tl.constexpr(2.0)  # in place of a clip factor: the parameter stays as it is


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
    """``direction``; if ``cautious`` is not 0, zero where its sign differs from the gradient's. NaN stays."""
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
    factors,
    DERIVE: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    LRS: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the step of every parameter and derives its scalars.

    ``groups``: addresses of learning rate and weight decay, flags, the options of the rule's declaration, and last the decay of the
    average. ``DERIVE(options, flags, step)`` gives the scalars. The place of random bits is that of csrc/base/philox.h: index, block
    of 32 elements with which a piece begins, gap, reciprocal and shift.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if found_inf is not None:
        n = tl.where(tl.load(found_inf) > 0.0, 0, n)
    mask = place < n
    row = tl.where(mask, place, 0)  # lanes out of bounds repeat the first parameter and store nothing
    counter = tl.load(counters + row * COUNTER).to(tl.pointer_type(tl.float32))
    group = groups + tl.load(counters + row * COUNTER + 1) * GROUP_COLUMNS
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
    leaves = mask & False
    if factors is not None:
        clip = tl.load(factors + row)
        leaves = clip > 1.0
    out = rows + row * ROW
    tl.store(out, tl.broadcast_to(inv_scale, (BLOCK,)), mask=mask)
    signed = tl.where((flags & FLAG_MAXIMIZE) != 0, -clip, clip)
    tl.store(out + 1, tl.where(leaves, LEAVE, signed), mask=mask)
    tl.store(out + EMA_TAKE, (1.0 - real(group + (GROUP_COLUMNS - 1))).to(tl.float32), mask=mask)
    words = out.to(tl.pointer_type(tl.uint32))
    tl.store(words + STEP, step.to(tl.uint32), mask=mask)
    for i in tl.static_range(COUNTER - 2):
        tl.store(words + PLACE + i, tl.load(counters + row * COUNTER + 2 + i).to(tl.uint32), mask=mask)
    scalars = DERIVE(options, flags, step)
    for i in tl.static_range(len(scalars)):
        tl.store(out + SCALARS + i, scalars[i], mask=mask)
    tl.debug_barrier()  # lanes out of bounds, in other warps, have read the first counter
    tl.store(counter, step, mask=mask & ~leaves)


@triton.jit
def key_of(row, seed):
    """The key of a parameter's random bits: seed, step, and place, with the first group of eight elements."""
    words = row.to(tl.pointer_type(tl.uint32))
    place = words + PLACE
    first = tl.load(place + 1).to(tl.int64) * (BLOCK8 // 8)
    return (
        seed,
        tl.load(words + STEP),
        tl.load(place),
        first,
        tl.load(place + 2),
        tl.load(place + 3),
        tl.load(place + 4),
    )


@triton.jit
def random_bits(key, first, N: tl.constexpr, VALUE: tl.constexpr):
    """16 random bits for each of ``N`` elements of a piece from ``first`` on, by their place in the parameter."""
    seed, step, index, first_group, gap, reciprocal, shift = key
    group = first // 8 + tl.arange(0, N // 8)
    row = tl.umulhi(group.to(tl.uint32), reciprocal) >> shift
    return bits_of_groups(seed, step, index, first_group + group + row.to(tl.int64) * gap, VALUE)


@triton.jit
def pointers_of(row, begin, ELEMENTS: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr):
    """The operands from element ``begin`` on, but the exponents of moments in 8 bits from the first on: they are last."""
    EXPONENTS: tl.constexpr = len(ELEMENTS) - (MOMENTS if in_8_bits(ELEMENTS, MOMENTS) else 0)
    pointers = ()
    for k in tl.static_range(len(ELEMENTS)):
        address = tl.load(row + FIRST_OPERAND + k)
        if k < EXPONENTS:
            pointers += (pointer(address, begin, ELEMENTS[k], ALIGNED),)
        else:
            pointers += (pointer(address, 0, ELEMENTS[k], False),)
    return pointers


@triton.constexpr_function
def in_8_bits(elements, moments):
    return moments > 0 and elements[3] == tl.uint8


@triton.constexpr_function
def is_split(elements):
    return elements[2] in (tl.int16, tl.int8)


@triton.jit
def fetch_state(pointers, offsets, mask, first, ELEMENTS: tl.constexpr, MOMENTS: tl.constexpr, UNSIGNED: tl.constexpr):
    """Weight, moments and average of one block, as fp32. Everything is fetched before anything is converted: a conversion
    waits for its load, and a load issued after one might wait too."""
    SPLIT: tl.constexpr = is_split(ELEMENTS)
    IN_8_BITS: tl.constexpr = in_8_bits(ELEMENTS, MOMENTS)
    STATE_END: tl.constexpr = len(ELEMENTS) - (MOMENTS if IN_8_BITS else 0)
    main_at = pointers[1].to(tl.pointer_type(tl.int16)) if SPLIT else pointers[1]
    fetched = ()
    for k in tl.static_range(3, STATE_END):
        fetched += (tl.load(pointers[k] + offsets, mask=mask, cache_modifier=".cg"),)
    if IN_8_BITS:
        blocks = first // BLOCK8 + tl.arange(0, offsets.shape[0] // BLOCK8)
        of_blocks = block_mask(mask) if mask is not None else None
        for k in tl.static_range(STATE_END, len(ELEMENTS)):
            fetched += (tl.load(pointers[k] + blocks, mask=of_blocks),)
    weight = tl.load(main_at + offsets, mask=mask, cache_modifier=".cg")
    if SPLIT:
        weight = join_master(weight, tl.load(pointers[2] + offsets, mask=mask, cache_modifier=".cg"), ELEMENTS[1])
    state = (weight.to(tl.float32),)
    for k in tl.static_range(STATE_END - 3):
        if IN_8_BITS and k < MOMENTS:
            moment = decode(fetched[k], fetched[STATE_END - 3 + k], UNSIGNED >> k & 1)
            state += (moment if mask is None else tl.where(mask, moment, 0.0),)
        else:
            state += (fetched[k].to(tl.float32),)
    return state


@triton.jit
def store_moment(
    pointers,
    offsets,
    mask,
    first,
    key,
    moment,
    k: tl.constexpr,
    ELEMENTS: tl.constexpr,
    MOMENTS: tl.constexpr,
    UNSIGNED: tl.constexpr,
):
    """Stores moment ``k``, rounded, and returns it as stored."""
    N: tl.constexpr = offsets.shape[0]
    if in_8_bits(ELEMENTS, MOMENTS):
        moment = moment if mask is None else tl.where(mask, moment, 0.0)
        codes, exponents = encode(moment, random_bits(key, first, N, 1 + k), UNSIGNED >> k & 1)
        tl.store(pointers[3 + k] + offsets, codes, mask=mask, cache_modifier=".cs")
        blocks = first // BLOCK8 + tl.arange(0, N // BLOCK8)
        of_blocks = block_mask(mask) if mask is not None else None
        tl.store(pointers[len(ELEMENTS) - MOMENTS + k] + blocks, exponents, mask=of_blocks)
        return decode(codes, exponents, UNSIGNED >> k & 1)
    else:
        moment = moment.to(ELEMENTS[3 + k])
        tl.store(pointers[3 + k] + offsets, moment, mask=mask, cache_modifier=".cs")
        return moment.to(tl.float32)


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
    MOMENTS: tl.constexpr,
    UNSIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    APPLY: tl.constexpr,
):
    """One block, whose first element is number ``first``. ``ema_take``: ``None`` without an average."""
    GRAD: tl.constexpr = ELEMENTS[0]
    MAIN: tl.constexpr = ELEMENTS[1]
    SECOND: tl.constexpr = ELEMENTS[2]
    SPLIT: tl.constexpr = is_split(ELEMENTS)
    main_at = pointers[1].to(tl.pointer_type(tl.int16)) if SPLIT else pointers[1]
    grad = tl.load(pointers[0] + offsets, mask=mask, cache_modifier=".cg") if GRAD is not None else None
    state = fetch_state(pointers, offsets, mask, first, ELEMENTS, MOMENTS, UNSIGNED)
    moments = ()
    for k in tl.static_range(MOMENTS):
        moments += (state[1 + k],)
    effective = grad.to(tl.float32) * inv_scale * clip if GRAD is not None else None
    updated = APPLY(state[0], moments, effective, scalars)

    if GRAD is not None:
        for k in tl.static_range(MOMENTS):
            store_moment(pointers, offsets, mask, first, key, updated[1 + k], k, ELEMENTS, MOMENTS, UNSIGNED)
    if SPLIT:
        if tl.int8 == SECOND:
            random8 = random_bits(key, first, offsets.shape[0], 0) & 0xFF
            half, remainder = split_master24(updated[0], random8, MAIN)
        else:
            half, remainder = split_master(updated[0], MAIN)
        tl.store(main_at + offsets, half, mask=mask, cache_modifier=".cs")
        tl.store(pointers[2] + offsets, remainder, mask=mask, cache_modifier=".cs")
    elif STOCHASTIC:
        half = round_stochastic(updated[0], random_bits(key, first, offsets.shape[0], 0), MAIN)
        tl.store(pointers[1].to(tl.pointer_type(tl.int16)) + offsets, half, mask=mask, cache_modifier=".cs")
    else:
        tl.store(main_at + offsets, updated[0].to(MAIN), mask=mask, cache_modifier=".cs")
        if SECOND is not None:
            tl.store(pointers[2] + offsets, updated[0].to(SECOND), mask=mask, cache_modifier=".cs")
    if ema_take is not None:
        average = state[1 + MOMENTS]
        average = tl.fma(ema_take, updated[0] - average, average)
        tl.store(pointers[3 + MOMENTS] + offsets, average, mask=mask, cache_modifier=".cs")


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
    MOMENTS: tl.constexpr,
    UNSIGNED: tl.constexpr,
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
    or int16 or int8, the remainder of a split master. The rest are the moments, ``MOMENTS`` of them; with ``EMA``, the average
    of the weights; and, if the moments are uint8, their exponents. ``UNSIGNED``: bit k if moment k is never negative.
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
            count = tl.where(clip > 1.0, 0, count)
            ema_take = tl.load(shared + EMA_TAKE) if EMA else None
            key = key_of(shared, seed)
            pointers = pointers_of(row, begin, ELEMENTS, MOMENTS, ALIGNED)
            whole = count // BLOCK * BLOCK
            for i in range(0, whole, BLOCK):
                _update_elements(
                    pointers,
                    i + offsets,
                    None,
                    begin + i,
                    inv_scale,
                    clip,
                    scalars,
                    ema_take,
                    key,
                    ELEMENTS,
                    MOMENTS,
                    UNSIGNED,
                    STOCHASTIC,
                    APPLY,
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
                    MOMENTS,
                    UNSIGNED,
                    STOCHASTIC,
                    APPLY,
                )
