"""batch_invariant: every op of a training step gives a row the same bits alone, in company, in any order and for any number of
threads; the losses of the head are those of the logits."""

import functools
import itertools

import pytest
import torch

import amp_kernels as ak

from ..helpers import generators

ROWS, FEATURES, CLASSES = 45, 96, 70
normal = functools.partial(generators.normal, dtype=torch.bfloat16)
WEIGHT, BIAS = normal(FEATURES, seed=1), normal(FEATURES, seed=2)
W1, W2, HEAD = normal(48, FEATURES, seed=3), normal(FEATURES, 48, seed=4), normal(CLASSES, FEATURES, seed=5)
GATED = normal(96, FEATURES, seed=6)


def _targets(rows):
    """Part of the row, so that it goes where the row goes."""
    return (rows.detach()[:, 0].float().abs() * 997).long() % CLASSES


def _under_autocast(rows):
    with torch.autocast("cpu", torch.float16):
        return ak.linear(rows.float(), W1.float())


#: By name: a function of rows [N, FEATURES]; each row of the result is that row's.
FUNCTIONS = {
    "layer_norm": lambda x: ak.layer_norm(x, FEATURES, WEIGHT, BIAS),
    "rms_norm": lambda x: ak.rms_norm(x, FEATURES, WEIGHT),
    "layer_norm of a sum": lambda x: torch.cat(ak.layer_norm(x, FEATURES, WEIGHT, residual=2 * x), 1),
    "rms_norm of an fp32 sum": lambda x: ak.rms_norm(x, FEATURES, WEIGHT, residual=x.float())[0],
    "gelu": ak.gelu,
    "silu": ak.silu,
    "swiglu": ak.swiglu,
    "cross_entropy": lambda x: ak.cross_entropy(x, _targets(x), reduction="none", label_smoothing=0.1)[:, None],
    "linear": lambda x: ak.linear(x, W1, activation="gelu"),
    "matmul": lambda x: ak.matmul(x, W1.t(), out_dtype=torch.float32),
    "autocast": _under_autocast,
    "mlp": lambda x: ak.mlp(x, W1, None, W2),
    "gated mlp": lambda x: ak.mlp(x, GATED, None, W2, activation="swiglu"),
    "addmm": lambda x: ak.addmm(W2[0], x, W1.t()),
    "linear_cross_entropy": lambda x: ak.linear_cross_entropy(x, HEAD, _targets(x), reduction="none", z_loss=1e-4)[:, None],
    "head": lambda x: ak.linear_cross_entropy(x, HEAD, _targets(x), reduction="none", chunk_size=7, label_smoothing=0.1)[:, None],
}  # fmt: skip


def _run(function, x):
    """Result and gradient of the rows."""
    rows = x.clone().requires_grad_()
    with ak.batch_invariant():
        out = function(rows)
    out.float().square().sum().backward()
    return out.detach(), rows.grad


#: Those whose weights are of another dtype than the rows, or which have none.
ANY_DTYPE = ("layer_norm", "rms_norm", "gelu", "cross_entropy", "rms_norm of an fp32 sum")
CASES = [(name, torch.bfloat16) for name in FUNCTIONS] + [(name, torch.float16) for name in ANY_DTYPE]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_rows(name, dtype, same_bits_for):
    function, x = FUNCTIONS[name], normal(ROWS, FEATURES, seed=9).to(dtype)
    whole = _run(function, x)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    for rows in ([0], [44], [3, 4, 5], list(range(2, 37)), order.tolist(), [7] * 3):
        for got, expected in zip(_run(function, x[rows]), whole, strict=True):
            assert torch.equal(got, expected[rows]), rows
    apart = torch.empty(2 * ROWS + 1, FEATURES + 3, dtype=dtype)[1::2, 3:]  # rows that begin anywhere
    apart.copy_(x[: len(apart)])
    for got, expected in zip(_run(function, apart), whole, strict=True):
        assert torch.equal(got, expected[: len(apart)])
    assert all(map(torch.equal, same_bits_for((1, 3), lambda: _run(function, x)), whole))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_rows_of_the_cuda_kernels(name, capability, monkeypatch):
    """On the emulator, whose tensor cores align and cut: rows in another batch, and rows that begin at an odd element."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", capability)
    monkeypatch.setenv("AMP_KERNELS_EMULATE_TRUNCATE", "1")
    x = normal(ROWS, FEATURES, seed=9)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    with ak.backend("emulate"):
        whole = _run(FUNCTIONS[name], x)
        for rows, part in (([3], x[3:4]), ([5, 6, 7], x[5:8]), ([30, 2], x[[30, 2]]), (list(range(ROWS)), odd)):
            for got, expected in zip(_run(FUNCTIONS[name], part.detach()), whole, strict=True):
                assert torch.equal(got, expected[rows]), rows


@pytest.mark.parametrize("columns", [1000, 2048])
def test_long_rows_of_the_cuda_kernels(columns):
    """Rows that begin at an odd element take kernels that add in another order: they are copied."""
    weight = normal(columns, seed=1)
    functions = {
        "layer_norm": lambda x: ak.layer_norm(x, columns, weight, weight),
        "rms_norm of a sum": lambda x: ak.rms_norm(x, columns, weight, residual=x)[0],
    }
    x = normal(7, columns, seed=9)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    with ak.backend("emulate"):
        for name, function in functions.items():
            whole = _run(function, x)
            for got, expected in zip((*_run(function, odd), *_run(function, x[2:3])), (*whole, *whole), strict=True):
                assert torch.equal(got, expected if len(got) > 1 else expected[2:3]), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk", [1, 13, 64, None])
def test_the_loss_of_the_head_is_that_of_its_logits(chunk, autocast):
    """And so are the gradients: the rollout's log-probabilities are the trainer's."""
    dtype = torch.float32 if autocast else torch.bfloat16
    results = []
    for fused in (True, False):
        x, w, b = (
            t.to(dtype).requires_grad_() for t in (normal(ROWS, FEATURES, seed=9), HEAD.clone(), normal(CLASSES))
        )
        with ak.batch_invariant(), torch.autocast("cpu", torch.float16, enabled=autocast):
            if fused:
                loss = ak.linear_cross_entropy(x, w, _targets(x), linear_bias=b, reduction="none", chunk_size=chunk)
            else:
                loss = ak.cross_entropy(ak.linear(x, w, b), _targets(x), reduction="none")
        loss.backward(torch.linspace(0.5, 2, ROWS).to(loss.dtype))
        results.append((loss, x.grad, w.grad, b.grad))
    kept = (chunk or 64) % 64 == 0
    for got, expected in list(zip(*results, strict=True))[: 4 if kept else 2]:
        assert torch.equal(got, expected)


TOLD = dict.fromkeys(("linear", "matmul", "autocast", "addmm"), 2) | {"mlp": 4, "gated mlp": 4, "head": 4}


@pytest.mark.parametrize("name", TOLD)
def test_every_product_is_told(name, op_calls):
    """Forward and the gradients of rows; a weight gradient is a sum over them and is not. The head's are, in chunks."""
    for enabled in (True, False):
        op_calls.clear()
        x, head = normal(9, FEATURES).requires_grad_(), HEAD.clone().requires_grad_()
        with ak.batch_invariant(enabled):
            out = (
                FUNCTIONS[name](x)
                if name != "head"
                else ak.linear_cross_entropy(x, head, torch.arange(9), reduction="sum")
            )
        out.sum().backward()
        ops = op_calls["gemm"], op_calls["gemm_dact"], op_calls["gemm_accumulate_"]
        told = [kwargs.get("batch_invariant", False) for _, kwargs in itertools.chain(*ops)]
        assert told == [enabled] * (TOLD[name] - (name == "head" and not enabled))
