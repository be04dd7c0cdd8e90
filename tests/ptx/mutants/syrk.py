"""The mirrored store of symmetric products on Hopper. The rest of the kernel is that of the list gemm_sm90."""

from . import Mutant

KERNEL = "gemm_sm90_kernel"
CASES = "symmetric"
CAPABILITY = 90

MUTANTS = [
    Mutant(
        "stmatrix: not transposed, in a mirrored tile",
        r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.trans\.shared",
        r"\1.shared",
    ),
]
