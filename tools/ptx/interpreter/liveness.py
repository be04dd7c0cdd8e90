"""Registers that are read although no path has written them. The bytes between the members of a struct are such registers, where the
compiler stores a struct as a whole: these may be put beside others (prmt) and stored in a vector, and nothing else."""

from collections.abc import Iterator

from .text import Address, Instruction, Kernel, Pair, Register, TensorAddress, Vector
from .types import PtxError

# Instructions whose first operand is no destination.
WITHOUT_RESULT = {
    "st",
    "red",
    "bra",
    "ret",
    "exit",
    "fence",
    "membar",
    "prefetch",
    "prefetchu",
    "stmatrix",
    "griddepcontrol",
    "cp",
}
WITHOUT_RESULT |= {"setmaxnreg", "barrier", "discard", "applypriority"}
WITHOUT_RESULT_BUT = (
    "bar.sync",
    "bar.arrive",
    "bar.warp",
    "mbarrier.init",
    "mbarrier.inval",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
)


def names(operand) -> Iterator[str]:
    """The registers of an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from names(item)
    elif isinstance(operand, Pair):
        yield from names(operand.first)
        yield from names(operand.second)
    elif isinstance(operand, Address):
        yield from names(operand.base)
    elif isinstance(operand, TensorAddress):
        yield from names(operand.map)
        for item in operand.coordinates:
            yield from names(item)


def written(instruction: Instruction) -> list[str]:
    op = instruction.op
    if not instruction.operands or op.split(".")[0] in WITHOUT_RESULT or op.startswith(WITHOUT_RESULT_BUT):
        return []
    return list(names(instruction.operands[0]))


def read(instruction: Instruction) -> list[str]:
    results = len(written(instruction)) > 0
    operands = instruction.operands[1:] if results else instruction.operands
    guard = [instruction.guard.name] if instruction.guard else []
    return guard + [name for operand in operands for name in names(operand)]


def moved(instruction: Instruction) -> set[str]:
    """The registers whose bytes an instruction puts beside others, in a register or in memory."""
    if instruction.op.startswith("prmt"):
        return set(read(instruction))
    stored = instruction.operands[-1:] if instruction.op.startswith("st.") else []
    return {name for operand in stored if isinstance(operand, Vector) for name in names(operand)}


def padding(code: list[Instruction]) -> set[str]:
    """Registers that no instruction writes, or prmt from nothing but such."""
    found = {name for instruction in code for name in read(instruction)}
    found -= {name for instruction in code if not instruction.op.startswith("prmt") for name in written(instruction)}
    bytes_put_together = [i for i in code if i.op.startswith("prmt")]
    for _ in bytes_put_together:  # as often as one can depend on another
        found -= {name for i in bytes_put_together if not found.issuperset(read(i)) for name in written(i)}
    return found


def check(kernel: Kernel) -> None:
    """Forward data flow over basic blocks; what may have been written is a set of bits."""
    code, bit = kernel.code, {name: 1 << i for i, name in enumerate(kernel.registers)}
    between = padding(code)
    starts = {0, *kernel.labels.values()}
    starts |= {
        i + 1 for i, instruction in enumerate(code[:-1]) if instruction.op.split(".")[0] in ("bra", "ret", "exit")
    }
    order = sorted(start for start in starts if start < len(code))
    ends = dict(zip(order, [*order[1:], len(code)], strict=True))
    gained, following = {}, {}
    for start, end in ends.items():
        gained[start] = 0
        for instruction in code[start:end]:
            for name in written(instruction):
                gained[start] |= bit[name] if name not in between else 0
        last = code[end - 1]
        jump = last.op.split(".")[0]
        following[start] = [kernel.labels[last.operands[0].name]] if jump == "bra" else []
        if end < len(code) and (last.guard or jump not in ("bra", "ret", "exit")):
            following[start].append(end)
    reached, seen, changed = dict.fromkeys(ends, 0), {0}, True
    while changed:
        changed = False
        for start in order:
            out = reached[start] | gained[start]
            for target in following[start] if start in seen else ():
                if target not in seen or out & ~reached[target]:
                    seen.add(target)
                    reached[target] |= out
                    changed = True
    for start in seen:
        have = reached[start]
        for instruction in code[start : ends[start]]:
            passed_on = between & moved(instruction)
            for name in read(instruction):
                if not have & bit[name] and name not in passed_on:
                    raise PtxError(
                        f"{kernel.name}: {name.split('#')[0]} is read, and nothing has written it: {instruction.text}"
                    )
            for name in written(instruction):
                have |= bit[name] if name not in between else 0
