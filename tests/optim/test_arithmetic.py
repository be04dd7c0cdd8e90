"""Arithmetic of the optimizers: the reference's updates, in float32, whatever the parameters are stored in."""

import pytest
import torch

import amp_kernels.optim as akopt

from .optimizers import (
    CASES,
    EACH,
    ELEMENTWISE,
    U,
    bf16,
    copies,
    distance,
    f16,
    f32,
    gradients,
    make,
    reference,
    run,
    weights,
)


def update_error(name, options, lr):
    """Bound on what a step's rounding errors move a weight by, in U, besides those of the weight itself.

    A moment with decay b is a sum of rounded terms whose errors fade with b, so its relative error is at most 3 U / (1 - b)
    for the second moment, and 3 U / (1 - b) times max|g| / rms(g) <= 8 for the first one, whose terms may cancel. Lion moves
    by a sign, and with these seeds none is in doubt. LAMB's move is lr |p| long, with 32 U of error, of which g - m takes most.
    """
    if name == "SGD":
        return lr * 64 * 4 * (3 / (1 - options.get("momentum", 0.0)) ** 2 + 8)
    if name == "Lion":
        return 0.0
    if name == "LAMB":
        return lr * 32 * 40
    if name == "Muon":  # a momentum at a tie of bfloat16 is rounded to its other neighbour
        return lr * 2.0**-8 / U
    b1, b2 = options.get("betas", (0.9, 0.999))
    return lr * 8 * (8 * 3 / (1 - b1) + 1.5 / (1 - b2) + 8)


@CASES
def test_thousand_steps_stay_within_the_rounding_bound_of_the_reference(name, options):
    """Bound, per step: the weight is rounded at most 3 times (3 U |p|), the update as above. Both sides err: factor 2."""
    steps, lr = 100 if name == "LAMB" else 1000, 1e-3  # LAMB written in torch's operations is slow
    ours = run(make(name, weights(), lr, **options), steps)
    theirs = run(reference(name, weights(), lr, **options), steps)
    exact = run(reference(name, copies(weights(), torch.float64), lr, **options), steps)
    largest = max(p.abs().max().item() for p in [*exact, *weights()] if p.numel()) + 1.0
    bound = 2 * steps * U * (3 * largest + update_error(name, options, lr))
    assert distance(ours, theirs) <= bound
    # Sharper: no further from the float64 result than the float32 reference is.
    assert distance(ours, exact) <= 3 * distance(theirs, exact) + 4 * U * largest or name == "Muon"
    # The bound means something: the weights moved.
    assert distance(exact, weights()) > 100 * bound or name in ("SGD", "Muon")


@CASES
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_16_bit_parameters_follow_a_float32_run_exactly(name, options, dtype):
    """With a master, a 16-bit parameter is at every step the rounded weight of the float32 run over the same gradients."""
    halves = weights(dtype)
    singles = copies(halves, f32)
    small, full = make(name, halves, **options), make(name, singles, **options)
    for grads in gradients(halves, 10):
        for p, q, g in zip(halves, singles, grads, strict=True):
            p.grad = g.to(dtype)
            q.grad = p.grad.float()
        small.step()
        full.step()
        for p, q in zip(halves, singles, strict=True):
            assert torch.equal(p, q.to(dtype))
            assert torch.equal(small.state[p]["master"], q)


@EACH
def test_split_master_of_bfloat16_is_the_float32_master_bit_for_bit(name):
    split, full = (make(name, weights(bf16), master_weights=mode) for mode in ("split", "fp32"))
    a, b = run(split, 50), run(full, 50)
    for x, y in zip(split.state_dict()["state"].values(), full.state_dict()["state"].values(), strict=True):
        assert torch.equal(x["master"], y["master"])
        assert "remainder" not in x
    for x, y in zip(a, b, strict=True):
        assert ((x - y).abs() <= y.abs() * 2.0**-7).all()  # they differ on ties only


@EACH
def test_split_master_of_float16_within_its_resolution(name):
    """One rounding to 2^-40 a step where the weight is below 2^-17, as half of these are, else none."""
    small = [torch.nn.Parameter(p.detach() * 2.0**-17) for p in weights(f16)]
    options = {"lr": 1e-9, "weight_decay": 0.0, "maximize": True}
    split, full = (make(name, copies(small), master_weights=mode, **options) for mode in ("split", "fp32"))
    run(split, 50)
    run(full, 50)
    masters = [[v["master"] for v in optimizer.state_dict()["state"].values()] for optimizer in (split, full)]
    assert 0 < distance(*masters) <= 50 * 2.0**-40
    assert distance(masters[1], small) > 50 * 2.0**-40


@EACH
@pytest.mark.parametrize("state_dtype", [f32, bf16])
def test_state_dtype(name, state_dtype):
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = make(name, weights(), 1e-3, state_dtype=state_dtype, **options)
    params, expected = run(optimizer, 30), run(make(name, weights(), 1e-3, **options), 30)
    moments = {v.dtype for values in optimizer.state_dict()["state"].values() for k, v in values.items() if k != "step"}
    assert moments == {state_dtype}
    gap = distance(params, expected)
    assert gap == 0 if state_dtype == f32 or name == "Lion" else 0 < gap < 0.01 * distance(expected, weights())


@EACH
def test_gradients_of_any_dtype(name):
    """Gradients of another dtype than their parameter are what bfloat16 autocast with a float32 main gradient produces."""
    for param_dtype in (f32, bf16):
        for grad_dtype in (f16, bf16, f32):
            ours, theirs = torch.nn.Parameter(torch.ones(9).to(param_dtype)), torch.nn.Parameter(torch.ones(9))
            grad = torch.linspace(-2, 2, 9).to(grad_dtype)
            ours.grad_dtype = None  # torch: accept a gradient of another dtype
            ours.grad, theirs.grad = grad, grad.float()
            make(name, [ours], 0.1).step()
            reference(name, [theirs], 0.1).step()
            torch.testing.assert_close(ours.float(), theirs.to(param_dtype).float(), rtol=1e-6, atol=1e-6)


GROUPS = {
    "Lion": [{"betas": (0.5, 0.5)}, {"weight_decay": 0.5}],
    "LAMB": [{"weight_decay": 0.1, "bias_correction": False}, {"use_nvlamb": True, "weight_decay": 0.0, "eps": 1e-2}],
    "SGD": [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.5, "nesterov": True}],
}


@ELEMENTWISE
def test_groups_have_their_own_hyper_parameters(name):
    """One call updates all groups: a mixed-up group index would give one group another's learning rate."""
    a, b, halves = weights(), weights(), weights(bf16, seed=5)
    first, second = GROUPS.get(name, [{"betas": (0.5, 0.5), "eps": 1e-2}, {"amsgrad": True, "maximize": True}])
    options = [{"lr": 1e-2, "weight_decay": 0.1, **first}, {"lr": 1e-3, "weight_decay": 0.0, **second}, {"lr": 5e-2}]
    members = [[a[:2], a[2:], halves], [b[:2], b[2:]]]
    mixed = make(name, [{"params": ps, **kw} for ps, kw in zip(members[0], options, strict=True)], weight_decay=0.0)
    separate = [make(name, ps, **kw) for ps, kw in zip(members[1], options, strict=False)]
    run(mixed, 10)
    for grads in gradients(a + halves, 10):
        for p, g in zip(b, grads[: len(b)], strict=True):
            p.grad = g
        for optimizer in separate:
            optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@EACH
@pytest.mark.parametrize("lr", [torch.tensor(1e-2), torch.tensor([1e-2]), torch.tensor(1e-2, dtype=torch.float64)])
def test_tensor_learning_rate(name, lr):
    lr = lr.clone()  # filled below
    optimizer = make(name, weights(), lr)
    params = run(optimizer, 5)
    assert distance(params, weights()) > 0
    assert distance(params, run(make(name, weights()), 5)) <= 2e-6  # float32 0.01 is not double 0.01
    lr.fill_(0.0)
    before = copies(params)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    assert distance(params, before) == 0  # read at the step, not at construction


def test_tensor_and_number_learning_rates_together():
    lists = []
    for lr in (torch.tensor(0.5), 0.5):
        params = weights()
        lists.append(run(akopt.SGD([{"params": params[:2], "lr": lr}, {"params": params[2:], "lr": 0.25}]), 3))
    assert distance(*lists) == 0


@ELEMENTWISE
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_max_grad_norm_is_clip_grad_norm(name, max_norm):
    a, b = weights(), weights()
    options = {} if name == "SGD" else {"betas": (0.5, 0.5)}
    options |= {"eps": 0.1} if "eps" in make(name, a).defaults else {}  # without it their steps know no length
    ours, theirs = make(name, a, max_grad_norm=max_norm, **options), reference(name, b, **options)
    for grads in gradients(a, 5):
        for p, q, g in zip(a, b, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        torch.nn.utils.clip_grad_norm_(b, max_norm)
        ours.step()
        theirs.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(a, grads, strict=True))  # only read
    assert distance(a, b) <= 1e-5


@EACH
def test_channels_last_and_transposed_parameters(name):
    """Elements are matched by memory order; state must have its parameter's strides."""
    base = [torch.randn(4, 3, 5, 5), torch.randn(6, 8)]
    ours = [torch.nn.Parameter(base[0].to(memory_format=torch.channels_last)), torch.nn.Parameter(base[1].t())]
    theirs = [torch.nn.Parameter(base[0].clone()), torch.nn.Parameter(base[1].t().contiguous())]
    kw = {"momentum": 0.9} if name == "SGD" else {}
    run(make(name, ours, **kw), 3)
    run(make(name, theirs, **kw), 3)
    assert distance(ours, theirs) <= (3e-2 * 2.0**-5 if name == "Muon" else 0)  # whose sums are in another order
