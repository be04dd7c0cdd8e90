"""Norms: sums over a row's warps or block, and over rows for the gradients of the weights."""

from . import Mutant

KERNEL = r"norm_(forward|backward)_(ring_)?kernel"
CASES = ("norm_forward", "norm_backward")
CAPABILITY = 80

MUTANTS = [
    Mutant("no square root", r"sqrt\.rn\.f32", "mov.f32"),
    Mutant("sub in place of add", r"add\.f32|add\.rn\.f32", "sub.rn.f32"),
    Mutant("shuffle: the distance is 0", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("the second barrier left out", r"bar\.sync 0;", "", 2),
    Mutant("a warp's sum 4 bytes further", r"(st\.shared\.f32 \[%r\d+)\]", r"\1+4]"),
    Mutant("two words of a row exchanged", r"(ld\.global\.v4\.u32 \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("two sums of columns exchanged", r"(st\.global\.v4\.f32 \[[^]]*\], \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("an element stored 2 bytes further", r"(st\.global\.u16 \[%rd\d+)\]", r"\1+2]"),
    Mutant("fp16 read as bf16", r"cvt\.f32\.f16", "cvt.f32.bf16"),
    Mutant("bf16 written as fp16", r"cvt\.rn\.bf16\.f32", "cvt.rn.f16.f32"),
]  # fmt: skip
