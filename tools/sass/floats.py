"""Instructions on floats, for Thread in thread.py."""

from __future__ import annotations

import re
import struct

MASK = 0xFFFFFFFF


class Floats:
    def number(self, text: str) -> float | None:
        if match := re.fullmatch(r"(-?)[|](.*)[|]", text):
            value = self.number(match[2])
            return None if value is None else -abs(value) if match[1] else abs(value)
        if re.fullmatch(r"[-+]?(\d.*|INF|QNAN)", text) and not text.startswith("0x"):
            return float(text.replace("QNAN", "nan"))
        if text[0] == "-":
            value = self.number(text[1:])
            return None if value is None else -value
        bits = self.read(text)
        return None if bits is None else float_of(bits)

    def do_fsetp(self, x):
        a, b = self.number(x.operands[2]), self.number(x.operands[3])
        result = None
        if a is not None and b is not None:
            name = x.modifiers[0].removesuffix("U") if x.modifiers[0] not in ("EQ", "NE") else x.modifiers[0]
            result = {
                "EQ": a == b,
                "NE": a != b,
                "GE": a >= b,
                "GT": a > b,
                "LT": a < b,
                "LE": a <= b,
                "NAN": a != a or b != b,
            }.get(name)
        self.set(x.operands[0], both(result, self.predicate(x.operands[4])))

    def floats(self, x, function):
        """Rounded to nearest, always: no branch that is followed depends on a last bit."""
        values = [self.number(text) for text in x.operands[1:4] if not re.fullmatch(r"!?U?P\w*", text)]
        self.write(x.operands[0], None if None in values else bits_of(function(*values)))

    def do_fadd(self, x):
        self.floats(x, lambda a, b: a + b)

    def do_fmul(self, x):
        self.floats(x, lambda a, b: a * b)

    def do_ffma(self, x):
        self.floats(x, lambda a, b, c: a * b + c)

    def do_fmnmx(self, x):
        self.floats(x, min if self.predicate(x.operands[3]) else max)

    # An integer division begins with the float reciprocal of the divisor: its few last bits do not matter to the result.
    def do_i2f(self, x):
        value = self.read(x.operands[1])
        self.write(x.operands[0], None if value is None else bits_of(float(value)))

    def do_mufu(self, x):
        value = self.number(x.operands[1])
        power = -1 if "RCP" in x.modifiers else -0.5 if "RSQ" in x.modifiers else 0
        self.write(x.operands[0], bits_of(value**power) if value and value > 0 and power else None)

    def do_f2i(self, x):
        value = self.read(x.operands[1])
        self.write(x.operands[0], None if value is None else int(float_of(value)) & MASK)

    def do_hfma2(self, x):
        """As a move of two constants; else floats."""
        if x.operands[1] in ("RZ", "-RZ") and x.operands[2] == "RZ" and len(x.operands) == 5:
            low, high = (struct.pack("<e", float(text)) for text in x.operands[4:2:-1])
            return self.write(x.operands[0], int.from_bytes(low + high, "little"))
        return self.forget(x)


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if None in (a, b) else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if None in (a, b) else False


def bits_of(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
