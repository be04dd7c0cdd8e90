"""linear_log_probs against float64 with bounds from the arithmetic, and faults that others' log-probabilities of tokens had."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..helpers.bounds import UNIT_ROUNDOFF
from .tensors import head_problem as problem

HALF = [torch.float16, torch.bfloat16]
U = 2.0**-24


def log_probs_of(x, weight, target, bias=None, **options):
    return ak.linear_log_probs(x, weight, target, linear_bias=bias, entropy=True, **options)


def derivatives(call, leaves, upstream):
    results = call(*leaves)
    leaves = [leaf for leaf in leaves if leaf is not None]
    return [r.detach() for r in results], torch.autograd.grad(results, leaves, upstream)


def check_against_float64(args, upstream, temperature=1.0, chain=1.0, **options):
    """``chain``: how far a product's sums are from the result, as a multiple of the features and u times the products' magnitudes."""
    x, weight, target, bias = args
    upstream = [g.double() for g in upstream]
    call = lambda x, w, b: log_probs_of(x, w, target, b, temperature=temperature, **options)  # noqa: E731
    (l, h), grads = derivatives(call, (x, weight, bias), [g.float() for g in upstream])
    assert l.dtype == h.dtype == torch.float32
    assert l.max() <= 0
    assert h.min() >= 0
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    t = temperature.double().expand(target.shape) if isinstance(temperature, torch.Tensor) else temperature
    (want_l, want_h), want = derivatives(lambda x, w, b: log_probs_of(x, w, target, b, temperature=t), wide, upstream)

    # Errors of logits: the product's sum, the addition of the bias and the division round.
    x64, w64, b64 = (torch.zeros(()) if v is None else v.detach().double() for v in wide)
    t = torch.as_tensor(t).double().expand(target.shape)[:, None]
    size = (x64.abs() @ w64.abs().t() + b64.abs()) / t
    dz = (chain * x.shape[1] + 4) * U * size
    error = dz.amax(1)
    rounding = 64 * U  # of sums of exponentials and logarithms
    assert bool(((l - want_l).abs() <= 2 * error + rounding * (1 + want_l.abs())).all())
    assert bool(((h - want_h).abs() <= 2 * want_h * error + rounding * (1 + want_h)).all())

    # The gradient of the logits: relative errors of p and of log p + H, and one rounding to the working dtype.
    counted = (target != -100)[:, None]
    z = (x64 @ w64.t() + b64) / t
    log_p = z.log_softmax(1)
    p, g_l, g_h = log_p.exp(), *(g[:, None] for g in upstream)
    y = F.one_hot(target.clamp(min=0), z.shape[1])
    of_entropy = g_h * p * (log_p + want_h[:, None])
    dlogits = torch.where(counted, (g_l * (y - p) - of_entropy) / t, 0.0)
    relative = 2 * error[:, None] + rounding
    inside = (g_l.abs() * (y + p) + of_entropy.abs()) * relative + g_h.abs() * p * (relative * (1 + want_h[:, None]))
    unit = UNIT_ROUNDOFF[x.dtype] if x.dtype in HALF else 4 * U
    # Gradients may be subnormal.
    least = 2.0**-25 * ((g_l.abs() + 16 * g_h.abs()) / t).amax() / 2.0**10 if x.dtype == torch.float16 else 0.0
    off = torch.where(counted, unit * dlogits.abs() + least + (1 + unit) * inside / t, 0.0)
    sums = U * max(z.shape)  # of products over classes and over rows
    bounds = [
        off @ w64.abs() + sums * dlogits.abs() @ w64.abs(),
        off.t() @ x64.abs() + sums * dlogits.abs().t() @ x64.abs(),
    ]
    bounds.append(off.sum(0) + sums * dlogits.abs().sum(0))
    for leaf, got, expected, bound in zip((x, weight, bias), grads, want, bounds, strict=False):
        assert got.dtype == leaf.dtype
        assert bool(((got - expected).abs() <= bound + UNIT_ROUNDOFF[leaf.dtype] * expected.abs() + 2.0**-25).all())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("chunk_size", [None, 1, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor(1.3), "rows"], ids=str)
def test_values_and_gradients(dtype, chunk_size, temperature):
    """The temperature divides the bias too, in forward and backward (unsloth-zoo#832, trl#6526, miles#68)."""
    args = problem(dtype=dtype, bias=chunk_size != 7)
    rows = torch.linspace(0.3, 2, 23)
    upstream = torch.linspace(-1, 2, 23), torch.linspace(1, -1, 23)
    check_against_float64(args, upstream, rows if temperature == "rows" else temperature, chunk_size=chunk_size)


@pytest.mark.parametrize("classes", [1, 127, 128, 129, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_vocabularies(classes, dtype):
    rows = 3 if classes > 1000 else 6
    args = problem(rows, 8, classes, dtype)
    check_against_float64(args, (torch.ones(rows), torch.ones(rows)), 0.9)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_the_cuda_kernels(dtype, capability, monkeypatch):
    """On the emulator, whose tensor cores align and cut: at most 11 roundings in 16 features, one of them twice as large."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", capability)
    monkeypatch.setenv("AMP_KERNELS_EMULATE_TRUNCATE", "1")
    with ak.backend("emulate"):
        args = problem(features=64, dtype=dtype)
        check_against_float64(args, (torch.ones(23), torch.linspace(1, -1, 23)), 0.7, chunk_size=9)
        with torch.no_grad():
            alone = ak.linear_log_probs(args[0], args[1], args[2], linear_bias=args[3], temperature=0.7, chunk_size=9)
        both = log_probs_of(*args, temperature=0.7, chunk_size=9)[0]
        assert torch.equal(alone, both)


@pytest.mark.parametrize("which", [0, 1], ids=["log_probs", "entropy"])
def test_each_result_has_a_gradient_of_its_own(which):
    """Silently none for the entropy in trl#6625."""
    args = problem()
    upstream = [torch.zeros(23), torch.zeros(23)]
    upstream[which] += 1
    check_against_float64(args, upstream)
    x, weight, target, bias = args
    alone = torch.autograd.grad(log_probs_of(x, weight, target, bias)[which].sum(), x)[0]
    both = torch.autograd.grad(log_probs_of(x, weight, target, bias), x, upstream)[0]
    assert torch.equal(alone, both)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("features", [1024, 4096])
def test_ratios_are_one(dtype, features):
    """Log-probs of 16-bit logits were 7.8e-3 and 9e-4 off, and 82 % and 13 % of ratios outside."""
    x, weight, target, _ = problem(16, features, 4096, dtype, bias=False)
    weight = weight.detach() * features**-0.5
    got = ak.linear_log_probs(x.detach(), weight, target).double()
    want = ak.linear_log_probs(x.detach().double(), weight.double(), target)
    assert (got - want).square().mean().sqrt() <= (3e-6 if features == 1024 else 6e-6)
    assert ((got - want).exp() - 1).abs().max() < 1e-3


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_same_bits_with_and_without(dtype, invariant):
    x, weight, target, bias = problem(rows=70, dtype=dtype)
    with ak.batch_invariant() if invariant else contextlib.nullcontext():
        first = ak.linear_log_probs(x, weight, target, linear_bias=bias, temperature=0.7)
        l, h = log_probs_of(x, weight, target, bias, temperature=torch.tensor(0.7))
        (g1,), (g2,) = (torch.autograd.grad(r.sum(), x, retain_graph=True) for r in (first, l))
        with torch.inference_mode():
            no_grad, h_no_grad = log_probs_of(x, weight, target, bias, temperature=torch.full((70,), 0.7))
            alone = ak.linear_log_probs(x, weight, target, linear_bias=bias, temperature=0.7)
        for other in (l, no_grad, alone):
            assert torch.equal(first, other)
        assert torch.equal(h, h_no_grad)
        assert torch.equal(g1, g2)
        if dtype in HALF and invariant:
            for rows in (slice(0, 1), slice(3, 40)):
                for chunk in (1, 5, 64):
                    part = log_probs_of(x[rows], weight, target[rows], bias, temperature=0.7, chunk_size=chunk)
                    assert torch.equal(part[0], l[rows])
                    assert torch.equal(part[1], h[rows])
                    (dx,) = torch.autograd.grad(part[0].sum(), x)
                    assert torch.equal(dx[rows], g1[rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_masked_words(dtype):
    """0 times -inf made NaN entropies and gradients (trl#7221, SkyRL#2259)."""
    x, weight, target, bias = problem(dtype=dtype)
    with torch.no_grad():
        bias[::3] = -math.inf
        bias[1] = 0
    target[1], target[2] = 3, 1
    leaves = x, weight, bias
    l, h = log_probs_of(x, weight, target, bias, temperature=0.9)
    assert l[1] == -math.inf
    assert h.isfinite().all()
    keep = bias != -math.inf
    where = torch.where(keep)[0]
    y = torch.searchsorted(where, target.clamp(min=0)).where(target >= 0, -100)
    rows = torch.isin(target, where) | (target < 0)
    want = log_probs_of(x[rows].double(), weight[keep].double(), y[rows], bias[keep].double(), temperature=0.9)
    for got, expected in zip((l[rows], h[rows]), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((l[rows].sum() + h[rows].sum()), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][~keep].any()
    assert not grads[2][~keep].any()


def test_rows_of_nothing_but_minus_infinity_are_nan_alone():
    x = torch.ones(4, 1, requires_grad=True)
    weight = torch.tensor([[-2.0], [-3.0]])
    target = torch.zeros(4, dtype=torch.int64)
    with torch.no_grad():
        x[1], x[2] = 3e38, math.nan
    l, h = log_probs_of(x, weight, target)
    (grad,) = torch.autograd.grad((l + h).sum(), x)
    for values in (l, h, grad[:, 0]):
        assert values.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_ignored_rows_may_hold_anything(dtype):
    x, weight, target, bias = problem(dtype=dtype)
    ignored = target == -100
    temperature = torch.ones(23).masked_fill(ignored, math.nan)
    upstream = (
        torch.ones(23).masked_fill(ignored, math.inf).to(torch.float64 if dtype == torch.float64 else torch.float32)
    )
    grads = []
    for held in (0.0, math.nan):
        with torch.no_grad():
            x[ignored] = held
        l, h = log_probs_of(x, weight, target, bias, temperature=temperature, chunk_size=4)
        assert not l[ignored].any()
        assert not h[ignored].any()
        grads.append(torch.autograd.grad((l, h), (x, weight, bias), (upstream, upstream)))
        assert not grads[-1][0][ignored].any()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_counts_and_nothing_comes_in(dtype):
    """Without a graph DDP waits for the gradients of a rank whose rows are all masked (trl#7077)."""
    x, weight, target, bias = problem(dtype=dtype)
    (log_probs_of(x, weight, torch.full_like(target, -100), bias)[0].sum()).backward()
    assert not any(leaf.grad.any() for leaf in (x, weight, bias))
    l, h = log_probs_of(x[:0], weight, target[:0], bias)
    assert l.shape == h.shape == (0,)
    dx, dw = torch.autograd.grad(l.sum() + h.sum(), (x, weight))
    assert dx.shape == x.shape
    assert not dw.any()
    one = ak.linear_log_probs(x[0], weight, torch.tensor(3, dtype=torch.uint8), temperature=torch.tensor(2.0))
    assert one.shape == ()
    assert torch.equal(one, ak.linear_log_probs(x[:1], weight, torch.tensor([3]), temperature=2.0)[0])


@pytest.mark.parametrize("size", [2.0**-26, 2.0**-20, 1.0, 2.0**18, 2.0**60])
def test_gradients_of_any_size_in_fp16(size):
    x, weight, target, _ = problem(dtype=torch.float16, bias=False)
    x, weight = (t.detach().float().requires_grad_() for t in (x, weight))
    with torch.autocast("cpu", torch.float16):
        l, h = log_probs_of(x, weight, target)
    upstream = torch.full_like(l, size).masked_fill(target == -100, math.inf)  # of ignored rows: it counts for nothing
    grads = torch.autograd.grad((l, h), (x, weight), (upstream, torch.full_like(h, size / 8)))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    l, h = log_probs_of(*wide, target)
    for got, want in zip(grads, torch.autograd.grad(l.sum() + h.sum() / 8, wide), strict=True):
        assert ((got.double() / size - want).norm() / want.norm()).item() <= 2 * UNIT_ROUNDOFF[torch.float16]


def test_a_gradient_that_is_not_finite_reaches_the_scaler():
    x, weight, target, _ = problem(dtype=torch.float16)
    for bad in (math.inf, math.nan):
        upstream = torch.ones(23)
        upstream[1] = bad
        dw = torch.autograd.grad(ak.linear_log_probs(x, weight, target), weight, upstream)[0]
        assert not dw.isfinite().all()


def test_logits_beyond_fp16():
    """They were infinite, and the losses NaN (unsloth-zoo#598, trl#878); and 65,500 + 1 is another logit than 65,500."""
    x, weight = torch.full((1, 2), 256.0).half(), torch.tensor([[256.0, 255.0], [256.0, 255.0]]).half()
    x[0, 1] = 1.0
    bias, target = torch.tensor([0.0, 1.0]), torch.tensor([0])
    want = ak.linear_log_probs(x.double(), weight.double(), target, linear_bias=bias.double())
    torch.testing.assert_close(
        ak.linear_log_probs(x, weight, target, linear_bias=bias).double(), want, rtol=1e-4, atol=1e-4
    )
    loss = ak.linear_cross_entropy(x, weight, target, linear_bias=bias, logits_dtype=torch.float32)
    torch.testing.assert_close(-loss.double(), want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "weighted": True}, {"soft": True}], ids="".join
)
def test_cross_entropy_of_fp32_logits(dtype, reduction, options):
    """With every option; the loss is fp32 and as exact as fp32 logits make it."""
    x, weight, target, bias = problem(dtype=dtype)
    options = dict(options)
    if options.pop("weighted", False):
        options["weight"] = torch.linspace(0.5, 2, 37)
    if options.pop("soft", False):
        target = torch.randn(23, 37).softmax(1)

    def call(x, weight, bias, **more):
        loss = ak.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, **options, **more)
        return (loss,)

    upstream = torch.linspace(-1, 2, 23) if reduction == "none" else torch.tensor(0.5)
    kept = {"logits_dtype": torch.float32}
    (loss,), grads = derivatives(lambda *t: call(*t, chunk_size=9, **kept), (x, weight, bias), (upstream,))
    assert loss.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    if "weight" in options:
        options["weight"] = options["weight"].double()
    (want,), want_grads = derivatives(call, wide, (upstream.double(),))
    torch.testing.assert_close(loss.double(), want, rtol=2.0**-18, atol=2.0**-18)
    for got, expected in zip(grads, want_grads, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() <= 2 * max(UNIT_ROUNDOFF[dtype], 2.0**-21)


X, W, Y = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X, W[:, :2], Y), {}, ValueError, r"input has shape \[4, 3\] and linear_weight \[5, 2\]"),
        ((X, W, Y[:3]), {}, ValueError, r"target has shape \[3\]; accepted: \[4\]"),
        ((X, W, torch.zeros(4, 5)), {}, TypeError, "target has dtype float32; accepted: int64, uint8"),
        ((X, W, torch.tensor([0, 1, 5, 0])), {"chunk_size": 1}, ValueError, r"target\[2\] is 5; accepted: 0 to 4"),
        ((X, W, Y), {"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias has shape \[4\]; accepted: \[5\]"),
        ((X, W, Y), {"chunk_size": 0}, ValueError, "chunk_size is 0; accepted: a whole number from 1"),
        ((X.half(), W, Y), {}, TypeError, "input is float16"),
        ((X, W, Y), {"entropy": 1}, TypeError, "entropy is 1; accepted: True, False"),
        *(
            (
                (X, W, Y),
                {"temperature": bad},
                error,
                f"temperature is {bad!r}; accepted: a finite number above 0".replace("(", r"\("),
            )
            for bad, error in zip(
                (0, -1.0, math.nan, math.inf, True, "1", None), [ValueError] * 4 + [TypeError] * 3, strict=True
            )
        ),
        ((X, W, Y), {"temperature": torch.ones(3)}, ValueError, r"temperature has shape \[3\]; accepted: .* \[4\]"),
        ((X, W, Y), {"temperature": Y}, TypeError, "temperature has dtype int64"),
        ((X, W, Y), {"temperature": torch.ones(4, requires_grad=True)}, ValueError, "temperature requires a gradient"),
        ((X, W, Y), {"temperature": torch.ones((), device="meta")}, ValueError, "temperature is on meta"),
    ],
)
def test_bad_input(args, options, error, message):
    with pytest.raises(error, match=f"linear_log_probs: {message}"):
        ak.linear_log_probs(*args, **options)


def test_dtype_of_logits():
    with pytest.raises(
        TypeError, match=r"linear_cross_entropy: logits_dtype is torch.float16; accepted: None, torch.float32"
    ):
        ak.linear_cross_entropy(X, W, Y, logits_dtype=torch.float16)
