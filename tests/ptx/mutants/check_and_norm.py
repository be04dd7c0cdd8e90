"""Sums over warps, blocks and the grid; streaming loads."""

from . import Mutant

KERNEL = "check_and_norm_kernel"
CASES = ("check_and_norm",)
CAPABILITY = 80

MUTANTS = [
    Mutant("shuffle: the distance is 0", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 0,"),
    Mutant("shuffle: only 16 lanes meet", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+, %r\d+,", r"\1, 8, 31,"),
    Mutant("shuffle: segments of 16 lanes", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+, %r\d+), %r\d+,", r"\1, 4111,"),
    Mutant("shuffle: half of the member mask", r"(shfl\.sync\.bfly\.b32 [^;]*), %r\d+;", r"\1, 65535;"),
    Mutant("shuffle: down in place of across", r"shfl\.sync\.bfly", "shfl.sync.down",
           missed="the first lane gets the same sum, and it alone is asked for it"),
    Mutant("all barriers left out", r"bar\.sync 0;", ""),
    Mutant("the second barrier left out", r"bar\.sync 0;", "", 2),
    Mutant("the barrier before the block tells that it is done left out", r"bar\.sync 0;", "", 5,
           missed="the thread that tells is the one that wrote"),
    Mutant("a barrier for 32 threads", r"bar\.sync 0;", "bar.sync 0, 32;", 1),
    Mutant("a barrier with another number in half of the warps", r"bar\.sync 0;", "bar.sync 17;", 1),
    Mutant("relaxed in place of acquire and release", r"atom\.acq_rel", "atom.relaxed"),
    Mutant("release without acquire", r"atom\.acq_rel", "atom.release"),
    Mutant("acquire without release", r"atom\.acq_rel", "atom.acquire"),
    Mutant("add in place of inc", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
    Mutant("the old value of the counter is not looked at", r"(atom\.acq_rel\.gpu\.global\.inc\.u32) %r\d+", r"\1 _"),
    Mutant("one word of a vector is read twice", r"(ld\.global\.cs\.v4\.u32 \{)(%r\d+),(%r\d+)", r"\1\3,\3"),
    Mutant("a vector from 4 bytes further", r"(ld\.global\.cs\.v4\.u32 [^;]*\[%rd\d+)\]", r"\1+4]"),
    Mutant("a vector from 16 bytes further", r"(ld\.global\.cs\.v4\.u32 [^;]*\[%rd\d+)\]", r"\1+4096]"),
    Mutant("one half of a word is read twice", r"mov\.b32 \{(%rs\d+), (%rs\d+)\}, (%r\d+);", r"mov.b32 {\2, \2}, \3;"),
    Mutant("fp16 read as bf16", r"cvt\.f32\.f16", "cvt.f32.bf16"),
    Mutant("double rounded to single", r"cvt\.f64\.f32 (%fd\d+), (%f\d+);", r"cvt.f64.f32 \1, 0f00000000;"),
    Mutant("no square", r"fma\.rn\.f32 (%f\d+), (%f\d+), \2, (%f\d+);", r"add.rn.f32 \1, \2, \3;"),
    Mutant("arguments 4 bytes further", r"(ld\.param\.u32 %r\d+, \[%rd\d+)\]", r"\1+4]"),
]  # fmt: skip
