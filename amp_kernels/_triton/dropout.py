"""``amp_kernels::dropout`` in Triton: one read of what comes, one write; csrc/dropout/formula.h bit for bit.

The limit is memory; the generator is some 25 instructions an element. Operands with gaps are made contiguous first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._raw.dropout import check, rate

_BLOCK = 2048  # elements a program


@triton.jit
def dropout_words(seed, first, N: tl.constexpr):
    """24 random bits of each of elements ``first`` .. ``first + N - 1``; ``first`` and ``N`` are multiples of 4."""
    group = first // 4 + tl.arange(0, N // 4)
    word0, word1, word2, word3 = tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), 0, 0)
    # Element 2 a + b of a group gets word 2 a + b; a join appends the dimension that moves fastest.
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return (tl.reshape(words, (N,)) >> 8).to(tl.int32)


@triton.jit
def dropout_word(seed, i):
    """The same of elements ``i``, wherever they are."""
    group = i // 4
    word0, word1, word2, word3 = tl.philox(seed, group.to(tl.uint32), (group >> 32).to(tl.uint32), 0, 0)
    odd = i % 2 != 0
    word = tl.where(i % 4 < 2, tl.where(odd, word1, word0), tl.where(odd, word3, word2))
    return (word >> 8).to(tl.int32)


@triton.jit
def dropped_out(v, words, threshold, scale):
    return tl.where(words < threshold, 0.0, v * tl.cast(scale, tl.float32))


@triton.jit
def _some(x, residual, out, i, inside, words, threshold, scale):
    v = tl.load(x + i, mask=inside).to(tl.float32)
    v = dropped_out(v, words, threshold, scale)
    if residual is not None:
        v += tl.load(residual + i, mask=inside).to(tl.float32)
    tl.store(out + i, v.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dropout_kernel(x, residual, seed, out, count, threshold, scale, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    words = dropout_words(tl.load(seed), first, BLOCK)
    # Inner blocks go without a mask: one of unknown divisibility would make every access scalar.
    if first + BLOCK <= count:
        _some(x, residual, out, i, None, words, threshold, scale)
    else:
        _some(x, residual, out, i, i < count, words, threshold, scale)


def dropout(
    x: torch.Tensor,
    seed: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    p: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/dropout.py``."""
    check(x, seed, residual, p, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if out.numel() > 0:
        with torch.cuda.device(out.device if out.is_cuda else -1):
            dropout_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
                x.contiguous(),
                residual if residual is None else residual.contiguous(),
                seed,
                out,
                out.numel(),
                *rate(p),
                BLOCK=_BLOCK,
                num_warps=8,
                enable_fp_fusion=False,
            )
    return out
