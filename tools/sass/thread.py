"""Follows one thread through a kernel's machine code (SASS, sm_90) for given arguments, and counts what it executes.

Integers, addresses and predicates are computed, from the thread's number, the bytes of the kernel's arguments and words of shared
memory that the caller names; what else comes from memory is unknown (None), unless the caller names that, too, and so are floats of it.
A branch on something unknown is not taken: those are the slow paths of a division, and what a wait says. Asynchronous work is taken as
done, so a loop that waits ends at once.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable

from .floats import MASK, Floats, both, either
from .listing import Instruction


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


class Thread(Floats):
    """`constants`: the first constant bank, with the arguments. `shared`: by address, what a word of shared memory is each time that it
    is read. `memory`: the word at an address of global memory. Warp-wide operations see this thread alone."""

    def __init__(
        self,
        code: dict[int, Instruction],
        table: list[int],
        constants: bytes,
        thread: int,
        shared: dict[int, Iterable[int]] | None = None,
        memory: Callable[[int], int] | None = None,
    ):
        self.code, self.table, self.constants = code, table, constants
        self.memory = memory
        self.shared = {address: iter(words) for address, words in (shared or {}).items()}
        self.special = {"SR_TID.X": thread, "SR_CTAID.X": 0, "SR_LANEID": thread % 32}
        self.registers: dict[str, int | None] = {"RZ": 0, "URZ": 0}
        self.predicates: dict[str, bool | None] = {"PT": True, "UPT": True}
        self.counts: Counter[str] = Counter()
        self.path: list[Instruction] = []

    def run(self, limit: int = 200_000) -> list[Instruction]:
        """The instructions executed until the thread exits, those that its predicate turns off included: they take their turn."""
        at = 0
        while len(self.path) < limit:
            x = self.code[at]
            self.path.append(x)
            at += 16
            if x.guard and not self.predicate(x.guard):
                continue
            if x.name == "EXIT":
                return self.path
            at = self.execute(x, at)
        raise RuntimeError(f"no end after {limit} instructions, at {at:#x}")

    # ---- operands

    def predicate(self, text: str) -> bool | None:
        value = self.predicates.get(text.lstrip("!"))
        return value if value is None or text[0] != "!" else not value

    def read(self, text: str) -> int | None:
        if text[0] in "-~" and not text[1:].startswith("0x"):
            value = self.read(text[1:])
            return None if value is None else (-value if text[0] == "-" else ~value) & MASK
        if re.fullmatch(r"-?0x[0-9a-f]+", text):
            return int(text, 16) & MASK
        if match := re.fullmatch(r"c\[0x0\]\[(0x[0-9a-f]+)\]", text):
            return self.constant(int(match[1], 16), 4)
        return self.registers.get(text, 0)  # nothing depends on what no instruction has written

    def constant(self, offset: int, size: int) -> int | None:
        piece = self.constants[offset : offset + size]
        return int.from_bytes(piece, "little") if len(piece) == size else None

    def write(self, text: str, value: int | None) -> None:
        if text not in ("RZ", "URZ"):
            self.registers[text] = value

    def write_pair(self, text: str, value: int | None) -> None:
        self.write(text, None if value is None else value & MASK)
        if match := re.fullmatch(r"(U?R)(\d+)", text):
            self.write(f"{match[1]}{int(match[2]) + 1}", None if value is None else value >> 32)

    def read_pair(self, text: str) -> int | None:
        low, high = self.read(text), 0
        if match := re.fullmatch(r"(U?R)(\d+)", text):
            high = self.read(f"{match[1]}{int(match[2]) + 1}")
        return None if low is None or high is None else low | high << 32

    def set(self, text: str, value: bool | None) -> None:
        if text not in ("PT", "UPT"):
            self.predicates[text] = value

    # ---- instructions

    def execute(self, x: Instruction, following: int) -> int:
        """The address that comes next."""
        if x.name == "BRA":
            taken = all(self.predicate(p) for p in x.operands[:-1] if re.fullmatch(r"!?U?P\w+", p))
            return int(x.operands[-1], 16) if taken and not {"DIV", "ANY"} & {*x.modifiers} else following
        if x.name == "BRX":
            register, offset = x.operands[0].split()
            return following + signed(self.read(register)) + int(offset, 16)
        handler = getattr(self, "do_" + x.name.lower().lstrip("u"), None) or getattr(self, "do_" + x.name.lower(), None)
        if handler:
            handler(x)
        else:
            self.forget(x)
        return following

    def forget(self, x: Instruction) -> None:
        """Results of which nothing is known: up to four registers of a load, and predicates."""
        if x.name.startswith(("ST", "BAR", "SYNCS", "RED", "UTMA", "BSSY", "BSYNC", "CALL")) and x.name != "SYNCS":
            return
        for text in x.operands[:2]:
            if re.fullmatch(r"U?P\d", text):
                # A wait is over; what elects a thread elects this one.
                self.set(text, True if x.name in ("SYNCS", "USETMAXREG", "ELECT") else None)
        if x.operands and (match := re.fullmatch(r"(U?R)(\d+)", x.operands[0])):
            count = 4 if "128" in x.modifiers else 2 if "64" in x.modifiers else 1
            for i in range(count):
                self.write(f"{match[1]}{int(match[2]) + i}", None)

    def do_s2r(self, x):
        self.write(x.operands[0], self.special.get(x.operands[1], 0))

    do_s2ur = do_s2r

    def do_mov(self, x):
        self.write(x.operands[0], self.read(x.operands[1]))

    do_r2ur = do_mov

    def do_cs2r(self, x):
        self.write_pair(x.operands[0], 0)

    def do_ldc(self, x):
        bank, register, offset = re.fullmatch(
            r"c\[(0x[0-9a-f])\]\[(?:(U?R\w+)\+?)?(-?0x[0-9a-f]+)?\]", x.operands[1]
        ).groups()
        at = int(offset or "0", 16)
        if not register:
            at &= 0xFFFF  # cuobjdump shows it with a sign
        else:
            index = self.read(register)
            if index is None:
                return self.forget(x)
            at = (at + index) & MASK
        if bank == "0x2":
            return self.write(x.operands[0], self.table[at // 4])
        if "64" in x.modifiers:
            return self.write_pair(x.operands[0], self.constant(at, 8))
        return self.write(x.operands[0], self.constant(at, 1 if "U8" in x.modifiers else 4))

    def do_lds(self, x):
        terms = [self.read(text) for text in x.operands[1].strip("[]").split("+")]
        address = None if None in terms else sum(terms) & MASK
        wide = address is not None and "128" in x.modifiers
        words = [self.shared.get(address + i) for i in (0, 4, 8, 12)] if wide else []
        if not words or None in words:
            return self.forget(x)
        first = int(x.operands[0].removeprefix("R"))
        for i, word in enumerate(words):
            self.write(f"R{first + i}", next(word))

    def do_isetp(self, x):
        compare, to, other = x.modifiers[0], x.operands[0], x.operands[1]
        a, b = self.read(x.operands[2]), self.read(x.operands[3])
        result = None
        if a is not None and b is not None:
            if "U32" not in x.modifiers:
                a, b = signed(a), signed(b)
            result = {"EQ": a == b, "NE": a != b, "GE": a >= b, "GT": a > b, "LT": a < b, "LE": a <= b}[compare]
            if "EX" in x.modifiers:  # the upper halves; the last operand says how the lower ones compare
                lower = self.predicate(x.operands[5])
                if compare == "NE":
                    result = True if a != b else lower
                else:
                    result = result and lower if compare == "EQ" else lower if a == b else result
        with_ = self.predicate(x.operands[4])
        self.set(to, both(result, with_) if "AND" in x.modifiers else either(result, with_))
        value = self.predicates.get(to)
        self.set(other, None if value is None else not value)

    def do_ldg(self, x):
        match = re.fullmatch(r"desc\[UR\d+\]\[(U?R\d+)\.64\+?(-?0x[0-9a-f]+)?\]", x.operands[1])
        base = self.read_pair(match[1]) if match else None
        if self.memory is None or base is None:
            return self.forget(x)
        address, first = base + int(match[2] or "0", 16), int(x.operands[0].removeprefix("R"))
        bits = next((size for size in (8, 16) if f"U{size}" in x.modifiers), 32)
        count = 4 if "128" in x.modifiers else 2 if "64" in x.modifiers else 1
        for i in range(count):
            self.write(f"R{first + i}", self.memory(address + 4 * i) & (1 << bits) - 1)

    def do_shfl(self, x):
        self.write(x.operands[1], self.read(x.operands[2]))

    def do_plop3(self, x):
        inputs = [self.predicate(p) for p in x.operands[2:5]]
        table = int(x.operands[5], 16)
        possible = {bool(table >> (a << 2 | b << 1 | c) & 1) for a, b, c in itertools.product(*map(known, inputs))}
        self.set(x.operands[0], possible.pop() if len(possible) == 1 else None)

    def do_sel(self, x):
        chosen = self.predicate(x.operands[3])
        self.write(x.operands[0], None if chosen is None else self.read(x.operands[1 if chosen else 2]))

    do_fsel = do_sel

    def do_p2r(self, x):
        """Those predicates whose bits are in the mask."""
        mask = self.read(x.operands[3])
        chosen = {i: self.predicates.get(f"P{i}") for i in range(7) if mask >> i & 1}
        self.write(x.operands[0], None if None in chosen.values() else sum(value << i for i, value in chosen.items()))

    def do_lop3(self, x):
        first = 1 if re.fullmatch(r"U?P\w+", x.operands[0]) else 0
        inputs = [self.read(text) for text in x.operands[first + 1 : first + 4]]
        table = int(x.operands[first + 4], 16)
        value = None
        if None not in inputs:
            a, b, c = inputs
            value = 0
            for i in range(8):
                if table >> i & 1:
                    value |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            value &= MASK
        self.write(x.operands[first], value)
        if first:
            self.set(x.operands[0], None if value is None else value != 0)

    def do_shf(self, x):
        low, count, high = (self.read(text) for text in x.operands[1:4])
        value = None
        if count is not None:
            if "L" in x.modifiers and "HI" not in x.modifiers:
                value = None if low is None else low << count & MASK
            elif "L" in x.modifiers:
                value = None if None in (low, high) else (high << 32 | low) << count >> 32 & MASK
            elif "HI" in x.modifiers:
                value = None if high is None else (signed(high) if "S32" in x.modifiers else high) >> count & MASK
            elif None not in (low, high):
                value = (high << 32 | low) >> count & MASK
        self.write(x.operands[0], value)

    def do_imad(self, x):
        operands = [text for text in x.operands if not re.fullmatch(r"!?U?P\w+", text)]
        carry = [self.predicate(text) for text in x.operands if re.fullmatch(r"!?U?P\w+", text)]
        to, a, b = operands[0], self.read(operands[1]), self.read(operands[2])
        if "WIDE" in x.modifiers:
            c = self.read_pair(operands[3])
            if None in (a, b, c):
                return self.write_pair(to, None)
            product = a * b if "U32" in x.modifiers else signed(a) * signed(b)
            return self.write_pair(to, product + c & (1 << 64) - 1)
        c = self.read(operands[3])
        if "HI" in x.modifiers:
            if None in (a, b, c):
                return self.write(to, None)
            product = a * b if "U32" in x.modifiers else signed(a) * signed(b)
            return self.write(to, ((product >> 32) + c) & MASK)
        extra = int(carry[-1] or 0) if "X" in x.modifiers and carry else 0
        if 0 in (a, b):
            a = b = 0
        return self.write(to, None if None in (a, b, c) else a * b + c + extra & MASK)

    def do_iadd(self, x):
        a, b = self.read(x.operands[1]), self.read(x.operands[2])
        self.write(x.operands[0], None if None in (a, b) else a + b & MASK)

    do_viadd = do_iadd

    def do_iadd3(self, x):
        values = [text for text in x.operands if not re.fullmatch(r"!?U?P\w*", text)]
        flags = [text for text in x.operands if re.fullmatch(r"!?U?P\w*", text)]
        inputs = [self.read(text) for text in values[1:4]]
        carries = [text for text in flags if text in flags[-2:]] if "X" in x.modifiers else []
        outs = flags[: len(flags) - len(carries)]
        bits = [self.predicate(text) for text in carries]
        total = None if None in inputs or None in bits else sum(inputs) + sum(map(int, bits))
        self.write(values[0], None if total is None else total & MASK)
        for text in outs:
            self.set(text, None if total is None else total >> 32 != 0)

    def do_lea(self, x):
        values = [text for text in x.operands if not re.fullmatch(r"!?U?P\w*", text)]
        flags = [text for text in x.operands if re.fullmatch(r"!?U?P\w*", text)]
        low, b = self.read(values[1]), self.read(values[2])
        high = self.read(values[3]) if "HI" in x.modifiers and len(values) > 4 else 0
        shift = int(values[-1], 16) if len(values) > 3 else 0
        carry = int(self.predicate(flags[-1]) or 0) if "X" in x.modifiers and flags else 0
        total = None
        if None not in (low, b, high):
            if "SX32" in x.modifiers:
                low = signed(low)
            shifted = (high << 32 | low) >> 32 - shift if "HI" in x.modifiers and "SX32" not in x.modifiers else low
            if "SX32" in x.modifiers:
                shifted = low >> 32 - shift
            elif "HI" not in x.modifiers:
                shifted = low << shift & MASK
            total = (shifted & MASK) + b + carry
        self.write(values[0], None if total is None else total & MASK)
        for text in flags[:1]:
            if "X" not in x.modifiers:
                self.set(text, None if total is None else total >> 32 != 0)

    def do_prmt(self, x):
        a, selector, b = (self.read(text) for text in x.operands[1:4])
        if None in (a, selector, b):
            return self.write(x.operands[0], None)
        pool = (a | b << 32).to_bytes(8, "little")
        return self.write(x.operands[0], int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little"))

    def do_vimnmx(self, x):
        a, b = (self.read(text) for text in x.operands[1:3])
        self.minimum(x, a, b, x.operands[3])

    do_imnmx = do_vimnmx

    def do_vimnmx3(self, x):
        a, b, c = (self.read(text) for text in x.operands[1:4])
        self.minimum(x, a, b, x.operands[4])
        self.minimum(x, self.read(x.operands[0]), c, x.operands[4])

    def do_viaddmnmx(self, x):
        a, b, c = (self.read(text) for text in x.operands[1:4])
        self.minimum(x, None if None in (a, b) else a + b & MASK, c, x.operands[4])

    def minimum(self, x, a, b, least):
        if None in (a, b):
            return self.write(x.operands[0], None)
        key = (lambda v: v) if "U32" in x.modifiers else signed
        return self.write(x.operands[0], (min if self.predicate(least) else max)(a, b, key=key))

    def do_iabs(self, x):
        value = self.read(x.operands[1])
        self.write(x.operands[0], None if value is None else abs(signed(value)))

    def do_fchk(self, x):
        self.set(x.operands[0], False)  # no division takes its slow path

    def do_elect(self, x):
        self.set(x.operands[0], True)

    def do_vote(self, x):
        """A vote of one thread is its own predicate."""
        flags = [text for text in x.operands if re.fullmatch(r"!?U?P\w*", text)]
        if re.fullmatch(r"U?P\d", x.operands[0]):
            self.set(x.operands[0], self.predicate(flags[-1]))
        else:
            mine = self.predicate(flags[-1])
            self.write(x.operands[0], None if mine is None else int(mine) << self.special["SR_LANEID"])

    do_voteu = do_vote


def known(value: bool | None) -> tuple[bool, ...]:
    return (False, True) if value is None else (value,)
