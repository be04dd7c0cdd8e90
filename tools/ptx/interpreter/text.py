"""PTX text (PTX ISA 9.0, §4): modules, kernels, instructions and their operands."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .types import BYTES, PtxError


# ---- operands (§6)
@dataclass(frozen=True)
class Register:
    name: str
    negated: bool = False  # !p, of predicates


@dataclass(frozen=True)
class Immediate:
    value: Any  # an int, or a numpy float with the bits of a 0f or 0d constant


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable in its state space."""

    space: str
    address: int


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Address:
    base: Any
    offset: int


@dataclass(frozen=True)
class TensorAddress:
    """[map, {coordinates}]"""

    map: Any
    coordinates: tuple


@dataclass(frozen=True)
class Pair:
    """d|p"""

    first: Any
    second: Any


@dataclass(frozen=True)
class Sink:
    """_"""


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(eq=False)
class Instruction:
    op: str
    operands: list
    guard: Register | None
    text: str


@dataclass
class Shared:
    name: str
    size: int
    align: int
    dynamic: bool
    at: int  # in the text


def split_operands(text: str) -> list[str]:
    parts, depth, current = [], 0, []
    for piece in re.split(r"([\[\]{}(),])", text):
        depth += (piece in ("[", "{", "(")) - (piece in ("]", "}", ")"))
        if piece == "," and depth == 0:
            parts.append("".join(current).strip())
            current = []
        else:
            current.append(piece)
    tail = "".join(current).strip()
    return [*parts, tail] if tail else parts


SHARED = re.compile(
    r"(?P<extern>\.extern\s+)?\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr)?.*?\s([\w$]+)(?:\[(\d+)\])?\s*$", re.DOTALL
)


class Module:
    """One PTX file."""

    def __init__(self, text: str):
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", "", text)
        # Directives that end with the line (§11.5), and pragmas.
        self.text = re.sub(r"(?m)^\s*\.(loc|file|section)\b[^\n]*$|\.pragma[^;]*;", "", text)
        self.target = re.search(r"\.target\s+(\w+)", self.text)[1]
        self.entries = {match[1]: match for match in ENTRY.finditer(self.text)}
        self.first = min((m.start() for m in self.entries.values()), default=len(self.text))
        self.shared = []
        for m in SHARED.finditer(self.text):
            size = 0 if m["extern"] else BYTES[m["type"]] * int(m["count"] or 1)
            align = int(m["align"] or BYTES[m["type"]])
            self.shared.append(Shared(m["name"], size, align, bool(m["extern"]), m.start()))
        self.kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> "Kernel":
        if name not in self.kernels:
            self.kernels[name] = Kernel(self, name)
        return self.kernels[name]


@dataclass
class Scope:
    """{ ... } with registers and labels of its own (§4.4 of the inline assembly guide: what asm blocks become)."""

    tag: str
    names: dict = field(default_factory=dict)


def align_up(value: int, to: int) -> int:
    return -(-value // to) * to


class Kernel:
    def __init__(self, module: Module, name: str):
        entry, text = module.entries[name], module.text
        self.name = name
        close = text.index(")", entry.end())
        opening = text.index("{", close)
        self.parameters, self.parameter_bytes = self._parameters(text[entry.end() : close])
        directives = text[close:opening]
        limit = re.search(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        self.max_threads = int(np.prod([int(x or 1) for x in limit.groups()])) if limit else 1024
        exact = re.search(r"\.reqntid\s+(\d+)", directives)
        self.exact_threads = int(exact[1]) if exact else None
        body_end = self._end(text, opening)
        self._place_shared([s for s in module.shared if s.at < module.first or opening < s.at < body_end])
        self.registers: dict[str, int] = {}  # bytes, 0 for predicates
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._parse(text[opening + 1 : body_end])

    @staticmethod
    def _end(text: str, opening: int) -> int:
        depth = 0
        for brace in re.finditer(r"[{}]", text[opening:]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return opening + brace.start()
        raise PtxError("a body that does not end")

    @staticmethod
    def _parameters(text: str) -> tuple[dict, int]:
        """§7.1.2: parameters lie one after the other, each at its alignment."""
        placed, at = {}, 0
        for declaration in text.split(","):
            found = PARAMETER.search(declaration.strip())
            if not found:
                continue
            align, kind, name, count = found.groups()
            size = BYTES[kind] * int(count or 1)
            at = align_up(at, int(align or BYTES[kind]))
            placed[name] = (at, size)
            at += size
        return placed, at

    def _place_shared(self, variables: list[Shared]) -> None:
        """Static variables in their order, the dynamic one after them."""
        self.symbols, at = {}, 0
        for v in variables:
            if not v.dynamic:
                at = align_up(at, v.align)
                self.symbols[v.name] = at
                at += v.size
        self.static_shared = at
        self.dynamic_align = max([v.align for v in variables if v.dynamic], default=16)
        self.dynamic_names = [v.name for v in variables if v.dynamic]
        self.dynamic_at = align_up(at, max(16, self.dynamic_align))
        self.symbols |= dict.fromkeys(self.dynamic_names, self.dynamic_at)

    def _parse(self, body: str) -> None:
        scopes, serial = [Scope("")], 0
        jumps = []
        for statement in body.split(";"):
            rest = statement.strip()
            while rest:
                if rest[0] == "{":
                    serial += 1
                    scopes.append(Scope(f"#{serial}"))
                    rest = rest[1:].lstrip()
                elif rest[0] == "}":
                    scopes.pop()
                    rest = rest[1:].lstrip()
                elif found := re.match(r"([\w$]+)\s*:(?!:)\s*", rest):
                    self.labels[found[1] + scopes[-1].tag] = len(self.code)
                    rest = rest[found.end() :]
                else:
                    break
            if rest.startswith(".reg"):
                self._declare(rest, scopes)
            elif rest and not rest.startswith("."):
                jumps += self._instruction(rest, scopes)
        self.code.append(Instruction("ret", [], None, "ret (end of the body)"))
        for instruction, tags in jumps:
            name = instruction.operands[0].name
            places = [name + tag for tag in reversed(tags) if name + tag in self.labels]
            if not places:
                raise PtxError(f"no label {name}: {instruction.text}")
            instruction.operands = [Label(places[0])]

    def _declare(self, text: str, scopes: list[Scope]) -> None:
        found = re.match(r"\.reg\s*\.(\w+)\s+(.+)", text, re.DOTALL)
        size = BYTES[found[1]]
        for name in (part.strip() for part in found[2].split(",")):
            if numbered := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
                self.registers |= {f"{numbered[1]}{i}": size for i in range(int(numbered[2]))}
            else:
                scopes[-1].names[name] = name + scopes[-1].tag
                self.registers[name + scopes[-1].tag] = size

    def _instruction(self, text: str, scopes: list[Scope]) -> list:
        names: dict[str, str] = {}
        for scope in scopes:
            names |= scope.names
        whole, guard = " ".join(text.split()), None
        if text[0] == "@":
            found = re.match(r"@(!?)([%\w$]+)\s+", text)
            guard = Register(names.get(found[2], found[2]), found[1] == "!")
            text = text[found.end() :]
        op = re.match(r"[a-z][\w.:]*", text)[0]
        operands = [self._operand(part, names) for part in split_operands(text[len(op) :].strip())]
        instruction = Instruction(op, operands, guard, whole)
        self.code.append(instruction)
        is_jump = op.split(".")[0] == "bra"
        return [(instruction, [scope.tag for scope in scopes])] if is_jump else []

    def _operand(self, text: str, names: dict[str, str]):
        if text[0] == "{":
            return Vector(tuple(self._operand(part, names) for part in split_operands(text[1:-1])))
        if text[0] == "[":
            inner = text[1:-1].strip()
            parts = split_operands(inner)
            if len(parts) == 2:
                return TensorAddress(self._operand(parts[0], names), self._operand(parts[1], names).items)
            found = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", inner)
            base, offset = (found[1], int(found[2], 0)) if found else (inner, 0)
            return Address(self._operand(base, names), offset)
        if text == "_":
            return Sink()
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first, names), self._operand(second, names))
        if text[0] == "!":
            return Register(self._operand(text[1:].strip(), names).name, True)
        if text in names or text in self.registers:
            return Register(names.get(text, text))
        if text[0] == "%":
            return Special(text[1:])
        if text[:2] in ("0f", "0F"):
            return Immediate(np.uint32(int(text[2:], 16)).view(np.float32))
        if text[:2] in ("0d", "0D"):
            return Immediate(np.uint64(int(text[2:], 16)).view(np.float64))
        if re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if text in self.parameters:
            return Symbol("param", self.parameters[text][0])
        if text in self.symbols:
            return Symbol("shared", self.symbols[text])
        return Label(text)
