"""Checkpoints: torch's in, ours out, nothing rounded, and a resumed run that continues bit for bit."""

import copy
import io
import pickle

import pytest
import torch

import amp_kernels.optim as akopt

KINDS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("Adam", {"weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {}),
    ],
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in [(33,), (7, 11), (), (0, 2)]]


def run(optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return params


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def copied(optimizer, kind, options):
    """An optimizer of `kind` over copies of the parameters, with the same checkpoint."""
    params = [torch.nn.Parameter(p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    other = kind(params, lr=1e-2, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@KINDS
@pytest.mark.parametrize("fused", [True, False])
def test_from_torch_and_back_is_exact(name, options, fused):
    theirs = getattr(torch.optim, name)(weights(), lr=1e-2, fused=fused, **options)
    run(theirs, 5)
    ours = copied(theirs, getattr(akopt, name), options)
    state = ours.state_dict()["state"]
    assert same(state, theirs.state_dict()["state"])
    again = copied(ours, getattr(torch.optim, name), options | {"fused": fused})
    assert same(again.state_dict()["state"], theirs.state_dict()["state"])
    for a, b in zip(run(ours, 5), run(theirs, 5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(run(again, 5), theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), [*KINDS.args[1], ("Lion", {"weight_decay": 0.1})])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["fp32", "split", "none", "none_rne"])
@pytest.mark.parametrize("way", ["state_dict", "torch.save", "deepcopy", "pickle"])
def test_resumed_run_continues_bit_for_bit(name, options, dtype, mode, way):
    kind = getattr(akopt, name)
    options = {**options, "master_weights": mode, "ema_decay": 0.75}
    first = kind(weights(dtype), lr=1e-2, **options, seed=5)
    run(first, 5)
    if way == "deepcopy":
        second = copy.deepcopy(first)
    elif way == "pickle":
        second = pickle.loads(pickle.dumps(first))
    elif way == "torch.save":
        buffer = io.BytesIO()
        torch.save({"params": first.param_groups[0]["params"], "state": first.state_dict()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        second = kind(loaded["params"], lr=1e-2, **options, seed=1)  # that of the checkpoint counts
        second.load_state_dict(loaded["state"])
    else:
        second = copied(first, kind, options)
    assert second.master_weights == mode
    assert second._step_supports_amp_scaling
    for a, b in zip(run(first, 5, seed=2), run(second, 5, seed=2), strict=True):
        assert torch.equal(a, b)
        assert a is not b
    assert same(first.state_dict()["state"], second.state_dict()["state"])


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "split"), ("split", "fp32")])
def test_masters_move_between_forms_without_rounding(dtype, saved, loaded):
    """float32 in the checkpoint in both cases. The values are in the range where float16's split is exact, ties
    included."""
    first = akopt.SGD(weights(dtype), lr=1e-2, master_weights=saved)
    run(first, 5)
    masters = first.state_dict()["state"]
    with torch.no_grad():
        if saved == "fp32":  # a tie: the 16-bit weight was rounded to even, a split one is rounded away
            step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
            masters[0]["master"][:4] = torch.tensor([1 + step, 1 + 3 * step, -1 - step, 1.0])
            for p, values in zip(first.param_groups[0]["params"], masters.values(), strict=False):
                p.copy_(values["master"])
    expected = copy.deepcopy(masters)
    second = copied(first, akopt.SGD, {"master_weights": loaded})
    for i, values in second.state_dict()["state"].items():
        large = expected[i]["master"].abs() >= 2.0**-17
        assert torch.equal(values["master"][large], expected[i]["master"][large])


def test_moments_are_never_rounded_to_the_parameters_dtype():
    """torch casts all state to it: float32 moments of a bfloat16 parameter would lose 16 bits at each resume."""
    first = akopt.AdamW(weights(torch.bfloat16))
    run(first, 3)
    second = copied(first, akopt.AdamW, {})
    values = second.state_dict()["state"][0]
    assert values["exp_avg"].dtype == torch.float32
    assert torch.equal(values["exp_avg"], first.state_dict()["state"][0]["exp_avg"])
    assert not torch.equal(values["exp_avg"], values["exp_avg"].bfloat16().float())


def test_bfloat16_moments_stay_bfloat16():
    first = akopt.AdamW(weights(), state_dtype=torch.bfloat16)
    run(first, 3)
    second = copied(first, akopt.AdamW, {"state_dtype": torch.bfloat16})
    assert same(first.state_dict()["state"], second.state_dict()["state"])
    assert second.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16


def test_torchs_16_bit_checkpoint_starts_masters_from_the_parameters():
    theirs = torch.optim.AdamW(weights(torch.bfloat16), lr=1e-2)
    run(theirs, 3)
    ours = copied(theirs, akopt.AdamW, {})
    p = ours.param_groups[0]["params"][0]
    assert torch.equal(ours.state[p]["master"], p.float())
    assert torch.equal(ours.state[p]["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"].float())


@KINDS
def test_loading_an_unfused_checkpoint_keeps_the_scaler_protocol(name, options):
    """torch's fused optimizers lose group["fused"] here and then fail in scaler.step."""
    theirs = getattr(torch.optim, name)(weights(), lr=1e-2, foreach=True, **options)
    run(theirs, 1)
    ours = copied(theirs, getattr(akopt, name), options)
    assert ours.param_groups[0]["fused"] is True
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    params = ours.param_groups[0]["params"]
    scaler.scale(sum(p.sum() for p in params)).backward()
    scaler.step(ours)
    scaler.update()


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_checkpoints_of_apex_adam_load(name):
    """It keeps one count for a group, and says whether the moments are corrected."""
    ours = getattr(akopt, name)(weights(), lr=1e-2)
    run(ours, 3)
    saved = copy.deepcopy(ours.state_dict())
    saved["param_groups"][0].update(step=int(saved["state"][0]["step"]), bias_correction=True)
    for values in saved["state"].values():
        del values["step"]
    other = getattr(akopt, name)(copy.deepcopy(ours.param_groups[0]["params"]), lr=1e-2)
    other.load_state_dict(saved)
    assert "step" not in other.param_groups[0]
    for a, b in zip(run(ours, 3, seed=2), run(other, 3, seed=2), strict=True):
        assert torch.equal(a, b)
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction is False; accepted: True"):
        other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("saved", "loading", "lacks"),
    [("SGD", "AdamW", "eps, betas"), ("AdamW", "SGD", "momentum, dampening"), ("Lion", "LAMB", "eps")],
)
def test_groups_of_another_kind_are_refused(saved, loading, lacks):
    state = getattr(akopt, saved)(weights()).state_dict()
    with pytest.raises(ValueError, match=f"{loading}: a group lacks {lacks}; accepted: groups of the same kind"):
        getattr(akopt, loading)(weights()).load_state_dict(state)


def test_momentum_buffer_that_no_step_has_written_is_saved_as_none():
    """torch has none at that point; a zero buffer would make it apply the dampening to the first gradient."""
    ours = akopt.SGD(weights(), lr=1e-2, momentum=0.9, dampening=0.5, skip_nonfinite=True)
    for p in ours.param_groups[0]["params"]:
        p.grad = torch.full_like(p, torch.inf)
    ours.step()
    assert ours.state_dict()["state"][0]["momentum_buffer"] is None
    theirs = copied(ours, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})
    again = copied(ours, akopt.SGD, {"momentum": 0.9, "dampening": 0.5})
    for a, b, c in zip(run(ours, 3), run(theirs, 3), run(again, 3), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c)


def test_scalar_steps_of_old_checkpoints():
    ours = akopt.AdamW(weights(), lr=1e-2)
    run(ours, 3)
    for form in (lambda s: s.item(), lambda s: int(s.item()), lambda s: s.reshape(1)):
        state = copy.deepcopy(ours.state_dict())
        for values in state["state"].values():
            values["step"] = form(values["step"])
        other = akopt.AdamW(weights(), lr=1e-2)
        other.load_state_dict(state)
        assert other.state[other.param_groups[0]["params"][0]]["step"].item() == 3


@pytest.mark.parametrize("fault", ["shape", "missing", "groups", "group size", "ema shape", "seeds", "decay", "nan"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(fault):
    split = [{"params": group} for group in (weights()[:2], weights()[2:])]
    optimizer = akopt.AdamW(split, lr=1e-2, ema_decay=0.9, master_weights="none")
    params = run(optimizer, 3)
    before = copy.deepcopy([optimizer.state_dict(), [p.detach() for p in params]])
    bad = copy.deepcopy(optimizer.state_dict())
    if fault == "shape":
        bad["state"][1]["exp_avg"] = torch.zeros(3)
    elif fault == "missing":
        del bad["state"][1]["exp_avg_sq"]
    elif fault == "groups":
        bad["param_groups"] *= 2
    elif fault == "group size":
        bad["param_groups"][0]["params"].pop()
    elif fault == "ema shape":
        bad["state"][1]["ema"] = torch.zeros(3)
    elif fault == "seeds":
        bad["param_groups"][0]["seed"] = 7
    elif fault == "decay":
        bad["param_groups"][0]["ema_decay"] = 1.5
    else:
        bad["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError):  # noqa: PT011  (some are torch's)
        optimizer.load_state_dict(bad)
    assert same([optimizer.state_dict(), [p.detach() for p in params]], before)
    run(optimizer, 1)


def test_state_dict_hooks_see_the_checkpoint_and_may_change_it():
    optimizer = akopt.AdamW(weights(torch.bfloat16), master_weights="split")
    run(optimizer, 2)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save pre"))

    def post(_, state):
        calls.append("save post")
        assert "master" in state["state"][0]
        return {**state, "extra": 1}

    optimizer.register_state_dict_post_hook(post)

    def load_pre(_, state):
        calls.append("load pre")
        state["state"] = {key: {**values, "step": torch.tensor(7.0)} for key, values in state["state"].items()}
        return state

    optimizer.register_load_state_dict_pre_hook(load_pre)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load post"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 7
    assert calls == ["save pre", "save post", "load pre", "load post"]
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_options_and_groups_survive_pickling():
    options = {
        "master_weights": "split",
        "shadow_dtype": torch.float16,
        "state_dtype": torch.bfloat16,
        "max_grad_norm": 2.0,
        "skip_nonfinite": True,
        "ema_decay": 0.5,
        "zero_grads": True,
        "seed": 3,
    }
    first = akopt.AdamW(weights(), lr=1e-2, maximize=True, **options)
    run(first, 1)
    second = pickle.loads(pickle.dumps(first))
    assert {key: getattr(second, key) for key in options} == options
    assert same(second.param_groups[0]["params"], first.param_groups[0]["params"])
    assert {k: v for k, v in second.param_groups[0].items() if k != "params"} == {
        k: v for k, v in first.param_groups[0].items() if k != "params"
    }


def test_pickle_holds_each_parameters_state_once():
    """Views of a shared buffer would each be written with the whole buffer behind them."""
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(50)]
    optimizer = akopt.AdamW(params)
    run(optimizer, 1)
    assert len(pickle.dumps(optimizer)) < 1.5 * 50 * 3 * 4000
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert buffer.tell() < 1.5 * 50 * 2 * 4000


def test_state_that_belongs_to_no_parameter_is_kept():
    optimizer = akopt.SGD(weights(), momentum=0.9)
    run(optimizer, 1)
    state = optimizer.state_dict()
    state["state"]["note"] = {"value": 3}
    optimizer.load_state_dict(state)
    assert optimizer.state["note"] == {"value": 3}
    run(optimizer, 1)
    assert optimizer.state_dict()["state"]["note"] == {"value": 3}
