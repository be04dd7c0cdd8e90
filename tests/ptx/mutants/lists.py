"""Kernels over lists of tensors: conversions, streaming vectors, a flag that all blocks may set."""

from . import Mutant

KERNEL = r"(unscale|cast|activation_\w+|swiglu_\w+)_kernel"
CASES = ("unscale_", "cast_", "activation_backward", "activation_forward")
CAPABILITY = 80

MUTANTS = [
    Mutant("the flag is never set", r"st\.relaxed\.gpu\.global\.f32 [^;]*;", ""),
    Mutant("the flag is set by a plain store", r"st\.relaxed\.gpu\.global\.f32", "st.global.f32"),
    Mutant("two words of a vector exchanged", r"(ld\.global\.cs\.v4\.u32 \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("two stored words exchanged", r"(st\.global\.cs\.v4\.u32 \[%rd\d+\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("a vector stored 16 bytes further", r"(st\.global\.cs\.v4\.u32 \[%rd\d+)\]", r"\1+16]"),
    Mutant("an element read 2 bytes further", r"(ld\.global\.cs\.u16 %r?s?\d+, \[%rd\d+)\]", r"\1+2]"),
    Mutant("fp16 written as bf16", r"cvt\.rn\.f16\.f32", "cvt.rn.bf16.f32"),
    Mutant("bf16 written as fp16", r"cvt\.rn\.bf16\.f32", "cvt.rn.f16.f32"),
    Mutant("halves of a word exchanged", r"mov\.b32 (%r\d+), \{(%rs\d+), (%rs\d+)\};", r"mov.b32 \1, {\3, \2};"),
    Mutant("arguments 4 bytes further", r"(ld\.param\.u32 %r\d+, \[%rd\d+)\]", r"\1+4]"),
]  # fmt: skip
