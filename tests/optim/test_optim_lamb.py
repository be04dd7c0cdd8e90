"""LAMB, which torch does not have: against the published update in float64, and the signature and checkpoints of Apex' FusedLAMB."""

import copy
import inspect
import math

import pytest
import torch

import amp_kernels as ak

U = 2.0**-24
SHAPES = [(33,), (7, 11), (), (0, 3), (2, 3, 4)]


class PublishedLAMB(torch.optim.Optimizer):
    """You et al., ICLR 2020, algorithm 2 with the identity as scaling function and with bias correction; the state, group
    keys and rules of Apex' FusedLAMB, which counts steps once for a group."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        use_nvlamb=False,
        max_grad_norm=0.0,
    ):
        self.use_nvlamb = use_nvlamb
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": True,
                "max_grad_norm": max_grad_norm,
            },
        )

    @torch.no_grad()
    def step(self):
        limit = self.param_groups[0]["max_grad_norm"]
        if limit:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], limit)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                if group["bias_correction"]:
                    m, v = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = 1.0
                if (group["weight_decay"] or self.use_nvlamb) and p.norm() > 0 and u.norm() > 0:
                    ratio = p.norm() / u.norm()
                p.sub_(group["lr"] * ratio * u)


def weights(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def in_double():
    return [torch.nn.Parameter(p.detach().double()) for p in weights()]


def run(optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = (
                (torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.1).to(torch.float32).to(p.dtype)
            )
        optimizer.step()
    return params


def distance(a, b):
    return max(
        (x.detach().double() - y.detach().double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()
    )


def test_signature():
    """Names, order and defaults of Apex' FusedLAMB, as far as both have them."""
    ours, adamw = (inspect.signature(kind).parameters for kind in (ak.optim.LAMB, ak.optim.AdamW))
    positional = {name: p.default for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert [*positional] == ["params", "lr", "bias_correction", "betas", "eps", "weight_decay"]
    assert [*positional.values()][1:] == [1e-3, True, (0.9, 0.999), 1e-6, 0.01]
    assert ours["use_nvlamb"].default is False
    assert ours.keys() - {"bias_correction", "use_nvlamb"} == adamw.keys() - {"amsgrad"}
    shared = [name for name in ours if ours[name].kind is inspect._KEYWORD_ONLY and name in adamw]
    assert all(ours[name].default == adamw[name].default for name in shared)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "learning rate"),
        ({"lr": math.nan}, ValueError, "learning rate"),
        ({"eps": -1e-8}, ValueError, "epsilon"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"betas": (1.0, 0.9)}, ValueError, "beta"),
        ({"betas": (0.9, -0.1)}, ValueError, "beta"),
        ({"eps": torch.tensor(1e-6)}, ValueError, "eps is a tensor"),
        ({"weight_decay": torch.tensor(0.1)}, ValueError, "weight_decay is a tensor"),
        ({"differentiable": True}, RuntimeError, "differentiable"),
        ({"fused": True, "foreach": True}, RuntimeError, "foreach"),
        ({"master_weights": "half"}, ValueError, "master_weights"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ak.optim.LAMB(weights(), **options)


RUNS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"weight_decay": 0.3, "betas": (0.5, 0.75), "eps": 1e-3},
    {"bias_correction": False, "weight_decay": 0.1},
]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_hundred_steps_of_the_published_update(options):
    """What a step adds of error: three roundings of a weight, and 32 u of a move of lr |p|, of which g - m takes most."""
    ours, exact = weights(), in_double()
    run(ak.optim.LAMB(ours, lr=1e-2, **options), 100)
    run(PublishedLAMB(exact, lr=1e-2, **options), 100)
    largest = max(p.abs().max().item() for p in [*exact, *weights()] if p.numel())
    bound = 100 * (3 * U * largest + 32 * U * 1e-2 * max(1.0, largest * 10))
    assert distance(ours, exact) <= bound
    assert distance(exact, weights()) > 100 * bound


@pytest.mark.parametrize("options", [{"use_nvlamb": True}, {"bias_correction": False}, {"eps": 0.1}], ids=str)
def test_every_option_counts(options):
    plain, other = weights(), weights()
    run(ak.optim.LAMB(plain, lr=1e-2, weight_decay=0.0), 3)
    run(ak.optim.LAMB(other, lr=1e-2, weight_decay=0.0, **options), 3)
    assert distance(plain, other) > 1e-4


def test_groups_have_their_own_options():
    together, options = weights(), [{"weight_decay": 0.0}, {"weight_decay": 0.1, "bias_correction": False}]
    options += [{"use_nvlamb": True, "weight_decay": 0.0, "lr": 0.1}, {}, {"betas": (0.5, 0.5), "eps": 1e-2}]
    run(ak.optim.LAMB([{"params": [p], **o} for p, o in zip(together, options, strict=True)], lr=1e-2), 3)
    exact = in_double()
    for p, q, option in zip(together, exact, options, strict=True):
        optimizer = PublishedLAMB([q], **{"lr": 1e-2, **option})
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for shape, mine in zip(SHAPES, together, strict=True):
                grad = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.1
                if mine is p:
                    q.grad = grad.float().double()
            optimizer.step()
    assert distance(together, exact) <= 3 * 200 * U


def test_maximize_is_the_other_direction():
    a, b = weights(), weights()
    one, two = ak.optim.LAMB(a, lr=1e-2, maximize=True), ak.optim.LAMB(b, lr=1e-2)
    for value in (1.0, -3.0, 0.5):
        for p, q in zip(a, b, strict=True):
            p.grad, q.grad = torch.full_like(p, value), torch.full_like(q, -value)
        one.step()
        two.step()
    assert distance(a, b) == 0


def test_lr_as_a_tensor_is_read_at_each_step():
    ours, exact = weights(), in_double()
    lr = torch.tensor(0.5)
    mine, theirs = ak.optim.LAMB(ours, lr=lr), PublishedLAMB(exact)
    for step in range(3):
        lr.fill_(2.0 ** -(step + 5))
        theirs.param_groups[0]["lr"] = 2.0 ** -(step + 5)
        run(mine, 1, seed=step)
        run(theirs, 1, seed=step)
    assert distance(ours, exact) <= 3 * 100 * U
    assert distance(ours, weights()) > 1e-2


# ---- checkpoints ----


def test_state_dict_round_trip_continues_bit_for_bit():
    first = weights()
    options = {"lr": 1e-2, "weight_decay": 0.1, "use_nvlamb": True, "bias_correction": False, "ema_decay": 0.9}
    optimizer = ak.optim.LAMB(first, **options)
    run(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    other = ak.optim.LAMB(second)
    other.load_state_dict(copy.deepcopy(saved))
    assert other.param_groups[0]["use_nvlamb"] is True
    assert other.param_groups[0]["bias_correction"] is False
    run(optimizer, 3, seed=2)
    run(other, 3, seed=2)
    assert distance(first, second) == 0
    for values, again in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert values.keys() == again.keys() == {"step", "exp_avg", "exp_avg_sq", "ema"}
        assert all(torch.equal(values[key], again[key]) for key in values)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_checkpoints_of_apex_load(max_grad_norm):
    """Its count is the group's; the corrections of the next step depend on it. So is the norm that it clips to, where 0
    is none. The checkpoint stays as it was."""
    theirs = PublishedLAMB(in_double(), lr=1e-2, weight_decay=0.0, eps=0.1, max_grad_norm=max_grad_norm)
    run(theirs, 5)
    params = [torch.nn.Parameter(p.detach().float()) for p in theirs.param_groups[0]["params"]]
    saved = copy.deepcopy(theirs.state_dict())
    ours = ak.optim.LAMB(params)
    ours.load_state_dict(saved)
    assert saved["param_groups"][0]["step"] == 5
    assert all(values.keys() == {"exp_avg", "exp_avg_sq"} for values in saved["state"].values())
    group = ours.param_groups[0]
    assert not {"step", "max_grad_norm"} & group.keys()
    assert ours.max_grad_norm == (max_grad_norm or None)
    assert (group["lr"], group["weight_decay"], group["use_nvlamb"], group["maximize"]) == (1e-2, 0.0, False, False)
    assert all(values["step"] == 5 for values in ours.state_dict()["state"].values())
    moved = [p.detach().clone() for p in params]
    results = [run(optimizer, 5, seed=2) for optimizer in (theirs, ours)]
    assert distance(*results) <= 5 * 20 * U
    assert distance(moved, params) > 1e-2


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq"])
def test_a_checkpoint_without_a_moment_is_refused(lost):
    ours = ak.optim.LAMB(weights(), lr=1e-2)
    run(ours, 1)
    bad = copy.deepcopy(ours.state_dict())
    del bad["state"][1][lost]
    with pytest.raises(ValueError, match=f"lacks '{lost}'"):
        ours.load_state_dict(bad)


# ---- masters, averages, skips, scalers ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_masters_follow_float64(dtype, mode):
    """The gradients are 16-bit numbers, the weights behind the parameters are not rounded to 16 bits."""
    params = weights(dtype)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer = ak.optim.LAMB(params, lr=1e-2, master_weights=mode)
    theirs = PublishedLAMB(exact, lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        for p, q in zip(params, exact, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.double()
        optimizer.step()
        theirs.step()
    masters = [values["master"] for values in optimizer.state_dict()["state"].values()]
    bound = 20 * (3 * U * 4 + 32 * U * 0.4) + (20 * 2.0**-41 if mode == "split" else 0)
    assert distance(masters, exact) <= bound
    assert distance(params, masters) <= 4 * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-11)


def test_moments_in_bfloat16():
    """A step of lr |p| whatever the moments have lost: the norm is of the direction that is taken."""
    params = weights()
    optimizer = ak.optim.LAMB(params, lr=1e-2, state_dtype=torch.bfloat16)
    for seed in range(3):
        before = [p.detach().double().clone() for p in params]
        run(optimizer, 1, seed=seed)
        for p, old in zip(params, before, strict=True):
            assert (p.detach().double() - old).norm().item() == pytest.approx(1e-2 * old.norm().item(), rel=1e-5)
    assert {v["exp_avg"].dtype for v in optimizer.state_dict()["state"].values()} == {torch.bfloat16}


def test_average_of_the_weights():
    params = weights()
    optimizer = ak.optim.LAMB(params, lr=1e-1, ema_decay=0.75)
    average = [p.detach().double().clone() for p in params]
    for seed in range(4):
        run(optimizer, 1, seed=seed)
        average = [a + 0.25 * (p.detach().double() - a) for a, p in zip(average, params, strict=True)]
    kept = [values["ema"] for values in optimizer.state_dict()["state"].values()]
    assert distance(kept, average) <= 4 * 4 * 4 * U
    assert distance(kept, params) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["fp32", "split", "none"])
def test_a_skipped_step_changes_no_bit(dtype, mode):
    params = weights(dtype)
    options = {"master_weights": mode, "shadow_dtype": torch.float16, "ema_decay": 0.9}
    optimizer = ak.optim.LAMB(params, lr=1e-2, skip_nonfinite=True, **options)
    run(optimizer, 3)
    before = copy.deepcopy([optimizer.state_dict(), [p.detach() for p in params]])
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[2, 3] = torch.inf
    optimizer.step()
    for p, old in zip(params, before[1], strict=True):
        assert torch.equal(p, old)
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[0]["state"][key][name]) for name, value in values.items())
    run(optimizer, 1)
    assert distance(params, before[1]) > 0


def test_clipping_is_part_of_the_step():
    """The moments are of clipped gradients. Their common factor is no matter to the weights, but for eps."""
    params, exact = weights(), in_double()
    optimizer, theirs = (
        ak.optim.LAMB(params, lr=1e-2, eps=0.1, max_grad_norm=0.5),
        PublishedLAMB(exact, lr=1e-2, eps=0.1),
    )
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        for p, q in zip(params, exact, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.double()
        torch.nn.utils.clip_grad_norm_(exact, 0.5)
        optimizer.step()
        theirs.step()
    assert distance(params, exact) <= 3 * 200 * U


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ak.GradScaler])
def test_scalers_drive_it_over_an_overflow(kind):
    p = torch.nn.Parameter(torch.arange(1.0, 5.0))
    q = torch.nn.Parameter(p.detach().double().clone())
    ours, theirs = ak.optim.LAMB([p], lr=2.0**-6), PublishedLAMB([q], lr=2.0**-6)
    scaler = kind("cpu", init_scale=2.0**10)
    for factor in (1.0, float("inf"), -3.0):
        ours.zero_grad()
        scaler.scale((p * torch.arange(4.0) * factor).nan_to_num(posinf=torch.inf).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if factor != float("inf"):
            q.grad = torch.arange(4.0).double() * factor
            theirs.step()
    assert scaler.get_scale() == 2.0**9
    assert distance([p], [q]) <= 20 * U
    assert ours.state_dict()["state"][0]["step"] == 2
