"""The switch that fixes the order of summation of every GEMM by N, K and the dtypes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .scoped import Setting

SETTING: Setting[bool] = Setting()


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Within the block a row of a result does not depend on how many rows it is computed with.

    A GEMM is usually cut into tiles and partial sums that suit its shape, so the same row comes out with other last bits
    in a batch of 1 than in a batch of 64 (Horace He, "Defeating nondeterminism in LLM inference", 2025). Here
    :func:`amp_kernels.matmul`, :func:`amp_kernels.linear`, :func:`amp_kernels.mlp` and :func:`amp_kernels.baddbmm` pass
    ``batch_invariant=True`` to their GEMMs, whose configuration then depends on N, K and the dtypes only. It costs
    speed, most of it for few rows.

    This covers the forward and the gradient of the rows' input, bit by bit, for 16-bit work on one machine and backend (on
    the CPU kernels, also for any number of threads). It does not cover the gradients of weights and biases, which are sums
    over the rows, nor fp32 and fp64 work, which torch computes. The backward of a call follows the setting of its
    forward.

    Blocks nest. One holds for its thread, and for every thread that is in no such block itself: these follow the open
    block that was entered last.

    torch.compile: a compiled function guards on the setting and is compiled once for each. Enter the block outside of
    it; entering inside breaks the graph. The block does not cover norms, activations and softmax in a compiled function, whose
    kernels are the compiler's.

    Args:
        enabled: ``False`` switches it off within the block.

    Examples:
        >>> x, w = torch.randn(64, 256).bfloat16(), torch.randn(256, 32).bfloat16()
        >>> with ak.batch_invariant():
        ...     torch.equal(ak.matmul(x[:1], w), ak.matmul(x, w)[:1])
        True
    """
    with SETTING.block(bool(enabled)):
        yield


def is_batch_invariant() -> bool:
    """True if :func:`batch_invariant` is in force in this thread."""
    return SETTING.here() is True
