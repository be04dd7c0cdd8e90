"""A thread block: registers, special registers, shared memory, and threads in groups that share a program counter.

An instruction is one numpy operation over a group. Groups that meet merge; a group may be split at any instruction, since threads
progress independently (PTX ISA 9.0, §3.1), and instructions for whole warps gather their lanes again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .instructions import build, wgmma
from .memory import shared_region
from .order import SEEN, Knowledge
from .text import Immediate, Instruction, Kernel, Register, Sink, Special, Symbol
from .types import BYTES, GONE, SIGNED, UNSIGNED, WARP, PtxError, is_float, numpy_type

POISON = 0xCD  # of fresh registers


@dataclass
class Wait:
    """Threads that wait for something, and where they go on."""

    ready: Callable[[], bool]
    then: Callable[[], None] | None
    pc: int
    mask: np.ndarray
    what: Callable[[], str]
    text: str


class Block:
    def __init__(self, kernel: Kernel, threads: int, shape: tuple[int, int, int], shared_bytes: int):
        self.kernel, self.threads = kernel, threads
        self.size = -(-threads // WARP) * WARP  # lanes that do not exist are never live
        self.warps = self.size // WARP
        self.registers: dict[str, np.ndarray] = {}
        self.closures: list[Any] = [None] * len(kernel.code)
        self.targets = set(kernel.labels.values())
        self.shared = shared_region(kernel.dynamic_at + shared_bytes)
        self.thread = np.arange(self.size, dtype=np.uint32)
        self.lane, self.warp_of = self.thread % WARP, (self.thread // WARP).astype(np.int64)
        self.special = {name: np.zeros(self.size, np.uint32) for name in SPECIAL}
        x, y, _ = shape
        for axis, value in zip("xyz", (self.thread % x, self.thread // x % y, self.thread // (x * y)), strict=True):
            self.special[f"tid.{axis}"][:] = value
        for axis, value in zip("xyz", shape, strict=True):
            self.special[f"ntid.{axis}"][:] = value
        self.special["laneid"][:] = self.lane
        self.special["warpid"][:] = self.warp_of
        self.watched = wgmma.uses_of_accumulators(kernel.code)

    def reset(self, launch, index: int, rank: int) -> None:
        """Becomes block `index` of a launch, which is number `rank` of its cluster."""
        self.launch, self.index, self.rank = launch, index, rank
        self.participant = launch.base + launch.first_participant(index)
        self.knowledge = Knowledge(self.warps, launch.participants, launch.first_participant(index))
        self.knowledge.start(launch.overlapping)
        for array in self.registers.values():
            array[:] = False if array.dtype == np.bool_ else POISON
        for name, value in launch.special(index, rank).items():
            self.special[name][:] = value
        self.shared.bytes[:] = POISON
        self.shared.shadow.clear()
        self.live = np.arange(self.size) < self.threads
        self.groups = {0: self.live.copy()}
        self.waits: list[Wait] = []
        self.gathering: dict[int, np.ndarray] = {}
        self.state: dict[str, Any] = {}  # of instruction families, by their name
        self.mbarrier_slots: dict[int, int] = {}
        self.touched: dict[int, tuple[int, str]] = {}  # by participants of other blocks: epoch and text
        self.executed = 0

    # ---- operands
    def register(self, name: str) -> np.ndarray:
        array = self.registers.get(name)
        if array is None:
            size = self.kernel.registers[name]
            array = np.zeros(self.size, np.bool_) if size == 0 else np.full(self.size, POISON, UNSIGNED[size])
            self.registers[name] = array
        return array

    def source(self, operand, kind: str):
        """An operand as an array (a view of the register, or per thread) or a numpy scalar of the type."""
        if isinstance(operand, Register):
            array = self.register(operand.name)
            if kind == "pred":
                return ~array if operand.negated else array
            size = BYTES[kind]
            if array.dtype.itemsize != size:  # §6.4: the low part of a wider register
                if array.dtype.itemsize < size:
                    raise PtxError(f"register {operand.name} is narrower than .{kind}")
                array = array.view(UNSIGNED[size])[:: array.dtype.itemsize // size]
            return array.view(numpy_type(kind))
        if isinstance(operand, Immediate):
            value = operand.value
            if kind == "pred":
                return np.bool_(value)
            if isinstance(value, np.floating):
                return numpy_type(kind)(value) if is_float(kind) else value.view(UNSIGNED[value.itemsize])
            if is_float(kind):
                return numpy_type(kind)(value)
            bits = np.array(value & ((1 << 8 * BYTES[kind]) - 1), UNSIGNED[BYTES[kind]])
            return bits.view(numpy_type(kind))[()]
        if isinstance(operand, Special):
            if operand.name not in self.special:
                raise PtxError(f"no meaning for the special register %{operand.name}")
            array = self.special[operand.name]
            size = BYTES[kind]
            return array.view(numpy_type(kind)) if size == 4 else SpecialAs(array, numpy_type(kind))
        if isinstance(operand, Symbol):
            return np.array(operand.address, UNSIGNED[BYTES[kind]]).view(numpy_type(kind))[()]
        raise PtxError(f"an operand that is no value: {operand}")

    def writer(self, operand, kind: str) -> Callable:
        """write(value, mask). A wider register is zero- or sign-extended (§6.4, table 25)."""
        if isinstance(operand, Sink):
            return lambda value, mask: None
        array = self.register(operand.name)
        if kind == "pred":
            return lambda value, mask: np.copyto(array, value, where=mask)
        size = BYTES[kind]
        if array.dtype.itemsize == size:
            out = array.view(numpy_type(kind))
            return lambda value, mask: np.copyto(out, value, where=mask, casting="unsafe")
        if array.dtype.itemsize < size:
            raise PtxError(f"register {operand.name} is narrower than .{kind}")
        wide = array.view((SIGNED if kind[0] == "s" else UNSIGNED)[array.dtype.itemsize])
        narrow = numpy_type(kind) if kind[0] in "su" else UNSIGNED[size]

        def write(value, mask):
            value = np.asarray(value)
            value = value.view(narrow) if value.dtype.itemsize == size else value.astype(narrow)
            np.copyto(wide, value, where=mask, casting="unsafe")

        return write

    def address(self, operand) -> Callable:
        """A function that gives the address of every thread."""
        if isinstance(operand.base, (Symbol, Immediate)):
            value = operand.base.address if isinstance(operand.base, Symbol) else operand.base.value
            fixed = np.full(self.size, value + operand.offset, np.uint64)
            return lambda: fixed
        register, offset = self.register(operand.base.name), operand.offset
        if register.dtype == np.uint32:
            step = np.uint32(offset & 0xFFFFFFFF)
            return lambda: (register + step).astype(np.uint64)
        step64 = np.uint64(offset & (2**64 - 1))
        return (lambda: register + step64) if offset else (lambda: register)

    def per_thread(self, value) -> np.ndarray:
        return np.broadcast_to(np.asarray(value), self.size)

    # ---- progress
    def done(self) -> bool:
        return not self.live.any()

    def join(self, pc: int, mask: np.ndarray) -> None:
        if mask.any():
            self.groups[pc] = self.groups[pc] | mask if pc in self.groups else mask

    def wait(self, ready, pc: int, mask, what, text: str, then=None) -> str:
        self.waits.append(Wait(ready, then, pc, mask.copy(), what, text))
        return GONE

    def gather(self, instruction: Instruction, pc: int, width: int = WARP) -> bool:
        """True if the group consists of whole warps (or warpgroups). If not, what is incomplete waits at `pc` for the lanes that are
        missing, and the instruction must end with GONE."""
        rows, live = self.mask.reshape(-1, width), self.live.reshape(-1, width)
        present = rows.any(1)
        if (rows[present] == live[present]).all():
            return True
        union = self.gathering.pop(pc, np.zeros(self.size, bool)) | self.mask
        rows = union.reshape(-1, width)
        whole = (rows == live).all(1) & rows.any(1)
        complete = np.repeat(whole, width) & union
        self.join(pc, complete)
        if (union & ~complete).any():
            self.gathering[pc] = union & ~complete
        return False

    def active_warps(self) -> np.ndarray:
        return np.flatnonzero(self.mask.reshape(-1, WARP).any(1))

    def step(self, schedule) -> bool:
        """Runs until every thread waits or the schedule takes the turn away; whether anything ran."""
        ran = False
        turn = schedule.turn()
        while turn > 0:
            if self.waits:
                waits, self.waits = self.waits, []
                for w in waits:
                    if w.ready():
                        if w.then:
                            self.mask = w.mask
                            w.then()
                        self.join(w.pc, w.mask)
                    else:
                        self.waits.append(w)
            if not self.groups:
                return ran
            ran = True
            pc = schedule.choose(self.groups)
            mask = schedule.part(self.groups.pop(pc), lambda rest, pc=pc: self.join(pc, rest))
            turn -= self.run(pc, mask, schedule.length())
        return ran

    def run(self, pc: int, mask: np.ndarray, length: int) -> int:
        """Executes a group until it ends, waits, or another one is to go on; the number of instructions."""
        groups, executed = self.groups, 0
        while True:
            if groups and pc in self.targets and (pc in groups or min(groups) < pc):
                self.join(pc, mask)
                break
            if executed >= length:
                self.join(pc, mask)
                break
            self.mask = mask
            closure = self.closures[pc]
            if closure is None:
                closure = self.closures[pc] = build(self, self.kernel.code[pc], pc)
            executed += 1
            next_pc = closure(True if mask.all() else mask)
            if next_pc is None:
                pc += 1
            elif next_pc is GONE:
                break
            else:
                pc = next_pc
        self.executed += executed
        return executed

    def must_live(self, other: "Block", text: str) -> None:
        if self.done():
            raise PtxError(f"block {self.index} has ended, and block {other.index} works in its shared memory: {text}")

    def touched_by(self, other: "Block", warp: int, text: str) -> None:
        """Another block of the cluster works in this block's shared memory, which must not end before."""
        self.must_live(other, text)
        epoch = int(other.knowledge.epoch[warp])
        self.touched[other.participant - other.launch.base + warp] = (epoch, text)

    def check_end(self) -> None:
        """All threads have ended: whoever worked in the shared memory from outside must be known to be done."""
        known = self.knowledge.known[SEEN].max(axis=0)
        for participant, (epoch, text) in self.touched.items():
            if known[participant] < epoch:
                who = self.launch.participant(participant)
                raise PtxError(
                    f"block {self.index} ends, and nothing orders an access of {who} to its shared memory before: {text}"
                )
        if any(begun for begun, _ in self.state.get("bulk", {}).values()):
            raise PtxError(f"block {self.index} ends with a bulk copy that was never committed")

    def stuck(self) -> list[str]:
        """The waiting warps and their places."""
        lines = [f"block {self.index}: {threads(w.mask)} at: {w.text}: {w.what()}" for w in self.waits]
        for pc, mask in self.gathering.items():
            missing = "lanes of their warps are missing at an instruction for whole warps"
            lines.append(f"block {self.index}: {threads(mask)} at: {self.kernel.code[pc].text}: {missing}")
        return lines


def threads(mask: np.ndarray) -> str:
    which = np.flatnonzero(mask)
    return f"{len(which)} threads ({which[0]} to {which[-1]})"


class SpecialAs:
    """A special register read as another type: converted when it is used."""

    def __init__(self, array, kind):
        self.array, self.kind = array, kind

    def __array__(self, dtype=None, copy=None):
        return self.array.astype(self.kind)


AXES = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
SPECIAL = [f"{name}.{axis}" for name in AXES for axis in "xyz"]
SPECIAL += ["laneid", "warpid", "cluster_ctarank", "cluster_nctarank", "lanemask_eq", "lanemask_lt", "smid"]
