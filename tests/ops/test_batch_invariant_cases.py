"""batch_invariant over random cases: rows in any batch and order, gradients over any split of multiples of 64 tokens, and any number of
tensor-parallel ranks, bit by bit. ``--exhaustive`` runs 10^4 of them."""

import random

import pytest
import torch

import amp_kernels as ak
from amp_kernels.distributed import tree_sum
from amp_kernels.testing import generators

SAMPLE, ALL = 120, 10_000


def sizes_of_parts(draw, tokens):
    """Parts of ``tokens``, of which all but the last are multiples of 64."""
    parts = []
    while tokens > 64 and draw.random() < 0.8:
        parts.append(64 * draw.randint(1, (tokens - 1) // 64))
        tokens -= parts[-1]
    return [*parts, tokens]


def check_rows(draw, x, w, bias, activation):
    with ak.batch_invariant():
        whole = ak.linear(x, w, bias, activation=activation)
        rows = draw.choices(range(len(x)), k=draw.randint(1, min(len(x), 9)))
        assert torch.equal(ak.linear(x[rows], w, bias, activation=activation), whole[rows])
        first = draw.randrange(len(x))
        count = draw.randint(1, len(x) - first)
        part = x[first : first + count]
        assert torch.equal(ak.linear(part, w, bias, activation=activation), whole[first : first + count])


def check_splits(draw, x, w, bias):
    layer = ak.nn.Linear(w.shape[1], w.shape[0], dtype=x.dtype)
    norm = ak.nn.LayerNorm(w.shape[1], dtype=x.dtype)
    model = torch.nn.Sequential(norm, layer)
    with torch.no_grad():
        layer.weight.copy_(w)
    grad, results = generators.normal(len(x), w.shape[0], dtype=x.dtype, seed=5), []
    with ak.nn.accumulate_fp32(model):
        for sizes in ([len(x)], sizes_of_parts(draw, len(x))):
            model.zero_grad()
            for part, of in zip(x.split(sizes), grad.split(sizes), strict=True):
                with ak.batch_invariant():
                    out = model(part)
                out.backward(of)
            results.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *results)), sizes


def check_ranks(draw, x, w):
    features = x.shape[1] // 8 * 8
    x, w = x[:, :features], w[:, :features]
    if features == 0:
        return
    blocks = draw.choice((2, 4, 8))
    ranks = 2 ** draw.randint(0, blocks.bit_length() - 1)
    with ak.batch_invariant(k_blocks=blocks):
        whole = ak.matmul(x, w.t(), out_dtype=torch.float32)
    with ak.batch_invariant(k_blocks=blocks // ranks):
        parts = [
            ak.matmul(a, b.t(), out_dtype=torch.float32)
            for a, b in zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)
        ]
    assert torch.equal(tree_sum(parts), whole)


def check(seed, backend):
    draw = random.Random(seed)
    tokens, features, out = draw.randint(1, 300), draw.randint(1, 70), draw.randint(1, 40)
    dtype = draw.choice((torch.bfloat16, torch.float16))
    x, w = (generators.normal(*shape, dtype=dtype, seed=seed) for shape in ((tokens, features), (out, features)))
    bias = draw.choice((None, generators.normal(out, dtype=dtype)))
    activation = draw.choice((None, "gelu", "relu"))
    with ak.backend(backend):
        draw.choice(
            (
                lambda: check_rows(draw, x, w, bias, activation),
                lambda: check_splits(draw, x, w, bias),
                lambda: check_ranks(draw, x, w),
            )
        )()


@pytest.mark.parametrize(("backend", "share"), [("cpu", 1), ("emulate", 4)])
def test_some_cases(backend, share, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_TRUNCATE", "1")
    for seed in range(SAMPLE // share):
        monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", ("9.0", "8.0")[seed % 2])
        check(seed, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "share"), [("cpu", 2), ("emulate", 3), ("reference", 6)])
def test_many_cases(backend, share, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_TRUNCATE", "1")
    for seed in range(ALL // share):
        monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", ("9.0", "8.0")[seed % 2])
        check(seed, backend)
