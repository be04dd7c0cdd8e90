"""The switch that fixes the order of every sum of a training step by shapes of weights and dtypes alone."""

from __future__ import annotations

import contextlib

from .scoped import Setting

SETTING: Setting[int] = Setting()  # the number of blocks of K; 0: off


def batch_invariant(enabled: bool = True, *, k_blocks: int = 1) -> contextlib._GeneratorContextManager[None]:
    """Within the block a result has the same bits however the tokens are batched, split and spread over ranks.

    A GEMM is usually cut into tiles and partial sums that suit its shape, so the same row comes out with other last bits
    in a batch of 1 than in a batch of 64 (Horace He, "Defeating nondeterminism in LLM inference", 2025). Within the block,
    on one machine, backend and dtype, these have the same bits:

    - **Rows.** Forward and input gradient of :func:`amp_kernels.linear`, :func:`amp_kernels.matmul`, :func:`amp_kernels.mlp`,
      :func:`amp_kernels.addmm`, norms, activations and losses with ``reduction="none"``: alone, in company, in any
      order and for any number of threads. :func:`amp_kernels.linear_cross_entropy` equals
      :func:`amp_kernels.cross_entropy` of :func:`amp_kernels.linear`, for every ``chunk_size``.
    - **Splits.** With :func:`amp_kernels.nn.accumulate_fp32`, the gradients of all parameters over any split of the tokens
      into micro-batches, in their order, if every one but the last has a multiple of 64 tokens; also for every
      ``chunk_size`` that is a multiple of 64. Divide a loss by the number of all tokens: a mean over each micro-batch is
      another sum.
    - **Tensor parallelism.** Sums over features are cut into ``k_blocks`` equal blocks, which are added pairwise in fp32,
      neighbours first. A rank that holds 1/p of the features asks for ``k_blocks / p`` and an fp32 result;
      :func:`amp_kernels.distributed.tree_all_reduce` of these gives the bits of the whole.

    The backward of a call follows the setting of its forward. Out of scope are attention, fp32 and fp64 products, which are
    torch's, a vocabulary over several ranks, weights that two layers share, and gradients that autograd adds itself.

    Blocks nest. One holds for its thread, and for every thread that is in no such block itself: these follow the open
    block that was entered last.

    torch.compile: a compiled function guards on the setting and is compiled once for each. Enter the block outside of
    it; entering inside breaks the graph. The block does not cover norms and activations in a compiled function, whose
    kernels are the compiler's.

    Args:
        enabled: ``False`` switches it off within the block.
        k_blocks: blocks of each sum over features, a power of two: the largest tensor-parallel degree that is compared. The
            number of features must be divisible by it.

    Raises:
        TypeError: ``k_blocks`` is not an int, or ``enabled`` not a bool.
        ValueError: ``k_blocks`` is not a power of two; within the block, a sum over features is not divisible by it.

    Examples:
        >>> x, w = torch.randn(64, 256).bfloat16(), torch.randn(256, 32).bfloat16()
        >>> with ak.batch_invariant():
        ...     torch.equal(ak.matmul(x[:1], w), ak.matmul(x, w)[:1])
        True
        >>> with ak.batch_invariant(k_blocks=2):  # as on one rank, then as on two
        ...     whole = ak.matmul(x, w, out_dtype=torch.float32)
        >>> with ak.batch_invariant():
        ...     parts = [ak.matmul(x[:, k], w[k], out_dtype=torch.float32) for k in (slice(128), slice(128, 256))]
        >>> torch.equal(whole, ak.distributed.tree_sum(parts))
        True
    """
    if not isinstance(enabled, bool):
        hint = "; as a decorator: @ak.batch_invariant()" if callable(enabled) else "; k_blocks is passed by keyword"
        raise TypeError(f"batch_invariant: enabled is {enabled!r}; accepted: True, False{hint}")
    if isinstance(k_blocks, bool) or not isinstance(k_blocks, int):
        raise TypeError(f"batch_invariant: k_blocks is {k_blocks!r}; accepted: an int, a power of two")
    if k_blocks < 1 or k_blocks & (k_blocks - 1):
        raise ValueError(f"batch_invariant: k_blocks is {k_blocks}; accepted: a power of two (1, 2, 4, ...)")
    return SETTING.block(k_blocks if enabled else 0)


def k_blocks() -> int:
    """Blocks of a sum over features in this thread; 0 if no :func:`batch_invariant` is in force."""
    return 0 if SETTING.newest is None else SETTING.here() or 0


def is_batch_invariant() -> bool:
    """True if :func:`batch_invariant` is in force in this thread."""
    return k_blocks() > 0
