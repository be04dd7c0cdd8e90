"""The ragged tensor maps of grouped products on Hopper: boxes with four coordinates, of which the last is the group's end. The rest of
the kernel is that of the list gemm_sm90."""

from . import Mutant

KERNEL = r"gemm_sm90_kernel.*GroupingE[12]"
CASES = ("grouped_gemm", "grouped_gemm_accumulate_")
CAPABILITY = 90

LOAD = r"(cp\.async\.bulk\.tensor\.4d\.shared\S+ \[[^\]]+\], \[[^{]+\{)(%r\d+), (%r\d+), (%r\d+|\d+), (%r\d+)\}"
STORE = r"(cp\.async\.bulk\.tensor\.4d\.global\S+ \[[^{]+\{)(%r\d+), (%r\d+), (%r\d+|\d+), (%r\d+)\}"

MUTANTS = [
    Mutant("TMA load of terms: row or column and term swapped", LOAD, r"\1\3, \2, \4, \5}"),
    Mutant("TMA load of terms: the address is not moved to the group", LOAD, r"\1\2, \3, \4, 0}"),
    Mutant(
        "TMA load of terms: the address is not moved back by the lines that the bound adds", LOAD, r"\1\2, \3, 0, \5}"
    ),
    Mutant("TMA store: column and row swapped", STORE, r"\1\3, \2, \4, \5}"),
    Mutant("TMA store: the address is not moved to the group", STORE, r"\1\2, \3, \4, 0}"),
    Mutant("TMA store: the address is not moved back by the lines that the bound adds", STORE, r"\1\2, \3, 0, \5}"),
]
