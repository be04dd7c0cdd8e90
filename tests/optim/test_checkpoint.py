"""Checkpoints: torch's and the published codes' in, ours out, nothing rounded, and a resumed run that continues bit for bit."""

import copy
import io
import pickle

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

from .optimizers import (
    CASES,
    EACH,
    REFERENCES,
    U,
    bf16,
    copies,
    distance,
    f16,
    f32,
    fill,
    make,
    params_of,
    reference,
    resumed,
    run,
    same,
    snapshot,
    weights,
)

TORCHS_CASES = pytest.mark.parametrize(
    ("name", "options"), [case for case in CASES.args[1] if case[0] not in ("Lion", "LAMB", "Muon")]
)


@TORCHS_CASES
@pytest.mark.parametrize("fused", [True, False])
def test_from_torch_and_back_is_exact(name, options, fused):
    theirs = reference(name, weights(), fused=fused, **options)
    run(theirs, 5)
    ours = resumed(theirs, getattr(akopt, name), **options)
    assert same(ours.state_dict()["state"], theirs.state_dict()["state"])
    again = resumed(ours, REFERENCES[name], fused=fused, **options)
    assert same(again.state_dict()["state"], theirs.state_dict()["state"])
    wanted = run(theirs, 5)
    for optimizer in (ours, again):
        for a, b in zip(run(optimizer, 5), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_lion_from_its_authors_code_and_back_is_exact():
    theirs = reference("Lion", weights(), weight_decay=0.1)
    run(theirs, 5)
    ours = resumed(theirs, akopt.Lion)
    again = resumed(ours, REFERENCES["Lion"])
    for optimizer in (ours, again):
        assert same(optimizer.state_dict()["state"], theirs.state_dict()["state"])
    results = [run(optimizer, 5, seed=2) for optimizer in (theirs, ours, again)]
    assert distance(results[0], results[1]) <= 15 * U * 4
    assert distance(results[0], results[2]) == 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_lamb_from_apex(max_grad_norm):
    """Its count is the group's; the corrections of the next step depend on it. So is the norm that it clips to, where 0
    is none. The checkpoint stays as it was."""
    theirs = reference("LAMB", copies(weights(), torch.float64), weight_decay=0.0, eps=0.1, max_grad_norm=max_grad_norm)
    run(theirs, 5)
    saved = copy.deepcopy(theirs.state_dict())
    ours = akopt.LAMB(copies(params_of(theirs), f32))
    ours.load_state_dict(saved)
    assert saved["param_groups"][0]["step"] == 5
    assert all(values.keys() == {"exp_avg", "exp_avg_sq"} for values in saved["state"].values())
    group = ours.param_groups[0]
    assert not {"step", "max_grad_norm"} & group.keys()
    assert ours.max_grad_norm == (max_grad_norm or None)
    assert (group["lr"], group["weight_decay"], group["use_nvlamb"], group["maximize"]) == (1e-2, 0.0, False, False)
    assert all(values["step"] == 5 for values in ours.state_dict()["state"].values())
    moved = copies(params_of(ours))
    assert distance(*(run(optimizer, 5, seed=2) for optimizer in (theirs, ours))) <= 5 * 20 * U
    assert distance(moved, params_of(ours)) > 1e-2


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_adam_from_apex(name):
    """It keeps one count for a group, and says whether the moments are corrected."""
    ours = make(name, weights())
    run(ours, 3)
    saved = copy.deepcopy(ours.state_dict())
    saved["param_groups"][0].update(step=int(saved["state"][0]["step"]), bias_correction=True)
    for values in saved["state"].values():
        del values["step"]
    other = make(name, copies(params_of(ours)))
    other.load_state_dict(saved)
    assert "step" not in other.param_groups[0]
    assert distance(run(ours, 3, seed=2), run(other, 3, seed=2)) == 0
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction is False; accepted: True"):
        other.load_state_dict(saved)


def test_lamb_from_apex_with_sums_of_gradients_is_refused():
    ours = make("LAMB", weights())
    run(ours, 1)
    saved = copy.deepcopy(ours.state_dict())
    saved["param_groups"][0]["grad_averaging"] = True
    ours.load_state_dict(saved)
    saved["param_groups"][0]["grad_averaging"] = False
    with pytest.raises(ValueError, match="grad_averaging is False; accepted: True"):
        ours.load_state_dict(saved)


ALL = [("AdamW", {}), ("AdamW", {"amsgrad": True}), ("Adam", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9})]
ALL += [("SGD", {}), ("SGD", {"momentum": 0.9, "dampening": 0.5}), ("Lion", {"weight_decay": 0.1})]
ALL += [("LAMB", {"use_nvlamb": True, "bias_correction": False})]


@pytest.mark.parametrize(("name", "options"), ALL)
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("mode", ["fp32", "split", "none", "none_rne"])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_resumed_run_continues_bit_for_bit(name, options, dtype, mode, way):
    """A loaded state_dict brings its seed and its groups' options."""
    kept = {"master_weights": mode, "ema_decay": 0.75}
    first = make(name, weights(dtype), **options, **kept, seed=5)
    run(first, 3)
    if way == "deepcopy":
        second = copy.deepcopy(first)
    elif way == "pickle":
        second = pickle.loads(pickle.dumps(first))
    else:
        second = resumed(first, getattr(akopt, name), **kept, seed=5 if dtype == f32 else 1)  # f32 draws no bits
    assert second.master_weights == mode
    for a, b in zip(run(first, 2, seed=2), run(second, 2, seed=2), strict=True):
        assert torch.equal(a, b)
        assert a is not b
    assert same(first.state_dict()["state"], second.state_dict()["state"])
    assert {**second.param_groups[0], "params": 0} == {**first.param_groups[0], "params": 0}


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "split"), ("split", "fp32")])
def test_masters_move_between_forms_without_rounding(dtype, saved, loaded):
    """float32 in the checkpoint in both cases. The values are in the range where float16's split is exact, ties
    included."""
    first = akopt.SGD(weights(dtype), lr=1e-2, master_weights=saved)
    run(first, 5)
    masters = first.state_dict()["state"]
    with torch.no_grad():
        if saved == "fp32":  # a tie: the 16-bit weight was rounded to even, a split one is rounded away
            step = 2.0**-8 if dtype == bf16 else 2.0**-11
            masters[0]["master"][:4] = torch.tensor([1 + step, 1 + 3 * step, -1 - step, 1.0])
            for p, values in zip(params_of(first), masters.values(), strict=False):
                p.copy_(values["master"])
    expected = copy.deepcopy(masters)
    second = resumed(first, akopt.SGD, master_weights=loaded)
    for i, values in second.state_dict()["state"].items():
        large = expected[i]["master"].abs() >= 2.0**-17
        assert torch.equal(values["master"][large], expected[i]["master"][large])


def test_torchs_16_bit_checkpoint_starts_masters_from_the_parameters():
    theirs = reference("AdamW", weights(bf16))
    run(theirs, 3)
    ours = resumed(theirs, akopt.AdamW)
    p = params_of(ours)[0]
    assert torch.equal(ours.state[p]["master"], p.float())
    assert torch.equal(ours.state[p]["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"].float())


@pytest.mark.parametrize("mode", ["fp32", "split", "none"])
@pytest.mark.parametrize("way", ["optimizer first", "model first", "file"])
def test_masters_and_averages_that_a_state_lacks_follow_the_model(mode, way, tmp_path):
    model, other = (torch.nn.ParameterList(weights(bf16, seed)) for seed in (0, 1))
    theirs = reference("AdamW", model.parameters())
    run(theirs, 3)
    ours = akopt.AdamW(other.parameters(), lr=0.0, master_weights=mode, state_dtype=bf16, ema_decay=0.5)
    run(ours, 1)
    parts = (ours, theirs), (other, model)
    if way == "file":
        ak.checkpoint.save(tmp_path / "saved.pt", model=model, optimizer=theirs)
        ak.checkpoint.load(tmp_path / "saved.pt", model=other, optimizer=ours)
    else:
        for mine, saved in parts if way == "optimizer first" else reversed(parts):
            mine.load_state_dict(copy.deepcopy(saved.state_dict()))
    ours.param_groups[0]["lr"] = 0.0
    fill(params_of(ours), 1.0)
    ours.step()
    for i, (p, q) in enumerate(zip(other.parameters(), model.parameters(), strict=True)):
        values = ours.state_dict()["state"][i]
        assert all(
            torch.equal(value, q.float()) for value in (p.float(), values["ema"], values.get("master", q.float()))
        )


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_a_state_that_comes_back_brings_its_masters_and_averages(mode):
    """Also without a step in between, when the model has been elsewhere meanwhile."""
    model = torch.nn.ParameterList(weights(bf16))
    ours = akopt.AdamW(model.parameters(), lr=1e-3, master_weights=mode, ema_decay=0.5)
    run(ours, 3)
    saved, before = copy.deepcopy((ours.state_dict(), model.state_dict())), snapshot(ours)
    for steps in (0, 2):
        for p in model.parameters():
            p.data.mul_(2.0)
        run(ours, steps)
        ours.load_state_dict(copy.deepcopy(saved[0]))
        model.load_state_dict(saved[1])
        assert same(snapshot(ours), before)


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_a_file_brings_its_masters_and_averages_after_a_write(mode, tmp_path):
    model = torch.nn.ParameterList(weights(bf16))
    ours = akopt.AdamW(model.parameters(), lr=1e-3, master_weights=mode, ema_decay=0.5)
    run(ours, 3)
    ours.state_dict()
    with torch.no_grad():
        for p in model:
            p.mul_(2.0)
    _, twin = copy.deepcopy((model, ours))
    ak.checkpoint.save(tmp_path / "1.pt", model=model, optimizer=ours)
    ak.checkpoint.load(tmp_path / "1.pt", model=model, optimizer=ours)
    run(ours, 1), run(twin, 1)
    assert same(snapshot(ours), snapshot(twin))


@TORCHS_CASES
def test_loading_an_unfused_checkpoint_keeps_the_scaler_protocol(name, options):
    """torch's fused optimizers lose group["fused"] here and then fail in scaler.step."""
    theirs = reference(name, weights(), foreach=True, **options)
    run(theirs, 1)
    ours = resumed(theirs, getattr(akopt, name), **options)
    assert ours.param_groups[0]["fused"] is True
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in params_of(ours))).backward()
    scaler.step(ours)
    scaler.update()


@TORCHS_CASES
@pytest.mark.parametrize("hint", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "neither"])
def test_torch_goes_on_fused_from_ours_whatever_it_was_made_with(name, options, hint):
    """torch's groups take the flags of a checkpoint. Without ``fused`` there, torch's fused optimizers would fail in
    scaler.step."""
    ours = make(name, weights(), **options)
    run(ours, 1)
    theirs = reference(name, weights(), **hint, **options)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert theirs.param_groups[0]["fused"] is True
    for optimizer in (ours, theirs):
        for p in params_of(optimizer):
            torch.nn.init.ones_(p)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in params_of(optimizer))).backward()
        scaler.step(optimizer)
        scaler.update()
    for a, b in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_momentum_buffer_that_no_step_has_written_is_saved_as_none():
    """torch has none at that point; a zero buffer would make it apply the dampening to the first gradient."""
    options = {"momentum": 0.9, "dampening": 0.5}
    ours = make("SGD", weights(), skip_nonfinite=True, **options)
    fill(params_of(ours), torch.inf)
    ours.step()
    assert ours.state_dict()["state"][0]["momentum_buffer"] is None
    theirs, again = resumed(ours, torch.optim.SGD, **options), resumed(ours, akopt.SGD, **options)
    for a, b, c in zip(run(ours, 3), run(theirs, 3), run(again, 3), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c)


def test_scalar_steps_of_old_checkpoints():
    ours = make("AdamW", weights())
    run(ours, 3)
    for form in (lambda s: s.item(), lambda s: int(s.item()), lambda s: s.reshape(1)):
        state = copy.deepcopy(ours.state_dict())
        for values in state["state"].values():
            values["step"] = form(values["step"])
        other = make("AdamW", weights())
        other.load_state_dict(state)
        assert other.state[params_of(other)[0]]["step"].item() == 3


# ---- what does not fit ----


def change(place, **entries):
    return lambda state: state[place][0 if place == "param_groups" else 1].update(entries)


FAULTS = {
    "shape": change("state", exp_avg=torch.zeros(3)),
    "ema shape": change("state", ema=torch.zeros(3)),
    "missing": lambda state: state["state"][1].pop("exp_avg_sq"),
    "groups": lambda state: state["param_groups"].extend(state["param_groups"]),
    "group size": lambda state: state["param_groups"][0]["params"].pop(),
    "seeds": change("param_groups", seed=7),
    "decay": change("param_groups", ema_decay=1.5),
    "nan": change("param_groups", lr=float("nan")),
    "option": change("param_groups", zero_grads=True),
    "norm": change("param_groups", max_grad_norm=-5.0),
    "nan norm": change("param_groups", max_grad_norm=float("nan")),
    "text for a norm": change("param_groups", max_grad_norm="q"),
    "vector of steps": change("state", step=torch.ones(3)),
    "text for a step": change("state", step="a"),
    "text for a moment": change("state", exp_avg="q"),
    "text for a state": lambda state: state["state"].update({1: "q"}),
    "one beta": change("param_groups", betas=(0.9,)),
    "no betas": change("param_groups", betas=None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(fault):
    split = [{"params": group} for group in (weights()[:2], weights()[2:])]
    optimizer = make("AdamW", split, ema_decay=0.9, master_weights="none")
    run(optimizer, 3)
    before = snapshot(optimizer)
    bad = copy.deepcopy(optimizer.state_dict())
    FAULTS[fault](bad)
    with pytest.raises(TypeError if "text" in fault else ValueError):  # some are torch's
        optimizer.load_state_dict(bad)
    assert same(snapshot(optimizer), before)
    run(optimizer, 1)


@EACH
def test_a_checkpoint_without_a_moment_is_refused(name):
    ours = make(name, weights())
    run(ours, 1)
    for lost in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        bad = copy.deepcopy(ours.state_dict())
        if lost not in bad["state"].get(1, {}):
            continue
        bad["state"][1][f"other {lost}"] = bad["state"][1].pop(lost)
        with pytest.raises(ValueError, match=f"lacks '{lost}'"):
            ours.load_state_dict(bad)


@pytest.mark.parametrize(
    ("saved", "loading", "lacks"),
    [("SGD", "AdamW", "eps, betas"), ("AdamW", "SGD", "momentum, dampening"), ("Lion", "LAMB", "eps")],
)
def test_groups_of_another_kind_are_refused(saved, loading, lacks):
    state = make(saved, weights()).state_dict()
    with pytest.raises(ValueError, match=f"{loading}: a group lacks {lacks}; accepted: groups of the same kind"):
        make(loading, weights()).load_state_dict(state)


def test_the_moments_of_another_kind_are_refused():
    """Lion asks for nothing that AdamW's checkpoint lacks. Adam's, AdamW's and LAMB's are of one kind."""
    saved = make("AdamW", weights())
    run(saved, 2)
    lion = make("Lion", weights())
    run(lion, 1)
    before = snapshot(lion)
    text = "Lion: the loaded state has exp_avg_sq; accepted: the state of the same kind of optimizer, with exp_avg$"
    for state in (
        saved.state_dict(),
        torch.optim.AdamW(weights()).state_dict() | {"state": saved.state_dict()["state"]},
    ):
        with pytest.raises(ValueError, match=text):
            lion.load_state_dict(state)
    assert same(snapshot(lion), before)
    for name in ("Adam", "LAMB"):
        make(name, weights()).load_state_dict(saved.state_dict())
    state = lion.state_dict()
    state["state"][0]["mine"] = torch.ones(2)
    lion.load_state_dict(state)


# ---- hooks, pickles, what else is in a state ----


def test_state_dict_hooks_see_the_checkpoint_and_may_change_it():
    optimizer = make("AdamW", weights(bf16), master_weights="split")
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
    for _ in range(2):
        state = optimizer.state_dict()
        assert state["extra"] == 1
        optimizer.load_state_dict(state)
        assert optimizer.state[params_of(optimizer)[0]]["step"].item() == 7
    assert calls == ["save pre", "save post", "load pre", "load post"] * 2


def test_options_survive_pickling():
    options = {
        "master_weights": "split",
        "shadow_dtype": f16,
        "state_dtype": bf16,
        "max_grad_norm": 2.0,
        "skip_nonfinite": True,
        "ema_decay": 0.5,
        "zero_grads": True,
        "seed": 3,
    }
    first = make("AdamW", weights(), maximize=True, **options)
    run(first, 1)
    second = pickle.loads(pickle.dumps(first))
    assert {key: getattr(second, key) for key in options} == options
    assert same(params_of(second), params_of(first))


def test_pickle_holds_each_parameters_state_once():
    """Views of a shared buffer would each be written with the whole buffer behind them."""
    optimizer = akopt.AdamW([torch.nn.Parameter(torch.zeros(1000)) for _ in range(50)])
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
