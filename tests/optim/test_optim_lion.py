"""Lion, which torch does not have: against the published update, and the signature and checkpoints that users expect."""

import copy
import inspect

import pytest
import torch

import amp_kernels as ak

U = 2.0**-24
SHAPES = [(33,), (7, 11), (), (0, 3), (2, 3, 4)]


class PublishedLion(torch.optim.Optimizer):
    """The authors' code, https://github.com/google/automl/tree/master/lion, with its state and group keys."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


def weights(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def run(optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.1).to(p.dtype)
        optimizer.step()
    return params


def distance(a, b):
    return max(
        (x.detach().double() - y.detach().double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()
    )


def test_signature():
    ours, adamw = (inspect.signature(kind).parameters for kind in (ak.optim.Lion, ak.optim.AdamW))
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        *inspect.signature(PublishedLion).parameters
    ]
    assert [ours[name].default for name in ("lr", "betas", "weight_decay")] == [1e-4, (0.9, 0.99), 0.0]
    assert ours.keys() == adamw.keys() - {"eps", "amsgrad"}
    assert all(ours[name].default == adamw[name].default for name in ours if ours[name].kind is inspect._KEYWORD_ONLY)
    keys = ak.optim.AdamW(weights()).param_groups[0].keys() - {"eps", "amsgrad", "decoupled_weight_decay"}
    assert ak.optim.Lion(weights()).param_groups[0].keys() == keys


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.3}, {"betas": (0.5, 0.75), "weight_decay": 0.1}, {"betas": (0.0, 0.0)}]
)
def test_thousand_steps_of_the_published_update(options):
    """The gradients do not depend on the weights, so that neither run turns a sign (the seed has no direction in doubt)
    and only the roundings of a weight are left: three a step."""
    ours, theirs = weights(), weights()
    exact = [torch.nn.Parameter(p.detach().double()) for p in weights()]
    run(ak.optim.Lion(ours, lr=1e-3, **options), 1000)
    run(PublishedLion(theirs, lr=1e-3, **options), 1000)
    run(PublishedLion(exact, lr=1e-3, **options), 1000)
    bound = 3 * 1000 * U * (max(p.abs().max().item() for p in exact if p.numel()) + 1)
    assert distance(ours, exact) <= bound
    assert distance(theirs, exact) <= bound
    assert distance(exact, weights()) > 100 * bound


def test_maximize_is_the_other_direction():
    a, b = weights(), weights()
    one = ak.optim.Lion(a, lr=1e-2, maximize=True)
    two = ak.optim.Lion(b, lr=1e-2)
    for value in (1.0, -3.0, 0.5):
        for p, q in zip(a, b, strict=True):
            p.grad, q.grad = torch.full_like(p, value), torch.full_like(q, -value)
        one.step()
        two.step()
    assert distance(a, b) == 0


def test_checkpoints_of_the_authors_code_load_and_ours_load_there():
    theirs = PublishedLion(weights(), lr=1e-2, weight_decay=0.1)
    run(theirs, 5)
    ours = ak.optim.Lion([torch.nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    state = ours.state_dict()["state"]
    for key, values in theirs.state_dict()["state"].items():
        assert state[key].keys() == values.keys() == {"exp_avg"}
        assert torch.equal(state[key]["exp_avg"], values["exp_avg"])
    again = PublishedLion([torch.nn.Parameter(p.detach().clone()) for p in ours.param_groups[0]["params"]])
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    results = [run(optimizer, 5, seed=2) for optimizer in (theirs, ours, again)]
    assert distance(results[0], results[1]) <= 15 * U * 4
    assert distance(results[0], results[2]) == 0


def test_a_checkpoint_without_the_moment_is_refused():
    ours = ak.optim.Lion(weights(), lr=1e-2)
    run(ours, 1)
    bad = copy.deepcopy(ours.state_dict())
    bad["state"][1] = {"momentum": bad["state"][1]["exp_avg"]}
    with pytest.raises(ValueError, match="lacks 'exp_avg'"):
        ours.load_state_dict(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_a_skipped_step_changes_no_bit(dtype, mode):
    params = weights(dtype)
    options = {"master_weights": mode, "shadow_dtype": torch.float16, "weight_decay": 0.1}
    optimizer = ak.optim.Lion(params, lr=1e-2, skip_nonfinite=True, **options)
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


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ak.GradScaler])
def test_scalers_drive_it_over_an_overflow(kind):
    p, q = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    ours, theirs = ak.optim.Lion([p], lr=2.0**-6), PublishedLion([q], lr=2.0**-6)
    scaler = kind("cpu", init_scale=2.0**10)
    for factor in (1.0, float("inf"), -3.0):
        ours.zero_grad()
        scaler.scale((p * torch.arange(4.0) * factor).nan_to_num(posinf=torch.inf).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if factor != float("inf"):
            q.grad = torch.arange(4.0) * factor
            theirs.step()
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(p, q)
