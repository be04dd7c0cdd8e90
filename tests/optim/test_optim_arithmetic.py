"""What the optimizers compute: torch's updates, in float32, whatever the parameters are stored in."""

import pytest
import torch

import amp_kernels.optim as akopt

U = 2.0**-24  # half a unit in the last place of 1.0, float32

ADAMW = [
    {},
    {"maximize": True},
    {"betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.3},
    {"weight_decay": 0.0},
    {"amsgrad": True},
]
ADAM = [
    {},
    {"weight_decay": 0.3},
    {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.95)},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
]
SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    {"weight_decay": 0.2, "maximize": True},
]
LION = [{}, {"weight_decay": 0.3, "maximize": True, "betas": (0.5, 0.75)}]
NAMES = ["AdamW", "Adam", "Lion", "SGD"]
CASES = [(name, kw) for name, options in (("AdamW", ADAMW), ("Adam", ADAM), ("SGD", SGD)) for kw in options]


def weights(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(33,), (7, 11), (), (0, 3), (2, 3, 4)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(params, steps, seed=1):
    """A sequence that does not depend on the parameters: differences are then rounding, not chaos. Sizes span 2^-6 to
    2^6."""
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.randint(-6, 7, p.shape, generator=generator).float().exp2() for p in params]
    for _ in range(steps):
        yield [(torch.randn(p.shape, generator=generator) + 0.3) * s for p, s in zip(params, scales, strict=True)]


def run(optimizer, params, steps, **kw):
    for grads in gradients(params, steps, **kw):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return params


def distance(a, b):
    return max(
        (x.detach().double() - y.detach().double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()
    )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_thousand_steps_stay_within_the_rounding_bound_of_torch(name, options):
    """Bound, per step: the weight is rounded at most 3 times (3 U |p|), the update carries the relative error of the
    moments.

    A moment with decay b is a sum of rounded terms whose errors fade with b, so its relative error is at most 3 U / (1
    - b) for the second moment, and 3 U / (1 - b) times max|g| / rms(g) <= 8 for the first one, whose terms may cancel.
      Both sides err: factor 2.
    """
    steps, lr = 1000, 1e-3
    kind, reference = getattr(akopt, name), getattr(torch.optim, name)
    ours, theirs = weights(), weights()
    run(kind(ours, lr=lr, **options), ours, steps)
    run(reference(theirs, lr=lr, **options), theirs, steps)
    exact = [torch.nn.Parameter(p.detach().double()) for p in weights()]
    run(reference(exact, lr=lr, **options), exact, steps)

    largest = max(p.abs().max().item() for p in exact if p.numel()) + 1.0
    if name != "SGD":
        b1, b2 = options.get("betas", (0.9, 0.999))
        update = lr * 8 * (8 * 3 / (1 - b1) + 1.5 / (1 - b2) + 8)
    else:
        update = lr * 64 * 4 * (3 / (1 - options.get("momentum", 0.0)) ** 2 + 8)
    bound = 2 * steps * U * (3 * largest + update)
    assert distance(ours, theirs) <= bound
    # Sharper: no further from the float64 result than torch's float32 is.
    assert distance(ours, exact) <= 3 * distance(theirs, exact) + 4 * U * largest
    assert distance(theirs, weights()) > 100 * bound or name == "SGD"  # the bound means something: the weights moved


@pytest.mark.parametrize(("name", "options"), CASES + [("Lion", kw) for kw in LION])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_a_float32_run_exactly(name, options, dtype):
    """With a master, a 16-bit parameter is at every step the rounded weight of the float32 run over the same
    gradients."""
    kind = getattr(akopt, name)
    halves = weights(dtype)
    singles = [torch.nn.Parameter(p.detach().float()) for p in halves]
    small, full = kind(halves, lr=1e-2, **options), kind(singles, lr=1e-2, **options)
    for grads in gradients(halves, 20):
        for p, q, g in zip(halves, singles, grads, strict=True):
            p.grad = g.to(dtype)
            q.grad = p.grad.float()
        small.step()
        full.step()
        for p, q in zip(halves, singles, strict=True):
            assert torch.equal(p, q.to(dtype))
            if p.numel():
                assert torch.equal(small.state[p]["master"], q)


@pytest.mark.parametrize("name", NAMES)
def test_split_master_of_bfloat16_is_the_float32_master_bit_for_bit(name):
    kind = getattr(akopt, name)
    a, b = weights(torch.bfloat16), weights(torch.bfloat16)
    split, full = kind(a, lr=1e-2, master_weights="split"), kind(b, lr=1e-2)
    run(split, a, 50)
    run(full, b, 50)
    for x, y in zip(split.state_dict()["state"].values(), full.state_dict()["state"].values(), strict=True):
        if x:
            assert torch.equal(x["master"], y["master"])
            assert "remainder" not in x
    assert all(
        ((x - y).abs() <= y.abs() * 2.0**-7).all() for x, y in zip(a, b, strict=True)
    )  # they differ on ties only


def test_split_master_of_float16_within_its_resolution():
    a, b = weights(torch.float16), weights(torch.float16)
    run(akopt.SGD(a, lr=1e-2, master_weights="split"), a, 1)
    run(akopt.SGD(b, lr=1e-2), b, 1)
    split, full = akopt.AdamW(a, lr=1e-2, master_weights="split"), akopt.AdamW(b, lr=1e-2)
    with torch.no_grad():
        for x, y in zip(a, b, strict=True):
            y.copy_(x)
    run(split, a, 50)
    run(full, b, 50)
    for p, q in zip(a, b, strict=True):
        if p.numel():
            # One rounding to 2^-40 a step where the weight is small, else none.
            x, y = split._exported(p, split.state[p])["master"], full.state[q]["master"]
            assert (x - y).abs().max() <= 50 * 2.0**-40


@pytest.mark.parametrize("name", NAMES)
def test_small_updates_are_not_lost(name):
    """The reason for a master: in bfloat16 a step of lr = 1e-4 on a weight of 1.0 rounds to nothing."""
    for mode in ("fp32", "split"):
        p = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        optimizer = getattr(akopt, name)([p], lr=1e-4, weight_decay=0.0, master_weights=mode)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert torch.allclose(p.float(), torch.tensor(0.99), atol=2e-3)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_dtype(state_dtype):
    params, reference = weights(), weights()
    optimizer = akopt.AdamW(params, lr=1e-2, state_dtype=state_dtype)
    run(optimizer, params, 30)
    run(akopt.AdamW(reference, lr=1e-2), reference, 30)
    assert optimizer.state[params[0]]["exp_avg"].dtype == optimizer.state[params[0]]["exp_avg_sq"].dtype == state_dtype
    gap = distance(params, reference)
    assert gap == 0 if state_dtype == torch.float32 else 0 < gap < 0.05 * 30 * 1e-2


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_gradients_of_any_dtype(name):
    """Gradients of another dtype than their parameter are what bfloat16 autocast with a float32 main gradient
    produces."""
    for param_dtype in (torch.float32, torch.bfloat16):
        for grad_dtype in (torch.float16, torch.bfloat16, torch.float32):
            ours, reference = torch.nn.Parameter(torch.ones(9).to(param_dtype)), torch.nn.Parameter(torch.ones(9))
            grad = torch.linspace(-2, 2, 9).to(grad_dtype)
            ours.grad_dtype = None  # torch: accept a gradient of another dtype
            ours.grad, reference.grad = grad, grad.float()
            getattr(akopt, name)([ours], lr=0.1).step()
            getattr(torch.optim, name)([reference], lr=0.1).step()
            torch.testing.assert_close(ours.float(), reference.to(param_dtype).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_their_own_hyper_parameters(name):
    """One call updates all groups: a mixed-up group index would give one group another's learning rate."""
    a, b = weights(), weights()
    halves = [torch.nn.Parameter(p.detach().bfloat16()) for p in weights(seed=5)]
    kw = [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0}, {"lr": 5e-2}]
    mixed = getattr(akopt, name)(
        [{"params": a[:2], **kw[0]}, {"params": a[2:], **kw[1]}, {"params": halves, **kw[2]}], weight_decay=0.0
    )
    run(mixed, a + halves, 10)
    separate = [
        getattr(akopt, name)(b[:2], **kw[0]),
        getattr(akopt, name)(b[2:], **kw[1]),
    ]
    for grads in gradients(a + halves, 10):
        for p, g in zip(b, grads[: len(b)], strict=True):
            p.grad = g
        for optimizer in separate:
            optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lr", [torch.tensor(1e-2), torch.tensor([1e-2]), torch.tensor(1e-2, dtype=torch.float64)])
def test_tensor_learning_rate(name, lr):
    lr = lr.clone()  # filled below
    a, b = weights(), weights()
    one = getattr(akopt, name)(a, lr=lr)
    two = getattr(akopt, name)(b, lr=0.01)
    run(one, a, 5)
    run(two, b, 5)
    assert distance(a, b) <= 1e-6  # float32 0.01 is not double 0.01
    lr.fill_(0.0)
    before = [p.detach().clone() for p in a]
    for group in one.param_groups:
        group["weight_decay"] = 0.0
    one.step()
    assert distance(a, before) == 0  # read at the step, not at construction


def test_tensor_and_number_learning_rates_together():
    a, b = weights(), weights()
    run(akopt.SGD([{"params": a[:2], "lr": torch.tensor(0.5)}, {"params": a[2:], "lr": 0.25}]), a, 3)
    run(akopt.SGD([{"params": b[:2], "lr": 0.5}, {"params": b[2:], "lr": 0.25}]), b, 3)
    assert distance(a, b) == 0


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_max_grad_norm_is_clip_grad_norm(name, max_norm):
    a, b = weights(), weights()
    ours = getattr(akopt, name)(a, lr=0.1, max_grad_norm=max_norm)
    theirs = getattr(torch.optim, name)(b, lr=0.1)
    for grads in gradients(a, 5):
        for p, q, g in zip(a, b, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        torch.nn.utils.clip_grad_norm_(b, max_norm)
        ours.step()
        theirs.step()
        for p, g in zip(a, grads, strict=True):
            assert torch.equal(p.grad, g)  # only read
    assert distance(a, b) <= 1e-5


def test_skip_nonfinite():
    for skip in (True, False):
        params = weights()
        optimizer = akopt.AdamW(params, lr=0.1, skip_nonfinite=skip)
        run(optimizer, params, 1)
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
        params[1].grad[2, 3] = torch.nan
        optimizer.step()
        assert (distance(params[:1], before[:1]) == 0) == skip
        assert params[1].isfinite().all().item() == skip
        assert optimizer.state[params[0]]["step"].item() == (1 if skip else 2)


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_and_transposed_parameters(name):
    """Elements are matched by memory order; state must have its parameter's strides."""
    base = [torch.randn(4, 3, 5, 5), torch.randn(6, 8)]
    ours = [torch.nn.Parameter(base[0].to(memory_format=torch.channels_last)), torch.nn.Parameter(base[1].t())]
    theirs = [torch.nn.Parameter(base[0].clone()), torch.nn.Parameter(base[1].t().contiguous())]
    kw = {"momentum": 0.9} if name == "SGD" else {}
    run(getattr(akopt, name)(ours, lr=0.1, **kw), ours, 3)
    optimizer = getattr(akopt, name)(theirs, lr=0.1, **kw)
    run(optimizer, theirs, 3)
    assert distance(ours, theirs) == 0


def test_gradient_with_other_strides_is_copied(caplog):
    a, b = torch.nn.Parameter(torch.ones(6, 8)), torch.nn.Parameter(torch.ones(6, 8))
    grad = torch.randn(8, 6).t()
    optimizer = akopt.SGD([a], lr=0.1)
    a.grad, b.grad = grad, grad.contiguous()
    with caplog.at_level("WARNING", logger="amp_kernels"):
        optimizer.step()
        optimizer.step()
    torch.optim.SGD([b], lr=0.1).step()
    torch.optim.SGD([b], lr=0.1).step()
    assert torch.allclose(a, b)
    assert len(caplog.records) == 1


def test_stride_of_a_size_one_dimension_does_not_matter(caplog):
    p = torch.nn.Parameter(torch.ones(4, 1, 3))
    p.grad = torch.ones(4 * 3).as_strided((4, 1, 3), (3, 77, 1))
    akopt.SGD([p], lr=0.5).step()
    assert torch.equal(p, torch.full((4, 1, 3), 0.5))
    assert not caplog.records


def test_backends_train_alike():
    """The torch reference and the compiled kernels, through whole runs with scaler, clipping, masters and shadows."""
    import amp_kernels as ak
    from amp_kernels.amp import GradScaler

    results = []
    for backend in ("cpu", "reference"):
        with ak.backend(backend):
            params = [*weights(), *weights(torch.bfloat16, 1), *weights(torch.float16, 2)]
            optimizers = [
                akopt.AdamW(params[:10], lr=1e-2, shadow_dtype=torch.float16),
                akopt.SGD(params[10:], lr=1e-2, momentum=0.9, nesterov=True, master_weights="split"),
            ]
            scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
            scaler.scale(torch.ones(()))
            for i, grads in enumerate(gradients(params, 12)):
                for p, g in zip(params, grads, strict=True):
                    p.grad = (g if i % 5 else g * torch.inf).to(p.dtype)
                for optimizer in optimizers:
                    scaler.step(optimizer, max_norm=50.0)
                scaler.update()
            results.append((params, scaler.state_dict()))
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-2, atol=1e-6)


def test_parameters_on_several_devices():
    """One pass per device; the meta device stands for a second one."""
    a, b = weights(), weights()
    away = [torch.nn.Parameter(torch.ones(5, device="meta"))]
    mixed, alone = akopt.AdamW(a[:2] + away + a[2:], lr=0.1), akopt.AdamW(b, lr=0.1)
    for grads in gradients(a, 3):
        for p, q, g in zip(a, b, grads, strict=True):
            p.grad = q.grad = g
        away[0].grad = torch.ones(5, device="meta")
        mixed.step()
        alone.step()
    assert distance(a, b) == 0
    assert mixed.state[away[0]]["exp_avg"].is_meta
