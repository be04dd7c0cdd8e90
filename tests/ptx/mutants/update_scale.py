"""A vote of a warp, and numbers that one lane writes."""

from . import Mutant

KERNEL = "update_scale_kernel"
CASES = ("update_scale_",)
CAPABILITY = 80

MUTANTS = [
    Mutant("vote: the other way round", r"(vote\.sync\.ballot\.b32 %r\d+), (%p\d+)", r"\1, !\2"),
    Mutant("vote: half of the member mask", r"(vote\.sync\.ballot\.b32 %r\d+, %p\d+), %r\d+;", r"\1, 65535;"),
    Mutant("the vote counts for nothing", r"vote\.sync\.ballot\.b32 (%r\d+), [^;]*;", r"mov.u32 \1, 0;"),
    Mutant("the scale 4 bytes further", r"(st\.global\.f32 \[%rd\d+)\]", r"\1+4]"),
    Mutant("the count of steps is not written", r"st\.global\.u32 [^;]*;", ""),
    Mutant("every lane reads one flag", r"%tid\.x", "%tid.y"),
]  # fmt: skip
