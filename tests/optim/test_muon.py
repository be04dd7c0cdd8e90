"""Muon: torch.optim.Muon's contract, AdamW's groups, and what a step must not do."""

import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels._updates.muon import muon_
from amp_kernels._updates.state import MAXIMIZE, STOCHASTIC
from amp_kernels.optim import AdamW, Muon

from .optimizers import bf16, checkpoint, f16, f32, same

SHAPES = [(64, 96), (96, 64), (64, 96), (33, 17), (16, 12), (48, 48)]
A, B, C = 3.4445, -4.775, 2.0315


def parameter(*shape, seed=0, dtype=f32):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def parameters(shapes=SHAPES, dtype=f32):
    return [parameter(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def steps(optimizer, params, count, scale=1.0):
    for seed in range(count):
        set_grads(params, seed, scale)
        optimizer.step()
    return params


def trained(shapes=SHAPES, count=3, dtype=f32, groups=None, **options):
    """The parameters after some steps of an optimizer with these options, and the optimizer."""
    params = parameters(shapes, dtype)
    optimizer = Muon(params if groups is None else groups(params), lr=0.02, **options)
    return steps(optimizer, params, count), optimizer


def same_bits(a, b):
    return all(map(torch.equal, a, b))


def exact_newton_schulz(u, count=5):
    x = u.double() / u.double().norm()
    for _ in range(count):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


# ---- torch's contract ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.3},
        {"adjust_lr_fn": "original", "momentum": 0.0, "weight_decay": 0.5},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
)
def test_twenty_steps_against_torch(options):
    """Both round iterates to 16 bits: the weights stay within 1.5e-2 of the way that they travel. The momentum is exact."""
    ours, theirs, start = parameters(), parameters(), parameters()
    a, b = Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    steps(a, ours, 20)
    steps(b, theirs, 20)
    for p, q, s in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() <= 1.5e-2 * (q - s).norm()
        assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_in_float64(nesterov, scale):
    """The orthogonalized momentum within 4e-2 (Frobenius) of float64's, whatever the size of the gradients: products of bfloat16
    err by up to 3e-2, of float16 by a fifth of it."""
    lr, decay, momentum = 0.5, 0.1, 0.9
    p = parameter(48, 80)
    optimizer = Muon([p], lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov, eps=0.0)
    buffer = torch.zeros(48, 80, dtype=torch.float64)
    for seed in range(3):
        before = p.detach().double()
        set_grads([p], seed, scale)
        optimizer.step()
        grad = p.grad.double()
        buffer = momentum * buffer + (1 - momentum) * grad
        wanted = exact_newton_schulz(momentum * buffer + (1 - momentum) * grad if nesterov else buffer)
        found = (before * (1 - lr * decay) - p.detach().double()) / lr
        assert (found - wanted).norm() <= 4e-2 * wanted.norm()


def test_is_torchs_kind_and_keeps_its_group_keys():
    ours, theirs = (kind(parameters()) for kind in (Muon, torch.optim.Muon))
    assert isinstance(ours, torch.optim.Muon)
    assert {key: ours.defaults[key] for key in theirs.defaults} == theirs.defaults
    assert theirs.param_groups[0].keys() <= ours.param_groups[0].keys()


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
def test_from_torch_and_back_is_exact(options):
    theirs = torch.optim.Muon(parameters(), lr=0.02, **options)
    steps(theirs, theirs.param_groups[0]["params"], 4)
    weights = [p.detach().clone() for p in theirs.param_groups[0]["params"]]
    ours, again = (kind([torch.nn.Parameter(w.clone()) for w in weights]) for kind in (Muon, torch.optim.Muon))
    ours.load_state_dict(checkpoint(theirs))
    assert same(ours.state_dict()["state"], theirs.state_dict()["state"])
    again.load_state_dict(checkpoint(ours))
    assert same(again.state_dict()["state"], theirs.state_dict()["state"])
    for optimizer in (ours, again, theirs):
        steps(optimizer, optimizer.param_groups[0]["params"], 3)
    for p, q, r, w in zip(*(o.param_groups[0]["params"] for o in (ours, again, theirs)), weights, strict=True):
        assert torch.equal(q, r)
        assert (p - r).norm() <= 2.5e-2 * (r - w).norm()


# ---- AdamW's groups ----


def mixed(params, **of_adamw):
    muon, adamw = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [{"params": muon}, {"params": adamw, "algorithm": "adamw", "lr": 3e-3, **of_adamw}]


MIXED = [(16, 24), (24,), (24, 16), (16,), (3,)]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"master_weights": "split", "ema_decay": 0.9}])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_adamw_groups_have_the_bits_of_adamw(dtype, options):
    """The norm is of all gradients."""
    betas = {"betas": (0.8, 0.9), "weight_decay": 0.2}
    params, optimizer = trained(MIXED, dtype=dtype, groups=lambda params: mixed(params, **betas), **options)
    twins = parameters(MIXED, dtype)
    groups = [{"params": [p for p in twins if p.dim() == 2], "lr": 0.0}, {"params": [p for p in twins if p.dim() != 2]}]
    adamw = AdamW(groups, lr=3e-3, **betas, **options)
    steps(adamw, twins, 3)
    for p, q in zip(params, twins, strict=True):
        if p.dim() != 2:
            assert torch.equal(p, q)
            assert same(dict(optimizer.state[p]), dict(adamw.state[q]))
    assert optimizer.param_groups[1]["eps"] == 1e-8


def test_a_group_of_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="algorithm is 'adam'; accepted: 'muon', 'adamw'"):
        Muon([{"params": [parameter(3)], "algorithm": "adam"}])


@pytest.mark.parametrize("key", [{"use_muon": False}, {"use_muon": True}, {"betas": (0.9, 0.95)}])
def test_a_group_of_another_implementation_names_its_algorithm(key):
    """Else Muon would update an embedding that AdamW was meant for."""
    (name, value), group = *key.items(), {"params": [parameter(3, 2)], **key}
    text = f"Muon: param_groups[0] has {name} = {value!r} and no algorithm; accepted: algorithm='muon' or 'adamw'"
    with pytest.raises(ValueError, match=re.escape(text)):
        Muon([group])
    optimizer = Muon([{**group, "algorithm": "adamw"}])
    with pytest.raises(ValueError, match=r"param_groups\[1\]"):
        optimizer.add_param_group({**group, "params": [parameter(3, 2)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("betas", [0.9, (0.9,)])
def test_betas_of_an_adamw_group_are_two(betas):
    with pytest.raises(ValueError, match=r"Muon: betas is .*; accepted: 2 numbers"):
        Muon([{"params": [parameter(3)], "algorithm": "adamw", "betas": betas}])


def test_a_group_may_change_its_algorithm():
    """Once its parameters have given up the state of the other one."""
    p = parameter(8, 8)
    optimizer = Muon([{"params": [p], "algorithm": "adamw"}])
    steps(optimizer, [p], 3)
    optimizer.param_groups[0]["algorithm"] = "muon"
    with pytest.raises(ValueError, match="lacks 'momentum_buffer'"):
        optimizer.step()
    del optimizer.state[p]
    steps(optimizer, [p], 3)
    assert list(optimizer.state[p]) == ["momentum_buffer"]


# ---- what a step does, and does not ----


@pytest.mark.parametrize("compiled", [True, False])
def test_each_pass_has_the_flags_and_scalars_that_concern_it(monkeypatch, compiled):
    """Iterates are rounded to nearest; the pass that moves weights neither unscales, clips nor negates again, and the momentum moves
    as in the trial."""
    calls, bound = [], muon_.bound

    def spy(arguments, table):
        calls.append(arguments)
        return bound(arguments, table)

    monkeypatch.setattr(muon_, "bound", spy)
    options = {"master_weights": "none", "maximize": True, "max_grad_norm": 1.0, "nesterov": False}
    params, optimizer = trained([(8, 8), (8, 4)], 3 * compiled, dtype=bf16, **options)
    calls.clear()
    scaler = ak.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in params)).backward()
    scaler.step(optimizer)
    trial, after, before = calls
    assert [
        name
        for name in ("grad_scale", "sum_sq", "found_inf", "options", "flags", "seed")
        if getattr(trial, name) is not getattr(before, name)
    ] == []
    assert (before.flags, set(after.flags)) == ([MAXIMIZE], {STOCHASTIC})
    assert None not in (before.grad_scale, before.sum_sq, before.found_inf, after.found_inf)
    assert (after.grad_scale, after.sum_sq) == (None, None)
    assert not any(moment.numel() for moment in after.moments)


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_the_momentum_is_of_the_unscaled_gradient_and_nothing_else_is_written(dtype):
    """Not of the orthogonalized one, not normalized, and in float32 beside 16-bit gradients, also after a resumption."""
    p = parameter(8, 12, dtype=dtype)
    optimizer = Muon([p], lr=0.02, nesterov=False)
    scaler = ak.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    buffer = torch.zeros(8, 12)
    for seed in range(4):
        set_grads([p], seed, 2.0**10 if dtype != f16 else 2.0**4)
        grad = p.grad.clone()
        scaler.step(optimizer)
        assert torch.equal(p.grad, grad)
        buffer.lerp_(grad.float() * 2.0**-10, 1 - 0.95)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], buffer)
        resumed = Muon([p], lr=0.02, nesterov=False)
        resumed.load_state_dict(checkpoint(optimizer))
        optimizer = resumed


def test_clipping_scales_gradients_before_the_momentum():
    """The first step is as long as without, and its momentum smaller."""
    (p,), clipped = trained([(24, 24)], 1, max_grad_norm=0.25)
    (q,), plain = trained([(24, 24)], 1)
    assert (p - q).norm() <= 4e-2 * (q - parameter(24, 24)).norm()
    ratio = clipped.state[p]["momentum_buffer"].norm() / plain.state[q]["momentum_buffer"].norm()
    torch.testing.assert_close(ratio, 0.25 / q.grad.norm(), rtol=1e-5, atol=0)


def test_cautious_decay_spares_weights_that_move_away_from_zero():
    (p,), _ = trained([(24, 24)], 1, weight_decay=10.0, cautious=True)
    (still,), _ = trained([(24, 24)], 1, weight_decay=0.0)
    start = parameter(24, 24).detach()
    moves_away = (start - still) * start < 0
    assert 0.1 < moves_away.float().mean() < 0.9
    assert torch.equal(p[moves_away], still[moves_away])
    assert torch.allclose((p - still)[~moves_away], -0.2 * start[~moves_away], rtol=1e-4, atol=1e-6)


def test_the_state_is_the_momentum_alone():
    params, optimizer = trained(dtype=bf16, master_weights="none_rne", state_dtype=bf16)
    (block,) = optimizer._store.blocks
    assert [list(values) for values in optimizer.state.values()] == [["momentum_buffer"]] * len(params)
    total = sum(tensor.nbytes for tensor in block.tensors())
    assert total <= 2 * sum(-(-p.numel() // 16) * 16 for p in params) + 4 * len(params)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_of_two_passes_counts_once(compiled):
    """The count is part of the key of random bits."""
    params, optimizer = trained(dtype=bf16, master_weights="none", count=3)
    if not compiled:
        with ak.backend("reference"):
            steps(optimizer, params, 1)
    assert {values["step"].item() for values in optimizer.state.values()} == {3 + (not compiled)}


def test_hyper_parameters_count_from_the_next_step_on():
    """lr as a number and as a tensor, and what decides the matrices and their products."""
    for change in (
        {"lr": 0.5}, {"lr": torch.tensor(0.5)}, {"weight_decay": 3.0}, {"momentum": 0.5}, {"ns_steps": 2},
        {"ns_coefficients": "polar_express"}, {"adjust_lr_fn": "match_rms_adamw"}, {"heads": 2}, {"nesterov": False},
    ):  # fmt: skip
        shapes = [(8, 6), (4, 10), (8, 6)]
        params, optimizer = trained(shapes, 4)
        fresh_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
        fresh = Muon(fresh_params)
        fresh.load_state_dict(checkpoint(optimizer))
        for each, ps in ((optimizer, params), (fresh, fresh_params)):
            each.param_groups[0].update(change)
            set_grads(ps, 9)
            each.step()
        assert same_bits(params, fresh_params), change
        unchanged, _ = trained(shapes, 4)
        set_grads(unchanged, 9)
        assert not torch.equal(params[0], unchanged[0])


def test_a_captured_step_depends_on_all_that_decides_its_products():
    _, optimizer = trained()
    _, numbers = optimizer._plan.conditions(optimizer.param_groups, optimizer.state)
    for key, value in {"ns_steps": 4, "eps": 1e-3, "heads": 1, "adjust_lr_fn": "match_rms_adamw"}.items():
        old = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        assert optimizer._plan.conditions(optimizer.param_groups, optimizer.state)[1] != numbers
        optimizer.param_groups[0][key] = old
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer._plan.conditions(optimizer.param_groups, optimizer.state)[1] == numbers


# ---- steps in a graph; tests/ptx/executed_runtime.py replays one ----


def graphed(params, optimizer):
    """A captured step; without a GPU it steps eagerly and refuses what a replay would not repeat."""

    def update(*grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()

    return update, ak.graph_step(update, model=torch.nn.ParameterList(params), optimizer=optimizer)


def test_a_captured_step_reads_lr_and_decay_from_memory():
    """Not from the host, whose values a graph would keep (microsoft/dion#104)."""
    found = []
    for which in (0, 1):
        params = parameters([(16, 24), (24, 16), (16, 24)])
        optimizer = Muon(params, lr=2.0**-5)
        step = graphed(params, optimizer)[which]
        for seed, numbers in enumerate([(2.0**-5, 0.5), (2.0**-7, 0.5), (0.0, 2.0), (2.0**-4, 2.0), (2.0**-4, 0.0)]):
            optimizer.param_groups[0].update(zip(("lr", "weight_decay"), numbers, strict=True))
            before = [p.detach().clone() for p in params]
            step(*(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for p in params))
            assert same_bits(params, before) == (numbers[0] == 0.0)
        found.append(params)
    assert same_bits(*found)
