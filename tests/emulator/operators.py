"""Operators over the text of kernels and of the code around them, and the text that is no place for them."""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from planting import Operator, exchanged

# In this order: comments and strings, the preprocessor, declarations that make no code, constants of a file or class (most of them
# choose a speed), checks of arguments (tests/ops has those), names of arguments for messages, numbers of blocks and words that only time
# depends on.
NO_PLACES = [
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'',
    r"^[ \t]*#(?:\\\n|[^\n])*",
    r"^[ \t]*(?:template <[^\n]*>$|(?:using|namespace|static_assert|enum|friend)\b[^;{]*[;{])",
    r"^(?:inline )?constexpr [^;(]*;|\bstatic constexpr [^;(]*;",
    r"^inline void check_\w+\([^{]*\{.*?^\}|\{\w+\[\w+\]\}",
    r"(?:\bif \([^;{}]*\) )?\b(?:AK_CHECK\w*|check_\w+)\([^;]*;|\b(?:AK_UNROLL|AK_NO_UNROLL|AK_PARAM)\b|\bAK_KERNEL\([^\n]*",
    r"\bdevice_sm_count\(\)(?: \* [\w:]+)?|[\w:]+ \* device_sm_count\(\)",
    r"\b(?:allow_next_kernel|prefetch\w*|\w*_registers)(?:<[^;()]*>)?\([^;]*\);",
]

CONDITION = r"(?<![\w] )if \((?:[^(){};]|\((?:[^(){};]|\([^(){};]*\))*\))*\)"
CHOICE = r"(?:(?<=[^=!<>]= )|(?<=, )|(?<=\()|(?<=return ))[^?:;,=(){}]+ \? "
NAME = r"[A-Za-z_]\w*(?:(?:\.|->|::)\w+)*"
TARGET = r"\*?[A-Za-z_][\w:]*(?:(?:\.|->)\w+|\[[^\]=;]*\])*"
INDEX = r"(?<=[\w\])])\[((?!k[A-Z])[a-z]\w*)\](?!\s*[({])"  # a constant is the size of an array
STARTS = r"(?<=  |; |\) |\{ )"  # a statement
CALL = r"(?:<[^;<>]*>)?\([^;{}]*\);"
MEETS = r"\w*(?:sync|wait|fence|arrive|commit|barrier)\w*"
TERM = r"(?:[^&|(){};?]|\((?:[^(){};]|\([^(){};]*\))*\))+"  # of a condition

SIGNS = exchanged((" + ", " - "), (" << ", " >> "), (" & ", " | "), (" += ", " -= "))
BOUNDS = exchanged((" < ", " <= "), (" > ", " >= "))
LOGIC = exchanged((" == ", " != "), (" && ", " || "))
TYPES = exchanged(("kBFloat16", "kFloat16"), ("bf16", "fp16")) | {"kFloat32": "kFloat16"}
EXTREMES = exchanged(("min", "max"), ("fmin", "fmax"), ("all_of", "any_of"))
NAMES = exchanged(("rows", "columns"), ("row", "column"), ("begin", "end"), ("first", "last"), ("a", "b"), ("m", "n"))


def any_of(table: dict[str, str]) -> str:
    return "|".join(map(re.escape, table))


def word_of(table: dict[str, str]) -> str:
    return rf"\b(?:{any_of(table)})\b"


OPERATORS: list[Operator] = [
    ("no synchronization", STARTS + MEETS + CALL, ";"),
    ("no call", STARTS + rf"(?!{MEETS}|(?:return|if|for|while|switch)\b)[a-z][\w.:]*" + CALL, ";"),
    ("no assignment", STARTS + TARGET + r" (?:[-+*/|&^]|<<|>>)?= [^;{}]*;", ";"),
    ("a sum overwritten", r" [-+|*]= ", " = "),
    ("always", CONDITION + r" (?=[\w{])", "if (true) "),
    ("never", CONDITION + r" (?=[\w{])", "if (false) "),
    ("always the first", CHOICE, "true ? "),
    ("always the second", CHOICE, "false ? "),
    ("a term less", rf"(?<=\(){TERM} (?:&&|\|\|) | (?:&&|\|\|) {TERM}(?=[;)])", ""),
    ("a summand or factor less", rf" [-+*/&] (?:\d+|{NAME})(?![\w.(\[<])|(?<=[(\[ ])(?:\d+|{NAME}) [+*] ", ""),
    ("index 0", INDEX, "[0]"),
    ("index 1 more", INDEX, r"[\1 + 1]"),
    ("starts at 1", r"(?<== )0(?=;)", "1"),
    ("a quotient for a remainder", r" % (?!\w+ [=!]= 0)", " / "),
    ("twice the number", r"(?<=[*/] )(\d+)\b(?![.\w])", r"(2 * \1)"),
    ("half the number", r"\b(16|32|64|128)\b(?![.\w'])(?=[;,)\]])", r"\1 / 2"),
    ("another bound", any_of(BOUNDS), BOUNDS),
    ("another comparison", any_of(LOGIC), LOGIC),
    ("not negated", r"(?<![\w!=])!(?=[\w(])", ""),
    ("another sign", any_of(SIGNS), SIGNS),
    ("operands exchanged", rf"({NAME}) ([-/%]) ({NAME})(?![\w(\[<])", r"\3 \2 \1"),
    ("arguments exchanged", rf"\b(?!min|max|fma|add|mul)(\w+)\(({NAME}), ({NAME})(?=[,)])", r"\1(\3, \2"),
    ("choices exchanged", r"(?<=\? )([^?:;,(){}]+) : ([^?:;,(){}]+)(?=[;,)])", r"\2 : \1"),
    ("the other phase", r"\b(?:\w+(?:\.|->))*\w*(?:phase|parity)(?=\))", r"(\g<0> ^ 1)"),
    ("another type", word_of(TYPES), TYPES),
    ("the other extreme", word_of(EXTREMES) + r"(?=[(<])", EXTREMES),
    ("the other of two", "|".join(rf"(?<!int )(?<!int64_t )\b{a}\b(?! =)(?=[^\0]{{0,300}}\b{b}\b)" for a, b in NAMES.items()), NAMES),
    ("the other truth", r"\b(?:true|false)\b", exchanged(("true", "false"))),
]  # fmt: skip
