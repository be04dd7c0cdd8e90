"""Moments in 8 bits: codes, the exponents of blocks, random bits, blocks at the end of a tensor, and 24-bit masters beside them."""

from . import Mutant

KERNEL = "update8_kernel"
CASES = ("adamw_", "lion_")
CAPABILITY = 80

MUTANTS = [
    Mutant("the exponent of the next block is read", r"(ld\.global\.u8 %rs\d+, \[%rd\d+)\]", r"\1+1]"),
    Mutant("the exponent goes to the next block", r"(st\.global\.u8 \[%rd\d+)\]", r"\1+1]"),
    Mutant("a positive second moment may become 0", r"selp\.b32 (%r\d+), 0, 1074790400,", r"selp.b32 \1, 0, 0,"),
    Mutant("half of the elements are rounded toward zero", r"mov\.u32 (%r\d+), 16644;", r"mov.u32 \1, 17476;"),
    Mutant("two elements have the same random bits", r"mov\.u32 (%r\d+), 17188;", r"mov.u32 \1, 16644;"),
    Mutant("the exponent of a thread's elements", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
    Mutant("the exponent of the smallest element", r"max\.NaN\.f32", "min.NaN.f32"),
    Mutant("codes of the lower binades are left out", r"fma\.rz\.f32 (%f\d+), (%f\d+), (%f\d+), (%f\d+);", r"mov.f32 \1, \4;"),
    Mutant("two codes exchanged", r"mov\.u32 (%r\d+), 115;", r"mov.u32 \1, 55;"),
    Mutant("fours of codes exchanged", r"(st\.global\.cs\.v2\.u32 \[%rd\d+\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("signs of codes are dropped", r"selp\.b32 (%r\d+), (0, -2139062144|-2139062144, 0),", r"selp.b32 \1, 0, 0,"),
    Mutant("a sign that is not extended", r"shr\.s32 (%r\d+, %r\d+), 4;", r"shr.u32 \1, 4;"),
    Mutant("a reciprocal to start from is missing", r"rcp\.approx\.ftz\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
    Mutant("the reciprocal of the root", r"rcp\.approx\.ftz\.f32", "rsqrt.approx.ftz.f32"),
    Mutant("a root without a start", r"rsqrt\.approx\.ftz\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
    Mutant("the reciprocal in place of the root's", r"rsqrt\.approx\.ftz\.f32", "rcp.approx.ftz.f32"),
    Mutant("half the value of a moment", r"0f77800000", "0f77000000"),
    Mutant("the remainder's sign is dropped", r"shr\.s32 (%r\d+, %r\d+), (16|24);", r"shr.u32 \1, \2;"),
    Mutant("the last block is left out", r"add\.s32 (%r\d+, %r\d+), 31;", r"add.s32 \1, 0;"),
    Mutant("every lane writes the exponent of a block", r"and\.b64 (%rd\d+, %rd\d+), 31;", r"and.b64 \1, 0;",
           missed="all lanes of a block have the same exponent, and write it to the same place"),
    Mutant("a skipped step writes codes and exponents", r"setp\.gt\.f32 (%p\d+, %f\d+), 0f00000000;", r"setp.lt.f32 \1, 0f00000000;", 1),
]  # fmt: skip
