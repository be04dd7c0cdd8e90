"""Rotary embedding: sums over the lanes of a head, vectors of pairs, the sums of a block for the gradients of weights."""

from . import Mutant

KERNEL = r"rotary_(turn|gradient)_kernel"
CASES = ("rotary_forward", "rotary_backward")
CAPABILITY = 80

MUTANTS = [
    Mutant("no square root", r"sqrt\.rn\.f32", "mov.f32"),
    Mutant("fma without the addend's sign", r"neg\.f32", "mov.f32"),
    Mutant("shuffle: the distance is 0", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
    Mutant("the barrier left out", r"bar\.sync 0;", ""),
    Mutant("a warp's sum 4 bytes further", r"(st\.shared\.f32 \[%r\d+)\]", r"\1+4]"),
    Mutant("two words of a head exchanged", r"(ld\.global\.v4\.u32 \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("two words of a result exchanged", r"(st\.global\.v4\.u32 \[[^]]*\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("an element stored 2 bytes further", r"(st\.global\.u16 \[%rd\d+)\]", r"\1+2]"),
    Mutant("fp16 read as bf16", r"cvt\.f32\.f16", "cvt.f32.bf16"),
    Mutant("bf16 written as fp16", r"cvt\.rn\.bf16\.f32", "cvt.rn.f16.f32"),
]  # fmt: skip
