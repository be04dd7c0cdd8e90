"""Vectors whose stores leave half sectors: two accesses of 16 bytes, 32 bytes apart from those of the next lane."""

from . import Mutant

TEST = "emulator/test_sectors.py"

MUTANTS = [
    Mutant("base/elementwise.cuh", "16 / std::max({sizeof(T)...})", "32 / std::max({sizeof(T)...})", "a vector is 32 bytes"),
    Mutant("base/row.cuh", "kRowVec = 4;", "kRowVec = 8;", "rows in pieces are stored in vectors of 32 bytes of fp32"),
    Mutant("base/row_ring.cuh", "kRingVec = 4;", "kRingVec = 8;", "rows of a ring are stored in vectors of 32 bytes of fp32"),
    Mutant("cast/cast.cu", "16 / sizeof(To), From", "16 / sizeof(From), From", "a cast to fp32 stores 32 bytes of a thread"),
]  # fmt: skip
