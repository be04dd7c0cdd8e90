"""The Triton kernel of cross_entropy_rows_, compiled for GPUs that are not there: it computes in fp32, loads wide, fits."""

import pytest
import torch

from amp_kernels._triton import cross_entropy_rows as module

from . import aot

CASES = {
    "classes": ({}, torch.int64),
    "smooth": ({"label_smoothing": 0.1, "z_loss": 1e-4}, torch.int64),
    "probabilities": ({}, torch.bfloat16),
}


@pytest.mark.parametrize(
    ("arch", "dtype", "case"),
    [
        *((arch, torch.bfloat16, "smooth") for arch in (80, 90, 100, 120)),
        (90, torch.bfloat16, "probabilities"),
        (90, torch.bfloat16, "classes"),
        (80, torch.float32, "classes"),
    ],
)
def test_compiles_with_wide_accesses_at_any_address(arch, dtype, case):
    options, target = CASES[case]
    logits = torch.zeros(3, 50257, dtype=dtype)
    y = torch.zeros(3, dtype=target) if target == torch.int64 else logits.to(target)
    with aot.compiling_for(arch) as kernels:
        module.cross_entropy_rows_(logits, y, None, torch.ones(3), torch.zeros(3), torch.empty_like(logits), **options)
    (kernel,) = kernels
    assert not aot.count(r"\.f64", kernel)
    walks = 2 if case == "classes" else 3
    # A thread takes 16 elements of a block, of which two words of 16 bits, or four of fp32, are 16 bytes each.
    words = 16 * dtype.itemsize // 16
    assert aot.count(r"ld\.global\.v4\.b32", kernel) == walks * words
    assert aot.count(r"st\.global\.v4\.b32", kernel) == words
    used = aot.usage(kernel)
    assert used.stack == 0
    assert used.registers <= 128
    assert used.shared <= 4096
