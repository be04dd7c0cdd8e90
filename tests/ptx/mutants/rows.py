"""Cross entropy: exponentials, the largest of a row, sums over a block, 64-bit targets."""

from . import Mutant

KERNEL = "cross_entropy_rows"
CASES = ("cross_entropy_rows_",)
CAPABILITY = 80

MUTANTS = [
    Mutant("no exponential", r"ex2\.approx\.ftz\.f32", "mov.f32"),
    Mutant("the exponential of the negated value", r"ex2\.approx\.ftz\.f32 (%f\d+), (%f\d+);",
           r"neg.f32 \1, \2;\nex2.approx.ftz.f32 \1, \1;"),
    Mutant("the smallest of a row", r"max\.f32", "min.f32"),
    Mutant("shuffle: every lane its own", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
    Mutant("shuffle: half of the member mask", r"(shfl\.sync\.bfly\.b32 [^;]*), %r\d+;", r"\1, 65535;"),
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("the first barrier left out", r"bar\.sync 0;", "", 1),
    Mutant("the second barrier left out", r"bar\.sync 0;", "", 2),
    Mutant("a warp's sum 4 bytes further", r"(st\.shared\.f32 \[%r\d+)\]", r"\1+4]"),
    Mutant("sums of warps from 4 bytes further", r"(ld\.shared\.(?:v[24]\.)?f32 [^[]*\[[^]+]*)\]", r"\1+4]"),
    Mutant("targets cut to 32 bits", r"ld\.global\.u64", "ld.global.u32"),
    Mutant("halves of a stored vector exchanged", r"(st\.global(?:\.cs)?\.v4\.u32 \[[^]]*\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("a vector stored 16 bytes further", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]"),
    Mutant("a quotient upside down", r"div\.rn\.f32 (%f\d+), (%f\d+), (%f\d+);", r"div.rn.f32 \1, \3, \2;"),
    Mutant("the block's number is another register", r"%ctaid\.x", "%ctaid.y"),
]  # fmt: skip
