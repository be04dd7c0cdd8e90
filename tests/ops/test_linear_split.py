"""linear(split=): the pieces and the gradients of linear and Tensor.split to the bit, whether the gradients of the pieces are read where
they lie or concatenated. Sums of the bias gradient have another order where they lie apart."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels._raw import segmented_gemm
from amp_kernels.nn import accumulate_fp32

from ..helpers.generators import HALF_DTYPES, normal

bf16, f32 = torch.bfloat16, torch.float32
B, T, D = 2, 35, 8  # batch, rows, features of a head


@pytest.fixture(params=["cpu", "8.0", "9.0"])
def place(request, monkeypatch):
    """The CPU kernels, or those of a GPU of this capability."""
    if request.param == "cpu":
        yield "cpu"
        return
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", request.param)
    with ak.backend("emulate"):
        yield request.param


def problem(sizes, dtype=bf16, param_dtype=None):
    """x [2, 35, 72], weight, bias."""
    shapes = ((B, T, 72), (sum(sizes), 72), (sum(sizes),))
    return [normal(*shape, dtype=param_dtype or dtype, seed=i, scale=0.2, grad=True) for i, shape in enumerate(shapes)]


def gradients_of(sizes, dtype=bf16):
    """As attention's kernels leave them: by heads, of which those of a token are adjacent."""
    return [
        normal(B, T, size, dtype=dtype, seed=10 + i).view(B, T, -1, D).transpose(1, 2) for i, size in enumerate(sizes)
    ]


def heads(pieces):
    return [piece.view(B, T, -1, D).transpose(1, 2) for piece in pieces]


def trained(call, tensors, grads, autocast=None):
    """Pieces and gradients of ``call``; a piece whose gradient is ``None`` is not used."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    within = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with within:
        pieces = call(*tensors)
    used = [(piece, grad) for piece, grad in zip(heads(pieces), grads, strict=True) if grad is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return [*pieces, *(t.grad for t in tensors)]


def both(sizes, tensors, grads, autocast=None):
    ours = trained(lambda *t: ak.linear(*t, split=sizes), tensors, grads, autocast)
    plain = trained(lambda *t: ak.linear(*t).split(sizes, -1), tensors, grads, autocast)
    return ours, plain


def assert_same(ours, plain, grads):
    for got, want in zip(ours[:-1], plain[:-1], strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    rows = torch.cat([torch.zeros(B * T, 0), *(g.transpose(1, 2).flatten(2).flatten(0, 1) for g in grads)], 1).double()
    exact, size = rows.sum(0), rows.abs().sum(0)
    error = (ours[-1].double() - exact).abs()
    assert (error <= torch.finfo(ours[-1].dtype).eps / 2 * exact.abs() + B * T * 2.0**-24 * size).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64, 64)])
def test_gradients(sizes, dtype, place):
    grads = gradients_of(sizes, dtype)
    assert_same(*both(sizes, problem(sizes, dtype), grads), grads)


@pytest.mark.parametrize("sizes", [(64, 40, 64), (64, 64, 64, 64), (128,)])
def test_pieces_that_are_concatenated(sizes, place):
    grads = gradients_of(sizes)
    assert_same(*both(sizes, problem(sizes), grads), grads)


def test_autocast_and_a_frozen_input(place):
    sizes = (64, 64)
    grads = gradients_of(sizes)
    ours, plain = both(sizes, problem(sizes, param_dtype=f32), grads, autocast=bf16)
    assert {t.dtype for t in ours[-3:]} == {f32}
    assert_same(ours, plain, grads)
    x, weight, bias = problem(sizes)
    for frozen in ([x.detach(), weight, bias], [x, weight.detach(), bias], [x, weight, bias.detach()]):
        pieces = heads(ak.linear(*frozen, split=sizes))
        needed = [t for t in frozen if t.requires_grad]
        got = torch.autograd.grad(pieces, needed, grads)
        want = torch.autograd.grad(heads(ak.linear(*frozen).split(sizes, -1)), needed, grads)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g.ndim > 1)


def test_a_piece_without_a_gradient(place):
    sizes = (64, 128, 64)
    grads = gradients_of(sizes)
    grads[1] = None
    ours, plain = both(sizes, problem(sizes), grads)
    grads[1] = torch.zeros(B, 128 // D, T, D)
    assert_same(ours, plain, grads)


def kernels(call):
    with torch.profiler.profile() as profile:
        call()
    return [event.name.rpartition("::")[2] for event in profile.events()]


@pytest.mark.parametrize("place", ["8.0", "9.0"], indirect=True)
def test_hopper_reads_the_gradients_where_they_lie(place):
    sizes = (64, 128, 64)
    pieces, grads = heads(ak.linear(*problem(sizes), split=sizes)), gradients_of(sizes)
    ran = kernels(lambda: torch.autograd.backward(pieces, grads))
    assert ran.count("segmented_gemm") == 2
    assert ran.count("cat") == 1  # of the sums of the bias
    assert ran.count("copy_") == (1 if place == "9.0" else 7)  # the sums in 16 bits


@pytest.mark.parametrize("place", ["9.0"], indirect=True)
def test_which_gradients_are_read(place):
    a = [torch.zeros(16, 64, dtype=bf16), torch.zeros(16, 128, dtype=bf16)]
    wide = torch.zeros(16, 200, dtype=bf16)
    assert segmented_gemm.reads(a)
    assert segmented_gemm.reads([a[0], wide[:, 8:72], a[1]])
    for other in (
        wide[:, :72],
        wide[:, 1:65],
        wide[:, :128:2],
        a[0][:1].expand(16, 64),
        wide.view(-1)[:3072].view(48, 64)[::3],
    ):
        fits = other.stride(0) >= other.shape[1] and other.shape[1] % 64 == 0 and other.stride(1) == 1
        assert segmented_gemm.reads([a[0], other]) == (fits and other.data_ptr() % 16 == 0)
    assert not segmented_gemm.reads(a[:1])
    assert not segmented_gemm.reads([*a, *a])
    with ak.backend("cpu"):
        assert not segmented_gemm.reads(a)


def test_batch_invariant(place):
    sizes = (64, 64)
    rows = torch.exp2(torch.arange(T) % 16).to(bf16)[:, None]  # so that the order of a sum shows
    grads = [grad * rows for grad in gradients_of(sizes)]
    with ak.batch_invariant():
        ours, plain = both(sizes, problem(sizes, param_dtype=f32), grads, autocast=bf16)
    torch.testing.assert_close([*ours], [*plain], rtol=0, atol=0)


def test_derivatives_of_derivatives(place):
    sizes = (64, 64)
    x, weight, bias = problem(sizes)

    def second(pieces):
        (grad,) = torch.autograd.grad([(p.float() ** 2).sum() for p in pieces], x, create_graph=True)
        return torch.autograd.grad(grad.float().pow(2).sum(), (x, weight, bias))

    found = second(ak.linear(x, weight, bias, split=sizes)), second(ak.linear(x, weight, bias).split(sizes, -1))
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_main_grad(autocast, place):
    sizes, found = (64, 128), []
    for split in (True, False):
        torch.manual_seed(0)
        layer = ak.nn.Linear(72, sum(sizes), dtype=f32 if autocast else bf16)
        with accumulate_fp32(layer):
            for i in range(2):
                x = normal(B, T, 72, dtype=layer.weight.dtype, seed=i)
                with torch.autocast("cpu", bf16, enabled=autocast):
                    pieces = ak.linear(x, layer.weight, layer.bias, split=sizes) if split else layer(x).split(sizes, -1)
                torch.autograd.backward(heads(pieces), gradients_of(sizes))
            assert layer.weight.grad.data_ptr() == layer.weight.main_grad.data_ptr()
            found.append(layer.weight.grad.clone())
    assert torch.equal(*found)


def test_checkpointing(place):
    sizes = (64, 64, 64)
    grads = gradients_of(sizes)
    found = []
    for call in (
        lambda *t: ak.linear(*t, split=sizes),
        lambda *t: checkpoint(lambda *t: ak.linear(*t, split=sizes), *t, use_reentrant=False),
    ):
        found.append(trained(call, problem(sizes), grads))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("autocast", [None, bf16])
def test_compile(autocast):
    sizes = (64, 64)
    tensors, grads = problem(sizes, param_dtype=f32 if autocast else bf16), gradients_of(sizes)
    compiled = torch.compile(lambda *t: ak.linear(*t, split=sizes), backend="aot_eager", fullgraph=True)
    got, want = trained(compiled, tensors, grads, autocast), both(sizes, tensors, grads, autocast)[1]
    assert all(torch.equal(*pair) for pair in zip(got[:-1], want[:-1], strict=True))


def test_other_arithmetic_is_torchs():
    x, weight, bias = (t.detach().float() for t in problem((3, 5)))
    q, k = ak.linear(x, weight, bias, split=(3, 5))
    assert torch.equal(torch.cat((q, k), -1), torch.nn.functional.linear(x, weight, bias))
    mapped = torch.func.vmap(lambda x: ak.linear(x, weight, bias, split=(3, 5)))(x)
    assert torch.equal(mapped[0], q)
    half, _ = ak.linear(x.half(), weight.half(), split=(3, 5))
    assert torch.equal(half, ak.linear(x.half(), weight.half())[..., :3])
    grad = torch.func.grad(lambda x: ak.linear(x, weight.bfloat16(), split=(3, 5))[1].float().sum())(x.bfloat16())
    assert grad.shape == x.shape


def test_errors():
    x, weight, _ = problem((64, 64))
    with pytest.raises(ValueError, match=r"split is \[64, 65\]; accepted: sizes that add up to 128, out_features"):
        ak.linear(x, weight, split=(64, 65))
    with pytest.raises(ValueError, match=r"split is \[-1, 129\]"):
        ak.linear(x, weight, split=(-1, 129))
    with pytest.raises(ValueError, match="activation is 'gelu'; accepted with split: None"):
        ak.linear(x, weight, activation="gelu", split=(64, 64))
    with pytest.raises(ValueError, match="linear: x has shape"):
        ak.linear(x[..., :3], weight, split=(64, 64))
