"""Sums over tensors in double, in two kernels."""

from . import Mutant

KERNEL = r"lamb_(moments|rates)_kernel"
CASES = ("lamb_",)
CAPABILITY = 80

MUTANTS = [
    Mutant("two sums exchanged", r"(st\.global\.v2\.f64 \[[^]]*\], \{)(%fd\d+), ?(%fd\d+)", r"\1\3, \2"),
    Mutant("two sums read in the wrong order", r"(ld\.global\.v2\.f64 \{)(%fd\d+), ?(%fd\d+)", r"\1\3, \2"),
    Mutant("no square root of a sum", r"sqrt\.rn\.f64", "mov.f64"),
    Mutant("shuffle: one half of a double", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,", 1),
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("a warp's sum 8 bytes further", r"(st\.shared\.f64 \[%r\d+)\]", r"\1+8]"),
    Mutant("sums of warps from 16 bytes further", r"(ld\.shared\.v2\.f64 [^;]*storage)\]", r"\1+16]"),
    Mutant("sums rounded to single", r"cvt\.f64\.f32 (%fd\d+), (%f\d+);", r"cvt.f64.f32 \1, 0f00000000;"),
]  # fmt: skip
