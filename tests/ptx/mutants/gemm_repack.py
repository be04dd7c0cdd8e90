"""Copies of operands that TMA cannot read: words put together from parts, divisions by a product, two strides."""

from . import Mutant

KERNEL = "gemm_repack_kernel"
CASES = "repacked"
CAPABILITY = 90

MUTANTS = [
    Mutant("no wait for the kernel in front", r"griddepcontrol\.wait;", ""),
    Mutant("the second word is the third", r"(ld\.global\.u32 %r\d+, \[%rd\d+\+)4\]", r"\g<1>8]"),
    Mutant("the fifth word is not read", r"ld\.global\.u32 (%r\d+), \[%rd\d+\+16\];", r"mov.u32 \1, 0;"),
    Mutant("an element from 2 bytes further", r"(ld\.global\.u16 %r\d+, \[%rd\d+)\]", r"\1+2]"),
    Mutant("words are joined at the wrong bit", r"(bfi\.b64 %rd\d+, %rd\d+, %rd\d+), 32, 32;", r"\1, 16, 32;"),
    Mutant("words are moved by a byte", r"(selp\.b64 %rd\d+), 16, 0,", r"\1, 8, 0,"),
    Mutant("aligned words are moved, and others are not", r"(selp\.b64 %rd\d+), 16, 0,", r"\1, 0, 16,"),
    Mutant("two words stored in the wrong order", r"(st\.global\.v4\.u32 \[%rd\d+\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("16 bytes stored 16 bytes further", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]"),
    Mutant("a quotient that is never corrected", r"(selp\.u32 %r\d+), 1, 0,", r"\1, 0, 0,"),
    Mutant("two arguments exchanged", r"(ld\.param\.v2\.u32 \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("a product cut to 32 bits", r"mul\.lo\.s64 (%rd\d+), (%rd\d+), (%rd\d+);",
           r"mul.lo.s64 \1, \2, \3;\nand.b64 \1, \1, 4294967295;"),
    Mutant("every block steps as if it were alone", r"mov\.u32 (%r\d+), %nctaid\.x;", r"mov.u32 \1, 1;"),
]  # fmt: skip
