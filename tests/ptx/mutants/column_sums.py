"""The sums of columns: wide and scalar loads, shared memory between teams, slots."""

from . import Mutant

KERNEL = r"column_sums"
CASES = ("column_sums",)
CAPABILITY = 80

MUTANTS = [
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("a vector loaded from 16 bytes further", r"(ld\.global\.cs\.v4\.u32 \{[^}]*\}, \[%rd\d+)\]", r"\1+16]"),
    Mutant("an element loaded from 2 bytes further", r"(ld\.global\.cs\.u16 %rs\d+, \[%rd\d+)\]", r"\1+2]"),
    Mutant("differences", r"add(\.rn)?\.f32", r"sub\1.f32"),
    Mutant("a team's sums 4 bytes further", r"(st\.shared\.f32 \[%r\d+)\]", r"\1+4]"),
    Mutant("sums of teams from 4 bytes further", r"(ld\.shared\.f32 %f\d+, \[%r\d+)\]", r"\1+4]"),
    Mutant("sums stored 4 bytes further", r"(st\.global\.f32 \[%rd\d+)\]", r"\1+4]"),
    Mutant("the block's number is another register", r"%ctaid\.x", "%ctaid.y"),
]  # fmt: skip
