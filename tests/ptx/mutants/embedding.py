"""Sums over sorted runs of 64-bit indices."""

from . import Mutant

KERNEL = r"embedding_\w+_kernel"
CASES = ("embedding_accumulate_",)
CAPABILITY = 80

MUTANTS = [
    Mutant("indices cut to 32 bits", r"ld\.global\.u64", "ld.global.u32",
           missed="an index is a row of a table, never negative and in these cases small"),
    Mutant("the index behind in place of the one in front", r"(ld\.global\.u64 %rd\d+, \[%rd\d+\+)-8\]", r"\g<1>8]"),
    Mutant("two words of a gradient exchanged", r"(ld\.global\.cs\.v4\.u32 \{)(%r\d+),(%r\d+)", r"\1\3,\2"),
    Mutant("two words of a row exchanged", r"(st\.global\.v4\.u32 \[[^]]*\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("two sums of a piece in the wrong order", r"(st\.global\.v4\.f32 \[[^]]*\], \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("two sums of a piece exchanged", r"(ld\.global\.v4\.f32 \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("sub in place of add", r"add\.f32|add\.rn\.f32", "sub.rn.f32"),
    Mutant("the block's number is another register", r"%ctaid\.x", "%ctaid.z"),
]  # fmt: skip
