"""``cautious`` and ``decouple_lr``: updates as published, values that groups and checkpoints hold, and optimizers without them."""

import copy

import pytest
import torch

import amp_kernels.optim as akopt

from .optimizers import checkpoint, copies, gradients, make, params_of, reference, run, weights

CAUTIOUS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Lion", {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), CAUTIOUS)
def test_a_cautious_update_is_the_usual_one_where_signs_agree(name, options):
    """Liang et al., 2024, without the rescaling: elsewhere a weight only decays."""
    usual, cautious = make(name, weights(), **options), make(name, weights(), **options, cautious=True)
    sign = -1.0 if options.get("maximize") else 1.0
    waited = 0
    for grads in gradients(params_of(usual), 4):
        before = [p.detach().clone() for p in params_of(usual)]
        for p, q, start, grad in zip(params_of(usual), params_of(cautious), before, grads, strict=True):
            q.data.copy_(start)
            p.grad, q.grad = grad.clone(), grad.clone()
        states = [copy.deepcopy(dict(usual.state[p].items())) if usual.state else {} for p in params_of(usual)]
        for optimizer in (usual, cautious):
            optimizer.step()
        decays = name in ("AdamW", "Lion")
        decay = 1 - 1e-2 * usual.param_groups[0]["weight_decay"] * decays
        for p, q, start, grad, state in zip(params_of(usual), params_of(cautious), before, grads, states, strict=True):
            grad = sign * grad + (options["weight_decay"] * start if name == "Adam" else 0.0)
            direction = usual.state[p].get("exp_avg", usual.state[p].get("momentum_buffer"))
            if name == "Lion":
                direction = 0.5 * (state["exp_avg"] if state else 0.0) + 0.5 * grad
            if options.get("nesterov"):
                direction = grad + 0.9 * direction
            moves = direction * grad > 0
            near = (direction * grad).abs() < 1e-6  # rounding may turn a sign
            assert torch.where(moves | near, True, (q - start * decay).abs() <= 1e-6 * start.abs()).all()
            assert torch.where(~moves | near, True, q == p).all()
            waited += int((~moves & ~near).sum())
            assert all(
                torch.equal(a, b) for a, b in zip(usual.state[p].values(), cautious.state[q].values(), strict=True)
            )
    assert waited >= 20


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon"])
def test_decay_follows_the_schedule_and_not_the_rate(name):
    """With a gradient of 0 and another rate: weights shrink by ``weight_decay * lr / initial_lr``."""
    for lr in (1e-3, 0.5):
        params = [torch.nn.Parameter(torch.full((4, 4), 2.0))]
        optimizer = make(name, params, lr, weight_decay=0.25, decouple_lr=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        expected = 2.0
        for step in range(3):
            params[0].grad = torch.zeros(4, 4)
            optimizer.step()
            expected *= 1 - 0.25 * 0.5**step
            # Another object: packed anew, with the rate of now.
            optimizer.param_groups[0]["weight_decay"] = float("0.25")
            assert torch.allclose(params[0], torch.tensor(expected), rtol=1e-6)
            schedule.step()
        assert optimizer.param_groups[0]["initial_lr"] == lr


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_rate_on_the_device_and_a_new_group(rate):
    first, second = (torch.nn.Parameter(torch.full((4,), 2.0)) for _ in range(2))
    optimizer = akopt.AdamW([first], lr=rate, weight_decay=0.25, decouple_lr=True)
    optimizer.add_param_group({"params": [second], "lr": 0.01, "decouple_lr": False})
    for p in (first, second):
        p.grad = torch.zeros(4)
    optimizer.step()
    assert torch.allclose(first, torch.tensor(2.0 * 0.75))
    assert torch.allclose(second, torch.tensor(2.0 * (1 - 0.01 * 0.25)))
    assert "initial_lr" not in optimizer.param_groups[1]


def test_checkpoints_hold_what_is_on_and_torchs_lack_it():
    optimizer = akopt.AdamW(weights(), cautious=True, decouple_lr=True)
    run(optimizer, 2)
    assert {"cautious", "decouple_lr", "initial_lr"} <= optimizer.param_groups[0].keys()
    plain = akopt.AdamW(copies(params_of(optimizer)))
    assert not {"cautious", "decouple_lr"} & plain.param_groups[0].keys()
    plain.load_state_dict(checkpoint(optimizer))
    assert plain.param_groups[0]["cautious"] is True
    for a, b in zip(run(optimizer, 2, seed=2), run(plain, 2, seed=2), strict=True):
        assert torch.equal(a, b)
    theirs = reference("AdamW", copies(params_of(optimizer)))
    run(theirs, 1)
    optimizer.load_state_dict(checkpoint(theirs))
    group = optimizer.param_groups[0]
    assert (group["cautious"], group["decouple_lr"], group["initial_lr"]) == (True, True, 1e-2)
    assert copy.deepcopy(optimizer).param_groups[0]["cautious"] is True


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LAMB", {"cautious": True}, "LAMB: cautious is True; accepted: False"),
        ("SGD", {"decouple_lr": True}, "SGD: decouple_lr is True; accepted: False"),
        ("Adam", {"decouple_lr": True}, "decouple_lr is True; accepted with decoupled_weight_decay=False: False"),
        ("AdamW", {"decouple_lr": True, "lr": 0.0}, "the first learning rate, is 0.0; accepted: a number above 0"),
        ("AdamW", {"Cautious": True}, r"the key 'Cautious', which is no option; accepted: cautious \(in a group\)"),
    ],
)
def test_groups_that_are_refused(name, options, message):
    optimizer = getattr(akopt, name)(weights())
    group = {"params": [torch.nn.Parameter(torch.ones(3))], **options}
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
