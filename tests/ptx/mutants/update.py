"""The arithmetic of an update, vectors of memory, random bits."""

from . import Mutant

KERNEL = "update_kernel"
CASES = ("adamw_", "lion_", "sgd_", "lamb_")
CAPABILITY = 80

MUTANTS = [
    Mutant("fma: the addend subtracted", r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), (%f\d+);", r"fma.rn.f32 \1, \2, \3, \2;"),
    Mutant("mul in place of div", r"div\.rn\.f32", "mul.rn.f32"),
    Mutant("a quotient upside down", r"div\.rn\.f32 (%f\d+), (%f\d+), (%f\d+);", r"div.rn.f32 \1, \3, \2;"),
    Mutant("no square root", r"sqrt\.rn\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
    Mutant("add in place of sub", r"sub\.rn\.f32", "add.rn.f32"),
    Mutant("the sign left out", r"neg\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
    Mutant("16-bit words of a vector exchanged", r"mov\.b32 (%r\d+), \{(%rs\d+), (%rs\d+)\};", r"mov.b32 \1, {\3, \2};"),
    Mutant("words of a stored vector exchanged", r"(st\.global\.cs\.v4\.u32 \[%rd\d+\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("a vector stored 16 bytes further", r"(st\.global\.cs\.v4\.u32 \[%rd\d+)\]", r"\1+16]"),
    Mutant("fp16 read as bf16", r"cvt\.f32\.f16", "cvt.f32.bf16"),
    Mutant("bf16 written as fp16", r"cvt\.rn\.bf16\.f32", "cvt.rn.f16.f32"),
    Mutant("arithmetic in place of logical shift", r"shr\.u32", "shr.s32"),
    Mutant("or in place of xor", r"xor\.b32", "or.b32"),
    Mutant("the choice of selp exchanged", r"selp\.f32 (%f\d+), ([^,;]+), ([^,;]+), (%p\d+);", r"selp.f32 \1, \3, \2, \4;"),
    Mutant("a 64-bit product cut to 32 bits", r"mul\.wide\.u32 (%rd\d+), (%r\d+), ([^;]+);", r"cvt.u64.u32 \1, \2;"),
    Mutant("a sign that is not extended", r"cvt\.s64\.s32", "cvt.u64.u32",
           missed="what is extended is a thread's number or a chunk's size, never negative"),
    Mutant("the block's number is another register", r"%ctaid\.x", "%ctaid.y"),
    Mutant("the thread's number is another register", r"%tid\.x", "%laneid"),
]  # fmt: skip
