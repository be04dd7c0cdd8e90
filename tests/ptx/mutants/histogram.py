"""Counters in shared and in global memory."""

from . import Mutant

KERNEL = "exponent_histogram_kernel"
CASES = ("exponent_histogram",)
CAPABILITY = 80

MUTANTS = [
    Mutant("counted without an atomic", r"atom\.shared\.add\.u32 (%r\d+), \[(%r\d+)\], 1;",
           r"ld.shared.u32 \1, [\2];\nadd.s32 \1, \1, 1;\nst.shared.u32 [\2], \1;"),
    Mutant("counted twice", r"(atom\.shared\.add\.u32 %r\d+, \[%r\d+\]), 1;", r"\1, 2;"),
    Mutant("written where it is to be added", r"atom\.global\.add\.u64 (%rd\d+), \[(%rd\d+)\]", r"atom.global.exch.b64 \1, [\2]"),
    Mutant("added 8 bytes further", r"(atom\.global\.add\.u64 %rd\d+, \[%rd\d+)\]", r"\1+8]"),
    Mutant("the smallest", r"atom\.global\.max\.u32", "atom.global.min.u32"),
    Mutant("the last in place of the largest", r"atom\.global\.max\.u32", "atom.global.exch.b32"),
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("the first barrier left out", r"bar\.sync 0;", "", 1),
    Mutant("counters that nobody sets to zero", r"st\.shared\.u32 \[%r\d+\], %r\d+;", "", 1),
    Mutant("zeros 4 bytes further", r"(st\.shared\.u32 \[%r\d+)\]", r"\1+4]", 1),
    Mutant("a vector from 16 bytes further", r"(ld\.global\.cs\.v4\.u32 [^;]*\[%rd\d+)\]", r"\1+16]"),
    Mutant("shuffle: the distance is 0", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
]  # fmt: skip
