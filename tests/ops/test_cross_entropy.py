"""cross_entropy against torch's in float64, its odd cases, and the faults known of other fused losses."""

import math

import pytest
import torch
import torch.nn.functional as F

from amp_kernels._raw.cross_entropy_rows import op
from amp_kernels.ops.cross_entropy import cross_entropy

from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.generators import HALF_DTYPES
from ..helpers.poison import poisoned_allocations
from .targets import device_for

device = device_for(op)
DTYPES = [*HALF_DTYPES, torch.float32]


def problem(rows, classes, dtype, device="cpu", seed=0, spread=4.0, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, classes, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    if ignored:
        target[::3] = -100
    weight = torch.rand(classes, generator=generator).to(device) + 0.5
    return logits, target.to(device), weight


def reference(logits, target, weight=None, *, z_loss=0.0, reduction="mean", upstream=1.0, **options):
    """The loss in float64 and its gradient times ``upstream``."""
    x = logits.detach().double().requires_grad_()
    weight = None if weight is None else weight.double()
    target = target.double() if target.is_floating_point() else target
    loss = F.cross_entropy(x, target, weight, reduction="none", **options)
    counted = (
        torch.ones_like(loss) if target.is_floating_point() else (target != options.get("ignore_index", -100)).double()
    )
    row = counted if weight is None or target.is_floating_point() else counted * weight[target.clamp_min(0)]
    loss = loss + row * z_loss * x.logsumexp(1).square()
    if reduction != "none":
        loss = loss.sum() / (row.sum() if reduction == "mean" else 1)
    (loss * upstream).sum().backward()
    return loss.detach(), x.grad


def loss_error(logits, classes, weight=1.5):
    """Bound on the error of a row's loss in fp32: the roundings of logits relative to the largest, of the exponential's argument,
    of some ``classes / 64 + 40`` additions, and of the z-loss."""
    size = logits.detach().double().abs().amax().item() * 2 + math.log(classes) + 2
    return weight * size * (size + classes / 64 + 40) * 2.0**-23


def check(logits, target, weight=None, upstream=None, **options):
    fresh = logits.detach().clone().requires_grad_()
    with poisoned_allocations():
        with torch.autocast(logits.device.type, dtype=torch.bfloat16):
            loss = cross_entropy(fresh, target, weight, **options)
        upstream = torch.ones_like(loss) if upstream is None else upstream
        loss.backward(upstream)
    want, want_grad = reference(logits, target, weight, upstream=upstream.double(), **options)
    assert loss.dtype == torch.float32
    error = loss_error(logits, logits.shape[1])
    rows = logits.shape[0] if options.get("reduction") == "sum" else 1
    assert_within(loss.detach(), want, torch.full_like(want, rows * error), "loss")
    # Two roundings where the gradient is made in the forward; and p - y in fp32, whose parts are at most some 2.
    weights = (target != -100).sum().item() * 0.5 if target.ndim == 1 else logits.shape[0]  # at least
    scale = upstream.double().abs().amax().item() / (
        max(1, weights) if options.get("reduction", "mean") == "mean" else 1
    )
    u = UNIT_ROUNDOFF[logits.dtype]
    bound = 2.1 * u * want_grad.abs() + scale * error + 2 * TINY[logits.dtype] * max(1.0, scale)
    assert fresh.grad.dtype == logits.dtype
    assert_within(fresh.grad, want_grad, bound, "gradient")


KINDS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.15},
    "z_loss": {"z_loss": 1e-2},
    "everything": {"label_smoothing": 0.15, "z_loss": 1e-2},
    "soft": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", [*KINDS, "weighted"])
def test_every_option(device, dtype, reduction, kind):
    logits, target, weight = problem(7, 133, dtype, device)
    weight = weight if kind in ("weighted", "everything", "soft") else None
    target = torch.randn(7, 133, device=device).softmax(1) if kind == "soft" else target
    upstream = torch.linspace(-1, 2, 7, device=device) if reduction == "none" else torch.tensor(0.3, device=device)
    check(logits, target, weight, upstream, reduction=reduction, **KINDS.get(kind, {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 7, 8, 63, 64, 65, 1023, 1024, 1025, 2049, 5003])
def test_every_size(device, dtype, classes):
    logits, target, _ = problem(4, classes, dtype, device)
    check(logits, target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["smooth", "soft"])
def test_weights_of_many_classes(device, dtype, kind):
    """They rise, so that those of other classes would show in the sums."""
    logits, target, _ = problem(4, 2500, dtype, device)
    target = torch.randn(4, 2500, device=device).softmax(1) if kind == "soft" else target
    check(logits, target, torch.linspace(0.5, 1.5, 2500, device=device), **KINDS[kind])


def test_dimensions_after_the_classes(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 3, 4, generator=generator).to(device).requires_grad_()
    target = torch.randint(5, (2, 3, 4), generator=generator).to(device)
    for reduction in ("mean", "none"):
        loss = cross_entropy(logits, target, reduction=reduction)
        want = F.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, want)
        (got,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(got, torch.autograd.grad(want.sum(), logits)[0])
    soft = logits.detach().softmax(1)
    torch.testing.assert_close(
        cross_entropy(logits, soft, reduction="none"), F.cross_entropy(logits, soft, reduction="none")
    )
    one, y = logits[0, :, 0, 0], target[0, 0, 0]
    for t in (y, soft[0, :, 0, 0]):
        torch.testing.assert_close(cross_entropy(one, t), F.cross_entropy(one, t))
        torch.testing.assert_close(cross_entropy(one, t, reduction="none"), F.cross_entropy(one, t, reduction="none"))
    assert torch.equal(cross_entropy(logits, target.to(torch.uint8)), cross_entropy(logits, target))


ODD = {
    "all ignored": (torch.zeros(2, 3), torch.tensor([-100, -100]), {}),
    "empty batch": (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), {}),
    "a row of -inf": (torch.tensor([[-math.inf] * 3, [1.0, 2, 3]]), torch.tensor([0, 1]), {}),
    "target logit -inf": (torch.tensor([[-math.inf, 1, 2], [1.0, 2, 3]]), torch.tensor([0, 1]), {}),
    "other logit -inf": (torch.tensor([[1, -math.inf, 2], [1.0, 2, 3]]), torch.tensor([0, 1]), {}),
    "-inf first, in every thread": (torch.tensor([[-math.inf] * 90 + [1.0] * 3]), torch.tensor([91]), {}),
    "smoothing and -inf": (torch.tensor([[1, -math.inf, 2]]), torch.tensor([0]), {"label_smoothing": 0.1}),
    "inf": (torch.tensor([[1, math.inf, 2], [1.0, 2, 3]]), torch.tensor([0, 1]), {}),
    "NaN": (torch.tensor([[1, math.nan, 2], [1.0, 2, 3]]), torch.tensor([0, 1]), {}),
    "all equal": (torch.full((2, 5), 7.0), torch.tensor([0, 1]), {}),
    "huge": (torch.tensor([[3e38, -3e38, 0.0]]), torch.tensor([2]), {}),
    "tiny": (torch.tensor([[1e-45, -1e-45, 0.0]]), torch.tensor([2]), {}),
    "smoothing of one": (torch.tensor([[1.0, 2, 3]]), torch.tensor([2]), {"label_smoothing": 1.0}),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", ODD)
def test_odd_cases_are_torchs(device, case, reduction):
    logits, target, options = ODD[case]
    ours, torchs = (logits.clone().to(device).requires_grad_() for _ in range(2))
    got = cross_entropy(ours, target.to(device), reduction=reduction, **options)
    want = F.cross_entropy(torchs, target.to(device), reduction=reduction, **options)
    torch.testing.assert_close(got, want, equal_nan=True)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(ours.grad, torchs.grad, equal_nan=True)


def test_ignored_rows_count_for_nothing_whatever_they_hold(device):
    """torch lets -inf of an ignored row through (pytorch#11551)."""
    for dtype in DTYPES:
        for bad in (math.nan, math.inf, -math.inf):
            logits, target, weight = problem(6, 40, dtype, device)
            clean = logits.detach().clone()
            with torch.no_grad():
                logits[target == -100] = bad
                clean[target == -100] = 0
            loss = cross_entropy(logits, target, weight, label_smoothing=0.1, z_loss=0.1)
            loss.backward()
            assert torch.equal(loss, cross_entropy(clean, target, weight, label_smoothing=0.1, z_loss=0.1))
            assert not logits.grad[target == -100].any()
            assert logits.grad[target != -100].isfinite().all()


def test_any_ignore_index(device):
    """A class may be ignored, and one outside of the classes is never used as an index, nor for weights (QuACK)."""
    logits, target, weight = problem(6, 5, torch.float32, device, ignored=False)
    for index in (2, -1, 10**12):
        target = torch.where(torch.arange(6, device=device) % 2 == 0, index, target)
        got = cross_entropy(logits, target, weight, ignore_index=index)
        torch.testing.assert_close(got, F.cross_entropy(logits, target, weight, ignore_index=index))


def test_a_number_added_to_all_logits_changes_nothing(device):
    """If lse - x_t is formed of large numbers, 0.04859 becomes 0.0625."""
    logits = torch.tensor([[3.0, 0.0, -4.0]], device=device)
    target = torch.tensor([0], device=device)
    assert torch.equal(cross_entropy(logits, target), cross_entropy(logits + 2.0**20, target))
    for moved in (logits, logits + 2.0**20):
        x = moved.clone().requires_grad_()
        cross_entropy(x, target).backward()
        torch.testing.assert_close(x.grad, reference(logits, target)[1].float())


def test_confident_rows_keep_their_gradient(device):
    """p - y from a p that was rounded to bf16 is 100 % wrong at p = 0.999 (Liger-Kernel#1329)."""
    logits = torch.zeros(1, 3, device=device, dtype=torch.bfloat16)
    logits[0, 0] = 8.0
    logits.requires_grad_()
    target = torch.tensor([0], device=device)
    cross_entropy(logits, target).backward()
    want = reference(logits, target)[1]
    assert ((logits.grad.double() - want).abs() <= 2.0**-8 * want.abs()).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("upstream", [1.0, 2.0**-5, 0.3, 3.0])
def test_a_gradient_is_rounded_once_or_twice(device, dtype, upstream):
    """Twice where the forward has made it and the incoming gradient is no power of two: within 2 u + u^2, and not within u."""
    logits, target, _ = problem(33, 300, dtype, device, spread=1.0, ignored=False)
    factor = torch.tensor(upstream, device=device)

    def gradient(by, reduction="sum"):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = cross_entropy(logits, target, reduction=reduction)
        return torch.autograd.grad(loss, logits, by.expand(loss.shape))[0]

    got, rounded_once = gradient(factor), gradient(factor, "none")
    want = reference(logits, target, reduction="sum", upstream=upstream)[1]
    u = UNIT_ROUNDOFF[dtype]
    slack = 2.0**-16 * want.abs() + TINY[dtype]  # fp32: some 100 roundings of a softmax, and no cancellation
    assert_within(rounded_once, want, u * want.abs() + slack, "rounded once")
    twice = dtype != torch.float16 and upstream not in (1.0, 2.0**-5)
    assert_within(got, want, ((2 * u + u * u) if twice else u) * want.abs() + slack, "gradient")
    if twice:
        assert torch.equal(got, (gradient(torch.ones_like(factor)).float() * factor).to(dtype))
        assert ((got.double() - want).abs() > u * want.abs() + slack).any()
    else:
        assert torch.equal(got, rounded_once)


def test_dtype_of_the_loss(device):
    logits, target, _ = problem(4, 9, torch.bfloat16, device)
    loss = cross_entropy(logits, target)
    assert loss.dtype == torch.bfloat16
    with torch.autocast(device, dtype=torch.float16):
        fine = cross_entropy(logits, target)
        assert fine.dtype == torch.ops.amp_kernels.cross_entropy(logits, target).dtype == torch.float32
        assert cross_entropy(logits.double(), target).dtype == torch.float64
    assert torch.equal(loss, fine.bfloat16())


def test_fp16_gradients_under_a_loss_scale(device):
    """Made before the scale is known they would vanish: 2^-17 / 64 rows is below fp16's smallest number."""
    logits, target, _ = problem(64, 500, torch.float16, device, spread=8.0, ignored=False)
    check(logits, target, upstream=torch.tensor(2.0**15, device=device))
    loss = cross_entropy(logits, target, reduction="none").float().mean()
    (loss * 2.0**15).backward()
    want = reference(logits, target, upstream=2.0**15)[1]
    assert ((logits.grad != 0) == (want.abs() > 2.0**-25)).float().mean() > 0.999


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice(device, reduction):
    """With retain_graph, which fails elsewhere (quack#209)."""
    logits, target, _ = problem(4, 9, torch.bfloat16, device)
    loss = cross_entropy(logits, target, reduction=reduction).sum()
    upstream = torch.tensor(3.0, device=device).bfloat16()
    first, second, third = (
        torch.autograd.grad(loss, logits, upstream, retain_graph=again)[0].clone() for again in (True, True, False)
    )
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place(device, dtype, reduction):
    """On request only, with a version bump: others write gradients over logits that somebody still reads
    (Liger-Kernel#272, #1251, unsloth#5002)."""
    leaf, target, weight = problem(6, 70, dtype, device)
    outcomes, addresses = [], []
    for inplace in (False, True):
        logits = leaf * 1
        logits.retain_grad()
        logits.register_hook(lambda grad: addresses.append(grad.data_ptr()))
        before, version = logits.detach().clone(), logits._version
        loss = cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=0.1, inplace=inplace)
        loss.sum().backward()
        assert (logits._version > version) == inplace
        assert torch.equal(logits.detach(), before) != inplace
        assert (addresses[-1] == logits.data_ptr()) == inplace
        outcomes.append((loss.detach(), logits.grad.clone()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_in_place_over_something_that_backward_needs_is_an_error(device):
    x = torch.randn(4, 9, device=device, requires_grad=True)
    loss = cross_entropy(x.softmax(1), torch.zeros(4, dtype=torch.int64, device=device), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_gradient_nothing_of_the_size_of_the_logits_is_made():
    logits, target, _ = problem(64, 4096, torch.bfloat16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        cross_entropy(logits, target)
    assert max(event.self_cpu_memory_usage for event in profile.key_averages()) < logits.numel()


def test_float64_is_torchs_to_its_last_digits():
    logits, target, _ = problem(5, 7, torch.float64)
    weight = torch.rand(7, dtype=torch.float64) + 0.5
    for y in (target, torch.randn(5, 7, dtype=torch.float64).softmax(1)):
        got = cross_entropy(logits, y, weight, label_smoothing=0.1)
        want = F.cross_entropy(logits, y, weight, label_smoothing=0.1)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_tiny_gradients_of_float64():
    """No probability is lost to 1 - p or to fp32 (pytorch#195678): e^-700 is a number of fp64."""
    logits = torch.tensor([[0.0, -700.0, -40.0]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(cross_entropy(logits, torch.tensor([0])), logits)
    p = logits.detach().exp()
    torch.testing.assert_close(grad[0, 1:], p[0, 1:], rtol=1e-14, atol=0)


def test_gradcheck_and_second_derivatives_in_float64():
    logits, target, weight = problem(3, 5, torch.float64)
    soft = torch.randn(3, 5, dtype=torch.float64).softmax(1).requires_grad_()
    for t, inputs in ((target, (logits,)), (soft, (logits, soft))):

        def call(x, y=t):
            return cross_entropy(x, y, weight.double(), label_smoothing=0.1, z_loss=0.1)

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


def test_a_second_derivative_of_the_kernel_is_refused(device):
    logits, target, _ = problem(3, 5, torch.float32, device)
    for reduction in ("mean", "none"):
        loss = cross_entropy(logits, target, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(loss, logits, create_graph=True)


def test_transforms():
    logits, target, _ = problem(4, 5, torch.float32)
    want = torch.autograd.grad(F.cross_entropy(logits, target), logits)[0]
    torch.testing.assert_close(torch.func.grad(cross_entropy)(logits.detach(), target), want)
    batched = torch.func.vmap(cross_entropy)(torch.stack([logits, logits + 1]), torch.stack([target, target]))
    torch.testing.assert_close(batched, F.cross_entropy(logits, target).expand(2))
    torch.func.hessian(cross_entropy)(logits.detach(), target)
