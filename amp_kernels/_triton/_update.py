"""What all updates share in Triton: one step over a list of parameters, as kernels that know the optimizer by two
functions alone.

``prepare_kernel``, one lane a parameter: increments the step count and derives from it, in double, the few scalars that
all elements of the parameter share. It runs before the update, so no program ever reads a count that another one is about
to change. ``update_kernel``, a persistent grid over the chunks of a list (``_tables.py``): reads gradient, moments and
weight, writes moments and weight. Bandwidth is the limit.

Parameters that store alike (dtypes, master, shadow, alignment) make a class, and each class is one launch of its own
specialization; a model has one or two. Gradients may start at any element (views into a communication bucket) while the
state is always aligned, so no peel could align both: such parameters are a class whose accesses are scalar. A skip
(``found_inf``) must leave every byte as it was, the count too.

Every fused multiply-add is written out, divisions and roots are the correctly rounded ones, and the compiler may not fuse
any other: results have the bits of the CPU and CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..ops._blocks import MAXIMIZE
from . import _tables
from ._split_master import join_master, split_master
from ._tables import chunk_ends, find_chunk

ROW = tl.constexpr(16)  # floats a parameter that prepare_kernel writes: inverse scale, clip factor, what the rule needs
FIRST_OPERAND = tl.constexpr(3)  # column; before: chunks up to and including this parameter, numel, place in `rows`
FLAG_MAXIMIZE = tl.constexpr(MAXIMIZE)
PREPARE_BLOCK = 128
BLOCK = 1024
PROGRAMS_PER_SM = 4

ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.int16: tl.int16}


@triton.jit
def real(address):
    """The double whose bits a table holds."""
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit
def read_six(row):
    """``read`` of a :class:`Rule` with six scalars."""
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@triton.jit
def _pointer(address, begin, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
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
    BLOCK: tl.constexpr,
):
    """``counters``: address of the step count, group. ``groups``: address of the learning rate, flags, learning rate, and
    what ``DERIVE(group, lr, flags, step)`` wants to know."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if found_inf is not None:
        n = tl.where(tl.load(found_inf) > 0.0, 0, n)
    mask = place < n
    row = tl.where(mask, place, 0)  # lanes beside the list do as the first one does, but store nothing
    counter = tl.load(counters + row * 2).to(tl.pointer_type(tl.float32))
    group = groups + tl.load(counters + row * 2 + 1) * GROUP_COLUMNS
    flags = tl.load(group + 1)
    lr = tl.load(tl.load(group).to(tl.pointer_type(tl.float32))).to(tl.float64) if LRS else real(group + 2)
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
    scalars = DERIVE(group, lr, flags, step)
    for i in tl.static_range(len(scalars)):
        tl.store(out + 2 + i, scalars[i], mask=mask)
    tl.store(counter, step, mask=mask)


@triton.jit
def _update_elements(pointers, offsets, mask, inv_scale, clip, scalars, ELEMENTS: tl.constexpr, APPLY: tl.constexpr):
    """One block. Everything is fetched before anything is converted: a conversion waits for its load, and a load issued
    after one might wait too."""
    MAIN: tl.constexpr = ELEMENTS[1]
    SECOND: tl.constexpr = ELEMENTS[2]
    SPLIT: tl.constexpr = tl.int16 == SECOND
    main_at = pointers[1].to(tl.pointer_type(tl.int16)) if SPLIT else pointers[1]
    grad = tl.load(pointers[0] + offsets, mask=mask, cache_modifier=".cg")
    fetched = ()
    for k in tl.static_range(3, len(ELEMENTS)):
        fetched += (tl.load(pointers[k] + offsets, mask=mask, cache_modifier=".cg"),)
    weight = tl.load(main_at + offsets, mask=mask, cache_modifier=".cg")
    if SPLIT:
        weight = join_master(weight, tl.load(pointers[2] + offsets, mask=mask, cache_modifier=".cg"), MAIN)

    moments = ()
    for k in tl.static_range(len(fetched)):
        moments += (fetched[k].to(tl.float32),)
    effective = grad.to(tl.float32) * inv_scale * clip
    updated = APPLY(weight.to(tl.float32), moments, effective, scalars)

    for k in tl.static_range(3, len(ELEMENTS)):
        tl.store(pointers[k] + offsets, updated[k - 2].to(ELEMENTS[k]), mask=mask, cache_modifier=".cs")
    if SPLIT:
        half, remainder = split_master(updated[0], MAIN)
        tl.store(main_at + offsets, half, mask=mask, cache_modifier=".cs")
        tl.store(pointers[2] + offsets, remainder, mask=mask, cache_modifier=".cs")
    else:
        tl.store(main_at + offsets, updated[0].to(MAIN), mask=mask, cache_modifier=".cs")
        if SECOND is not None:
            tl.store(pointers[2] + offsets, updated[0].to(SECOND), mask=mask, cache_modifier=".cs")


@triton.jit
def update_kernel(
    table,
    tensors,
    rows,
    found_inf,
    ELEMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    READ: tl.constexpr,
    APPLY: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``APPLY(weight, moments, effective gradient, scalars)`` for every element of the parameters of a class.

    ``ELEMENTS``: dtypes of the operands. The first is the gradient, only read; the second the weight, read and written;
    the third what is kept beside it: nothing, or a copy (the weight of an fp32 master, or the shadow of an fp32 weight),
    only written, or int16, the remainder of a split master; the rest are the moments.
    """
    COLUMNS: tl.constexpr = FIRST_OPERAND + len(ELEMENTS)
    ends, chunks = chunk_ends(table, tensors, COLUMNS, TENSORS)
    if found_inf is not None:
        chunks = tl.where(tl.load(found_inf) > 0.0, 0, chunks)
    offsets = tl.arange(0, BLOCK)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, begin, count = find_chunk(table, ends, chunk, COLUMNS)
        shared = rows + tl.load(row + 2) * ROW
        inv_scale, clip, scalars = tl.load(shared), tl.load(shared + 1), READ(shared + 2)
        pointers = ()
        for k in tl.static_range(len(ELEMENTS)):
            pointers += (_pointer(tl.load(row + FIRST_OPERAND + k), begin, ELEMENTS[k], ALIGNED),)
        whole = count // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            _update_elements(pointers, i + offsets, None, inv_scale, clip, scalars, ELEMENTS, APPLY)
        if whole < count:
            at = whole + offsets
            _update_elements(pointers, at, at < count, inv_scale, clip, scalars, ELEMENTS, APPLY)


@dataclass(frozen=True)
class Rule:
    """An optimizer: three jitted functions.

    ``derive(group, lr, flags, step)`` computes a parameter's scalars from its group's options, ``read(address)`` loads
    them again, ``apply(weight, moments, grad, scalars)`` is the step of an element.
    """

    derive: Callable
    read: Callable
    apply: Callable


def launch(
    rule: Rule,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    moments: Sequence[Sequence[torch.Tensor]],
    steps: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    shadows: Sequence[torch.Tensor],
    layout: torch.Tensor,
    lrs: Sequence[torch.Tensor],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    options: Sequence[tuple[float, ...]],
    flags: Sequence[int],
    max_norm: float,
) -> None:
    """One step; the arguments are the ops'. ``options``: for each group the learning rate and what ``rule`` wants besides,
    as doubles."""
    device = params[0].device
    counters, classes = _classes(params, grads, moments, steps, masters, shadows, layout.tolist())
    groups = tuple(
        (lrs[i].data_ptr() if lrs else 0, flags[i], *map(_tables.bits, values)) for i, values in enumerate(options)
    )
    rows = torch.empty(len(params) * ROW.value, dtype=torch.float32, device=device)
    programs = _tables.programs(device, PROGRAMS_PER_SM)
    with _tables.on(device):
        prepare_kernel[(triton.cdiv(len(params), PREPARE_BLOCK),)](
            _tables.upload(counters, device),
            len(params),
            _tables.upload(groups, device),
            rows,
            grad_scale,
            found_inf,
            sum_sq,
            max_norm,
            DERIVE=rule.derive,
            GROUP_COLUMNS=len(groups[0]),
            LRS=bool(lrs),
            BLOCK=PREPARE_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        for (elements, aligned), tensors in classes.items():
            for table in _tables.tensor_tables(tensors, device):
                update_kernel[(min(programs, table.chunks),)](
                    table.rows,
                    table.tensors,
                    rows,
                    found_inf,
                    ELEMENTS=elements,
                    ALIGNED=aligned,
                    READ=rule.read,
                    APPLY=rule.apply,
                    TENSORS=table.capacity,
                    BLOCK=BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
                )


def _classes(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    moments: Sequence[Sequence[torch.Tensor]],
    steps: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    shadows: Sequence[torch.Tensor],
    layout: Sequence[tuple[int, int, int, int]],
) -> tuple[tuple[tuple[int, int], ...], dict[tuple, list[tuple[int, ...]]]]:
    """The rows of ``prepare_kernel``, and the parameters of each class: numel, place, operands.

    A class is the dtypes of the operands (``None``: there is no second) and whether all are aligned to 16 bytes.
    """
    # Blocks are few and parameters many: what a block says is looked up once.
    buffers = [
        [(b.data_ptr(), b.element_size(), ELEMENTS[b.dtype]) if b.numel() else None for b in of_block]
        for of_block in zip(masters, shadows, *moments, strict=True)
    ]
    counts = [b.data_ptr() for b in steps]
    counters, classes = [], {}
    for place, (param, grad, (block, offset, slot, group)) in enumerate(zip(params, grads, layout, strict=True)):
        counters.append((counts[block] + 4 * slot, group))
        numel = param.numel()
        if numel == 0:
            continue
        own = param.data_ptr(), ELEMENTS[param.dtype]
        master, shadow, *state = (b and (b[0] + offset * b[1], b[2]) for b in buffers[block])
        if master and master[1] == tl.float32:
            main, second = master, own
        else:
            main, second = own, master or shadow
        operands = [(grad.data_ptr(), ELEMENTS[grad.dtype]), main, second or (0, None), *filter(None, state)]
        addresses, elements = zip(*operands, strict=True)
        aligned = all(address % 16 == 0 for address in addresses)
        classes.setdefault((elements, aligned), []).append((numel, place, *addresses))
    return tuple(counters), classes
