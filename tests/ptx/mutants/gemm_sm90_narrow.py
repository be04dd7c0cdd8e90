"""An n-major B in tiles of 16 and 32 columns: boxes of 32 and 64 bytes, with swizzles of their own."""

from . import Mutant

KERNEL = r"gemm_sm90_kernel.*MajorE\dELS3_1ELb0ENS0_4TileILi64ELi(16|32)E"
CASES = "narrow"
CAPABILITY = 90


def descriptor(swizzle: int, groups: int, boxes: int) -> str:
    """The constant part of a descriptor: the swizzle's number, and the bytes between groups of 8 of k and between boxes."""
    word = swizzle << 62 | groups >> 4 << 32 | boxes >> 4 << 16
    return str(word - (word >> 63 << 64))


BYTES_128, BYTES_64, BYTES_32 = 1, 2, 3
OF_16, OF_32 = descriptor(BYTES_32, 256, 2048), descriptor(BYTES_64, 512, 4096)
SECOND_PRODUCT = r"(add\.s64 %rd\d+, %rd\d+, (?:2|128);\s+add\.s64 %rd\d+, %rd\d+), "  # A's, then B's 16 of k
WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, %rd\d+, %rd\d+, p, 1, 1, [01]), 1;"
LOAD = r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S+ \[%r\d+)\]"
LOAD_AT = r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S+ \[%r\d+\], \[%rd\d+, \{)(%r\d+), (%r\d+), "

MUTANTS = [
    Mutant("16 columns: a swizzle of 64 bytes", OF_16, descriptor(BYTES_64, 256, 2048)),
    Mutant("16 columns: a swizzle of 128 bytes", OF_16, descriptor(BYTES_128, 256, 2048)),
    Mutant("16 columns: no swizzle", OF_16, descriptor(0, 256, 2048)),
    Mutant("16 columns: groups of 8 of k are as far apart as with 32 columns", OF_16, descriptor(BYTES_32, 512, 2048)),
    Mutant("16 columns: groups of 8 of k and boxes exchanged", OF_16, descriptor(BYTES_32, 2048, 256)),
    Mutant("16 columns: boxes are 16 bytes apart", OF_16, descriptor(BYTES_32, 256, 16),
           missed="a tile of 16 columns is one box"),
    Mutant("32 columns: a swizzle of 32 bytes", OF_32, descriptor(BYTES_32, 512, 4096)),
    Mutant("32 columns: a swizzle of 128 bytes", OF_32, descriptor(BYTES_128, 512, 4096)),
    Mutant("32 columns: no swizzle", OF_32, descriptor(0, 512, 4096)),
    Mutant("32 columns: groups of 8 of k are as far apart as with 16 columns", OF_32, descriptor(BYTES_64, 256, 4096)),
    Mutant("32 columns: groups of 8 of k and boxes exchanged", OF_32, descriptor(BYTES_64, 4096, 512)),
    Mutant("16 columns: the second product begins as in lines of 64 bytes", SECOND_PRODUCT + "32;", r"\1, 64;"),
    Mutant("32 columns: the second product begins as in lines of 32 bytes", SECOND_PRODUCT + "64;", r"\1, 32;"),
    Mutant("the second product begins 8 of k late", SECOND_PRODUCT + r"(?:32|64);", r"\1, 16;"),
    Mutant("B is not taken as transposed", WGMMA, r"\1, 0;"),
    Mutant("a box lands 32 bytes further", LOAD, r"\1+32]"),
    Mutant("a box lands 8 of its lines further", LOAD, r"\1+256]"),
    Mutant("coordinates exchanged", LOAD_AT, r"\1\3, \2, "),
]  # fmt: skip
