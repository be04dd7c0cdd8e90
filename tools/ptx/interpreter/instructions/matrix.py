"""Matrices of a warp, PTX ISA §9.7.14: mma.sync, ldmatrix, stmatrix. Lane 4 g + t holds what the figures call groupID g and
threadID_in_group t."""

import numpy as np

from ..types import GONE, WARP, PtxError, from_bf16, from_f16
from . import meaning
from .memory import touch

EXTRA_BITS = 2  # below the last of fp32 that aligned addends keep when tensor cores truncate


def accumulate(products: np.ndarray, c: np.ndarray, truncate: bool) -> np.ndarray:
    """c + the sum over the last axis, as fp32. The products are exact in double. By default the sum is rounded once; `truncate` does
    what is known of the hardware: addends are aligned to the largest and cut, and the sum is cut (FTTN, arXiv:2403.00232)."""
    if not truncate:
        return (products.sum(-1) + c.astype(np.float64)).astype(np.float32)
    addends = np.concatenate([products, c.astype(np.float64)[..., None]], -1)
    _, exponent = np.frexp(np.abs(addends).max(-1))
    quantum = np.ldexp(1.0, exponent - 24 - EXTRA_BITS)[..., None]
    total = (np.trunc(addends / quantum) * quantum).sum(-1)
    rounded = total.astype(np.float32)
    too_large = np.abs(rounded.astype(np.float64)) > np.abs(total)
    return np.where(too_large, np.nextafter(rounded, np.float32(0)), rounded)


def halves(block, registers, active) -> np.ndarray:
    """[register, warp, g, t, 2] of 16-bit elements, the lower half first."""
    rows = [np.ascontiguousarray(r.reshape(-1, WARP)[active]).view(np.uint16).reshape(-1, 8, 4, 2) for r in registers]
    return np.stack(rows)


# §9.7.14.5.7 (m16n8k8), §9.7.14.5.8 (m16n8k16): D = A B + C; A row-major, B column-major, fragments of f16 or bf16
@meaning(r"mma\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<kind>f16|bf16)\.(?P<kind_b>f16|bf16)\.f32")
def mma(block, instruction, pc, k, kind, kind_b):
    depth = int(k)
    d, a, b, c = ([block.register(r.name) for r in operand.items] for operand in instruction.operands)
    if kind != kind_b or [len(x) for x in (d, a, b, c)] != [4, depth // 4, depth // 8, 4]:
        raise PtxError(f"fragments that do not fit: {instruction.text}")
    value = from_f16 if kind == "f16" else from_bf16

    def run(mask):
        if not block.gather(instruction, pc):
            return GONE
        active = block.mask.reshape(-1, WARP).all(1)
        fa, fb = halves(block, a, active), halves(block, b, active)
        warps = fa.shape[1]
        # a: register i holds rows g + 8 (i & 1) and columns 2 t + 8 (i >> 1)
        left = np.empty((warps, 16, depth), np.uint16)
        for i in range(len(a)):
            row, column = 8 * (i & 1), 8 * (i >> 1)
            left[:, row : row + 8, column : column + 8] = fa[i].reshape(warps, 8, 8)
        # b: register i holds rows 2 t + 8 i and column g
        right = np.empty((warps, depth, 8), np.uint16)
        for i in range(len(b)):
            right[:, 8 * i : 8 * i + 8] = fb[i].reshape(warps, 8, 8).transpose(0, 2, 1)
        x, y = value(left).astype(np.float64), value(right).astype(np.float64)
        # c: registers 2 h and 2 h + 1 hold row g + 8 h, columns 2 t and 2 t + 1
        old = np.stack([r.view(np.float32).reshape(-1, WARP)[active] for r in c]).reshape(2, 2, warps, 8, 4)
        old = old.transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
        if block.launch.device.truncate:
            new = accumulate(x[:, :, None, :] * y.transpose(0, 2, 1)[:, None], old, True)
        else:
            new = (np.matmul(x, y) + old.astype(np.float64)).astype(np.float32)
        parts = new.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, warps, WARP)
        for register, part in zip(d, parts, strict=True):
            register.view(np.float32).reshape(-1, WARP)[active] = part

    return run


def matrix_rows(block, address, count: int, text: str, write: bool):
    """The warps, and [warp, matrix, row, element] places of 8x8 matrices: lane 8 i + r has the address of row r of matrix i, 16 bytes
    each, aligned to 16."""
    active = block.mask.reshape(-1, WARP).all(1)
    lanes = np.arange(8 * count)
    addresses = address().reshape(-1, WARP)[active][:, lanes].reshape(-1)
    first = block.shared.places(addresses, 16, 2, text)
    threads = block.thread.reshape(-1, WARP)[active][:, lanes].reshape(-1)
    touch(block.shared, block, addresses, threads, 16, text, write=write)
    return active, (first[:, None] + np.arange(8)).reshape(-1, count, 8, 8)


# §9.7.14.5.15 ldmatrix: lane 4 g + t receives elements 2 t and 2 t + 1 of row g, with .trans of column g
@meaning(r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?(\.shared(::cta)?)?\.b16")
def ldmatrix(block, instruction, pc, count, trans):
    registers = [block.register(r.name) for r in instruction.operands[0].items]
    address = block.address(instruction.operands[1])
    if len(registers) != int(count):
        raise PtxError(f"{len(registers)} registers: {instruction.text}")

    def run(mask):
        if not block.gather(instruction, pc):
            return GONE
        active, places = matrix_rows(block, address, int(count), instruction.text, False)
        values = block.shared.elements[2][places]
        if trans:
            values = values.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(values).reshape(len(values), int(count), WARP, 2).view(np.uint32)[..., 0]
        for i, register in enumerate(registers):
            register.reshape(-1, WARP)[active] = words[:, i]

    return run


# §9.7.14.5.16 stmatrix: the way back
@meaning(r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?(\.shared(::cta)?)?\.b16")
def stmatrix(block, instruction, pc, count, trans):
    address = block.address(instruction.operands[0])
    registers = [block.register(r.name) for r in instruction.operands[1].items]
    if len(registers) != int(count):
        raise PtxError(f"{len(registers)} registers: {instruction.text}")

    def run(mask):
        if not block.gather(instruction, pc):
            return GONE
        active, places = matrix_rows(block, address, int(count), instruction.text, True)
        for i, register in enumerate(registers):
            values = np.ascontiguousarray(register.reshape(-1, WARP)[active]).view(np.uint16).reshape(-1, 8, 8)
            block.shared.elements[2][places[:, i]] = values.transpose(0, 2, 1) if trans else values

    return run
