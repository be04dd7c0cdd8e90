"""Sums of phases: 64-bit distances, elements that lanes give each other, rows and columns that are not there."""

from . import Mutant

KERNEL = "gemm_add_phases_kernel"
CASES = "phased"
CAPABILITY = 90

MUTANTS = [
    Mutant("a phase read one element further", r"(ld\.global\.cs\.u32 %r\d+, \[%rd\d+)\]", r"\1+4]", 3),
    Mutant("the last phase is not read", r"ld\.global\.cs\.u32 (%r\d+), \[%rd\d+\];", r"mov.u32 \1, 0;", -1),
    Mutant("a distance cut to 8 bits", r"mul\.lo\.s64 (%rd\d+), (%rd\d+), (%rd\d+);",
           r"mul.lo.s64 \1, \2, \3;\nand.b64 \1, \1, 255;"),
    Mutant("an element of the lane beside", r"(shfl\.sync\.idx\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 1,"),
    Mutant("elements from within eight lanes", r"(shfl\.sync\.idx\.b32 [^;]*), %r\d+, (%r\d+);", r"\1, 6175, \2;"),
    Mutant("an element of A is not there", r"(shfl\.sync\.idx\.b32 %r\d+\|%p\d+), %r\d+,", r"\1, 0,", 1),
    Mutant("an element of a line from 2 bytes further", r"(ld\.global\.u16 %rs\d+, \[%rd\d+)\]", r"\1+2]", 1),
    Mutant("of A's line too", r"(ld\.global\.u16 %rs\d+, \[%rd\d+)\]", r"\1+2]", -1),
    Mutant("a sum without its product", r"fma\.rn\.f32 (%f\d+), %f\d+, %f\d+, (%f\d+);", r"mov.f32 \1, \2;", 5),
    Mutant("alpha is forgotten", r"mul\.rn\.f32 (%f\d+), (%f\d+), %f\d+;", r"mov.f32 \1, \2;"),
    Mutant("C is not read", r"ld\.global\.f32 (%f\d+), \[%rd\d+\];", r"mov.f32 \1, 0f00000000;"),
    Mutant("C 4 bytes further", r"(st\.global\.f32 \[%rd\d+)\]", r"\1+4]"),
    Mutant("16 bits of C 2 bytes further", r"(st\.global\.u16 \[%rd\d+)\]", r"\1+2]"),
    Mutant("two arguments exchanged", r"ld\.param\.u64 (%rd\d+), \[(%rd\d+)\+-52\];", r"ld.param.u64 \1, [\2+-60];"),
    Mutant("rows and columns from one block too few", r"mov\.u32 (%r\d+), %ctaid\.x;", r"mov.u32 \1, 0;"),
]  # fmt: skip
