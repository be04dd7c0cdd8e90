"""Matrix products of a warpgroup, PTX ISA §9.7.15: wgmma.mma_async, fence, commit_group, wait_group."""

import numpy as np

from ..memory import granules_of
from ..tensor_map import SWIZZLE_MASK
from ..text import Pair, Register, Vector
from ..types import GONE, WARPGROUP, PtxError, from_bf16, from_f16
from . import meaning, uniform
from .matrix import accumulate

SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}  # §9.7.15.5.1.2.2, bits 62-63: none, 128, 64 and 32 bytes; as modes of a tensor map


class Product:
    """One wgmma.mma_async in flight."""

    must_be_waited_for = True

    def __init__(self, block, group, names, old, value, places, text):
        self.block, self.blocks, self.group, self.text = block, [block], group, text
        self.names, self.registers = frozenset(names), [block.register(name) for name in names]
        self.old, self.value = old, value
        self.places = places  # of A and B in shared memory, [rows, 16] elements
        self.done = False
        for at in places:
            np.add.at(block.shared.shadow.being_read, granules_of(at, 2), 1)

    def complete(self) -> None:
        """Products of one warpgroup complete in their order: those in front first."""
        queue = groups(self.block, self.group)
        for one in [*(p for done in queue.committed for p in done), *queue.open]:
            if not one.done:
                one.multiply()
            if one is self:
                break

    def multiply(self) -> None:
        self.done = True
        shared = self.block.shared
        a, b = (self.value(shared.elements[2][at]).astype(np.float64) for at in self.places)
        for at in self.places:
            np.subtract.at(shared.shadow.being_read, granules_of(at, 2), 1)
        n = b.shape[0]
        lanes = slice(WARPGROUP * self.group, WARPGROUP * (self.group + 1))
        # §9.7.15.5.1.1, figure of D: lane 4 g + t of warp w holds rows 16 w + g (+ 8) and columns 8 j + 2 t (+ 1)
        values = np.stack([r.view(np.float32)[lanes] for r in self.registers])
        old = values.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(64, n)
        if not self.old:
            old = np.zeros_like(old)
        if self.block.launch.device.truncate:
            new = accumulate(a[:, None, :] * b[None], old, True)
        else:
            new = (np.matmul(a, b.T) + old.astype(np.float64)).astype(np.float32)
        out = new.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, WARPGROUP)
        for register, part in zip(self.registers, out, strict=True):
            register.view(np.float32)[lanes] = part
        if self in self.block.launch.in_flight:
            self.block.launch.in_flight.remove(self)


class Queue:
    def __init__(self):
        self.open: list[Product] = []
        self.committed: list[list[Product]] = []
        self.fenced = False  # there was a wgmma.fence
        self.touched: set[str] = set()  # accumulators that other instructions used since then


def groups(block, group: int) -> Queue:
    return block.state.setdefault(("wgmma", group), Queue())


def warpgroups(block) -> np.ndarray:
    return np.flatnonzero(block.mask.reshape(-1, WARPGROUP).any(1))


def operand_places(block, descriptor: int, rows: int, transposed: bool, text: str) -> np.ndarray:
    """[row, k] elements of an operand in shared memory. §9.7.15.5.1.2.2: start, leading and stride offsets in units of 16 bytes.
    K-major, a swizzle row holds 8 rows' k; groups of 8 rows lie `stride` apart. MN-major, a swizzle row holds consecutive rows; groups of
    8 k lie `stride` apart, and what does not fit a row of the swizzle `leading` apart."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = SWIZZLE[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise PtxError(f"a base offset in descriptor {descriptor:#x} has no meaning here: {text}")
    if mode == 0:
        raise PtxError(f"no swizzle in descriptor {descriptor:#x} has no meaning here: {text}")
    width = 16 << mode  # bytes of a swizzle row
    row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if transposed:
        per = width // 2
        address = start + row // per * leading + row % per * 2 + k // 8 * stride + k % 8 * width
    else:
        address = start + row // 8 * stride + row % 8 * width + k * 2
    address = address ^ (((address >> 7) & SWIZZLE_MASK[mode]) << 4)
    return block.shared.places(address.reshape(-1).astype(np.uint64), 2, 2, text).reshape(address.shape)


@meaning(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.f32\.(?P<kind>f16|bf16)\.(?P<kind_b>f16|bf16)")
def mma_async(block, instruction, pc, n, kind, kind_b):
    d, a, b, scale_d, scale_a, scale_b, trans_a, trans_b = instruction.operands
    text, width = instruction.text, int(n)
    names = [r.name for r in d.items]
    if (
        kind != kind_b
        or len(names) != width // 2
        or width % 8
        or not 8 <= width <= 256
        or len(set(names)) != len(names)
    ):
        raise PtxError(f"an accumulator that does not fit: {text}")
    if (scale_a.value, scale_b.value) != (1, 1):
        raise PtxError(f"scales other than 1 have no meaning here: {text}")
    of_a, of_b, keeps = block.source(a, "u64"), block.source(b, "u64"), block.source(scale_d, "pred")
    value = from_f16 if kind == "f16" else from_bf16

    def run(mask):
        if not block.gather(instruction, pc, WARPGROUP):
            return GONE
        whole = block.mask
        for group in warpgroups(block):
            block.mask = np.zeros_like(whole)
            block.mask[WARPGROUP * group : WARPGROUP * (group + 1)] = True
            descriptors = uniform(block, of_a, text), uniform(block, of_b, text)
            old = bool(uniform(block, block.per_thread(keeps), text))
            queue = groups(block, int(group))
            touched = queue.touched.intersection(names)
            if not queue.fenced or touched:
                raise PtxError(f"no wgmma.fence since {sorted(touched)[:3] or 'the start'} was used: {text}")
            places = [
                operand_places(block, descriptor, rows, bool(trans.value), text)
                for descriptor, rows, trans in zip(descriptors, (64, width), (trans_a, trans_b), strict=True)
            ]
            for at in places:
                block.shared.shadow.read(granules_of(at, 2), block, 4 * int(group), text, proxy=True)
            one = Product(block, int(group), names, old, value, places, text)
            queue.open.append(one)
            block.launch.begin(one)
        block.mask = whole

    return run


@meaning(r"wgmma\.fence\.sync\.aligned")
def fence(block, instruction, pc):
    def run(mask):
        if not block.gather(instruction, pc, WARPGROUP):
            return GONE
        for group in warpgroups(block):
            queue = groups(block, int(group))
            queue.fenced = True
            queue.touched.clear()

    return run


@meaning(r"wgmma\.commit_group\.sync\.aligned")
def commit(block, instruction, pc):
    def run(mask):
        if not block.gather(instruction, pc, WARPGROUP):
            return GONE
        for group in warpgroups(block):
            queue = groups(block, int(group))
            queue.committed.append(queue.open)
            queue.open = []

    return run


# all but the youngest n groups are complete, and their accumulators may be used
@meaning(r"wgmma\.wait_group\.sync\.aligned")
def wait(block, instruction, pc):
    most = int(block.source(instruction.operands[0], "u32"))

    def run(mask):
        if not block.gather(instruction, pc, WARPGROUP):
            return GONE
        for group in warpgroups(block):
            queue = groups(block, int(group))
            due = queue.committed[: max(0, len(queue.committed) - most)]
            for one in (p for done in due for p in done):
                if not one.done:
                    one.multiply()
            del queue.committed[: len(due)]

    return run


# ---- §9.7.15.7.1: accumulators may not be used while a product is in flight, nor between a fence and the product
def uses_of_accumulators(code: list) -> dict[int, list[str]]:
    """The instructions besides wgmma that use registers in which some product is accumulated, by their place in the code."""
    products = (i for i in code if i.op.startswith("wgmma.mma_async"))
    accumulators = {name for product in products for name in mentioned(product.operands[:1])}
    if not accumulators:
        return {}
    others = {pc: set(mentioned(i.operands)) for pc, i in enumerate(code) if not i.op.startswith("wgmma.")}
    return {pc: sorted(accumulators & names) for pc, names in others.items() if not accumulators.isdisjoint(names)}


def mentioned(operands):
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from mentioned(operand.items)
        elif isinstance(operand, Pair):
            yield from mentioned((operand.first, operand.second))


def watched(block, closure, used: list[str], text: str):
    names = set(used)

    def run(mask):
        for group in warpgroups(block):
            queue = groups(block, int(group))
            queue.touched |= names
            for one in [*(p for done in queue.committed for p in done), *queue.open]:
                if not names.isdisjoint(one.names):
                    raise PtxError(f"{sorted(names)[0]} is used while a wgmma may still write it: {text}")
        return closure(mask)

    return run
