"""Saved states with moments in 8 bits and masters of 24: bit for bit again, from and to other dtypes and libraries."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._raw._block8 import FIRST, SECOND, decode, encode

from .eight_bit import EACH_KIND, KINDS, assert_same_tensors, bits, optimizer_of, step, train, weights
from .optimizers import STATEFUL, bf16, checkpoint, copies, f16, f32, make, params_of, reference, same


def resumed(optimizer, name, kind, options, way, path):
    if way == "deepcopy":
        return copy.deepcopy(optimizer)
    if way == "pickle":
        return pickle.loads(pickle.dumps(optimizer))
    other = optimizer_of(name, kind, options, copies(params_of(optimizer)))
    if way == "checkpoint":
        ak.checkpoint.save(path, optimizer=optimizer)
        ak.checkpoint.load(path, optimizer=other)
    elif way == "codes":
        ak.checkpoint.save(path, optimizer=optimizer)
        other.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    else:
        other.load_state_dict(checkpoint(optimizer))
    return other


@STATEFUL
@EACH_KIND
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "checkpoint", "codes"])
def test_a_resumed_run_continues_bit_for_bit(name, options, kind, way, tmp_path):
    first = optimizer_of(name, kind, options)
    train(first, 0, 3)
    second = resumed(first, name, kind, options, way, tmp_path / "saved.pt")
    assert same(first.state_dict()["state"], second.state_dict()["state"])
    for optimizer in (first, second):
        train(optimizer, 3, 6)
    # torch's SGD and Lion do not show a count that does not matter.
    assert_same_tensors(bits(first, counts=False), bits(second, counts=False))
    assert second.state_dtype == "8bit"


@EACH_KIND
@pytest.mark.parametrize("state_dtype", ["8bit", bf16, f32])
@pytest.mark.parametrize("adamw", [{}, {"amsgrad": True}])
def test_muon_with_groups_of_adamw_continues_bit_for_bit(kind, state_dtype, adamw, tmp_path):
    dtype, master = KINDS[kind]

    def muon(params):
        groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw", **adamw}]
        return akopt.Muon(groups, lr=1e-2, master_weights=master, state_dtype=state_dtype, seed=5)

    first = muon([*(p for p in weights(dtype) if p.dim() > 1), *weights(dtype)])
    train(first, 0, 3)
    ak.checkpoint.save(tmp_path / "saved.pt", optimizer=first)
    second = muon(copies(params_of(first)))
    ak.checkpoint.load(tmp_path / "saved.pt", optimizer=second)
    assert same(first.state_dict()["state"], second.state_dict()["state"])
    for optimizer in (first, second):
        train(optimizer, 3, 6)
    assert_same_tensors(bits(first, counts=False), bits(second, counts=False))  # Muon shows no count


def test_a_checkpoint_holds_codes(tmp_path):
    """Codes of row-major parameters, so that the file is no larger than the state."""
    optimizer = optimizer_of("AdamW", "fp32", {}, weights(shapes=[(256, 512), (64, 96)]))
    train(optimizer, 0, 2)
    ak.checkpoint.save(tmp_path / "saved.pt", optimizer=optimizer)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)["optimizer"]["state"]
    assert saved[0].keys() == {"step", "exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale"}
    assert saved[1].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(saved[0]["exp_avg_code"], optimizer.state[params_of(optimizer)[0]]["exp_avg_code"])
    other = akopt.AdamW(weights(shapes=[(256, 512), (64, 96)]))
    with pytest.raises(ValueError, match=r"state\[0\]\.exp_avg_code is torch.uint8 .* here it is torch.float32"):
        ak.checkpoint.load(tmp_path / "saved.pt", optimizer=other)
    ak.checkpoint.save(tmp_path / "other.pt", optimizer=(train(other, 0, 1), other)[1])
    with pytest.raises(ValueError, match=r"state\[0\]\.exp_avg is torch.float32 .* here it is torch.uint8"):
        ak.checkpoint.load(tmp_path / "other.pt", optimizer=optimizer)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("state_dtype", [f32, bf16])
def test_states_move_between_dtypes(state_dtype, codes, tmp_path):
    """Out of 8 bits without rounding: the codes have 4 significant bits. Into them to nearest, once."""
    eight = optimizer_of("AdamW", "fp32", {"amsgrad": True})
    train(eight, 0, 3)
    values = eight.state_dict()["state"]
    ak.checkpoint.save(tmp_path / "saved.pt", optimizer=eight)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)["optimizer"] if codes else checkpoint(eight)
    other = make("AdamW", copies(params_of(eight)), amsgrad=True, state_dtype=state_dtype)
    other.load_state_dict(saved)
    for i, got in other.state_dict()["state"].items():
        wanted = values[i]
        assert all(torch.equal(wanted[key].float(), got[key].float()) for key in wanted)
        assert got["exp_avg"].dtype == state_dtype
    train(other, 3, 4)
    back = optimizer_of("AdamW", "fp32", {"amsgrad": True}, copies(params_of(other)))
    back.load_state_dict(checkpoint(other))
    for key, format in (("exp_avg", FIRST), ("exp_avg_sq", SECOND), ("max_exp_avg_sq", SECOND)):
        value = other.state_dict()["state"][0][key].float().reshape(-1)
        assert torch.equal(back.state_dict()["state"][0][key].reshape(-1), decode(*encode(value, format), format))


def test_from_torch_and_back():
    theirs = reference("AdamW", weights())
    for number in range(3):
        step(theirs, number)
    ours = optimizer_of("AdamW", "fp32", {}, copies(params_of(theirs)))
    ours.load_state_dict(checkpoint(theirs))
    again = reference("AdamW", copies(params_of(ours)))
    again.load_state_dict(checkpoint(ours))
    for i, a in theirs.state_dict()["state"].items():
        b = again.state_dict()["state"][i]
        assert a["step"] == b["step"]
        assert b["exp_avg"].dtype == f32
        scale = a["exp_avg"].abs().max()
        assert (a["exp_avg"] - b["exp_avg"]).abs().max() <= scale / 16
        assert ((a["exp_avg_sq"] - b["exp_avg_sq"]).abs() <= a["exp_avg_sq"] / 16).all()


@pytest.mark.parametrize("kind", ["fp32", "bf16 split24"])
def test_torchs_flattened_form(kind):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 96)).to(KINDS[kind][0])
        runs.append((net, optimizer_of("AdamW", kind, {}, list(net.parameters()))))
    (net, optimizer), (other, fresh) = runs
    train(optimizer, 0, 3)
    state = get_optimizer_state_dict(net, optimizer, options=flat)
    assert not any("_code" in key or "_scale" in key or "remainder" in key for key in state)
    set_optimizer_state_dict(other, fresh, state, options=flat)
    other.load_state_dict(net.state_dict())
    fresh.load_state_dict(checkpoint(optimizer))  # the weights, too
    assert same(optimizer.state_dict()["state"], fresh.state_dict()["state"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda v: v.pop("exp_avg_scale"), ValueError, "the loaded state of exp_avg lacks 'exp_avg_scale'"),
        (lambda v: v.pop("exp_avg_code"), ValueError, "the loaded state of exp_avg lacks 'exp_avg_code'"),
        (lambda v: v.update(exp_avg_scale=torch.full((3,), 100, dtype=torch.uint8)), ValueError, "has 3 elements; accepted: 128, one"),
        (lambda v: v.update(exp_avg_code=v["exp_avg_code"].float()), TypeError, "exp_avg_code is torch.float32; accepted: uint8"),
        (lambda v: v.update(exp_avg_scale=v["exp_avg_scale"].to(torch.int8)), TypeError, "exp_avg_scale is torch.int8"),
        (lambda v: v["exp_avg_scale"][7].fill_(31), ValueError, "AdamW: the loaded exp_avg_scale has the exponent 31; accepted: 32 to 255"),
        (lambda v: v["exp_avg_sq_scale"].zero_(), ValueError, "exp_avg_sq_scale has the exponent 0; accepted: 48 to 255"),
        (lambda v: v.update(remainder=torch.ones(3)), ValueError, "has the remainder of a split master"),
    ],
)  # fmt: skip
def test_broken_codes_are_refused_and_change_nothing(change, error, message, tmp_path):
    optimizer = optimizer_of("AdamW", "fp32", {})
    train(optimizer, 0, 2)
    ak.checkpoint.save(tmp_path / "saved.pt", optimizer=optimizer)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)["optimizer"]
    change(saved["state"][0])
    before = bits(optimizer)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    assert_same_tensors(bits(optimizer), before)


def test_a_master_of_24_bits_is_exported_and_loaded_exactly():
    for dtype in (bf16, f16):
        optimizer = make("AdamW", weights(dtype), master_weights="split24")
        params = train(optimizer, 0, 3)
        model = torch.nn.ParameterList(params)
        exported = ak.fp32_state_dict(model, optimizer)
        for i, p in enumerate(params):
            master = optimizer.state[p]["master"]
            assert torch.equal(exported[str(i)], master)
            assert not torch.equal(master, p.float()) or p.numel() < 40
            assert (
                torch.equal(master.to(dtype), p)
                or dtype == f16
                or ((master.to(dtype) - p).abs() <= p.abs() / 128).all()
            )
            if dtype == bf16:
                assert not (master.view(torch.int32) & 0xFF).any()
            optimizer.state[p]["master"] = master
            assert torch.equal(optimizer.state[p]["master"], master)
        other = make("AdamW", copies(params), master_weights="split24")
        other.load_state_dict(checkpoint(optimizer))
        assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
        wide = make("AdamW", copies(params))
        wide.load_state_dict(checkpoint(optimizer))
        assert all(
            torch.equal(wide.state[q]["master"], optimizer.state[p]["master"])
            for p, q in zip(params, params_of(wide), strict=True)
        )


def test_writes_between_steps_reach_masters_of_24_bits():
    optimizer = make("SGD", weights(bf16), master_weights="split24", lr=0.0)
    params = train(optimizer, 0, 1)
    with torch.no_grad():
        params[0].mul_(0)
    step(optimizer, 1)
    assert not optimizer.state[params[0]]["master"].any()
    optimizer.reload_model_params()
    assert all(torch.equal(optimizer.state[p]["master"], p.float()) for p in params)


#: Dtypes of parameters and forms of their masters, with the rounding of a loaded master.
LAYOUTS = [
    (f32, "fp32", 0),
    (bf16, "fp32", 0),
    (bf16, "split", 2.0**-24),
    (bf16, "split24", 2.0**-16),
    (bf16, "none", 0),
]


def assert_rounded(source, loaded, state_dtype):
    """The moments of ``loaded`` are those of ``source``, rounded once to ``state_dtype``."""
    assert loaded.keys() == source.keys()
    for name, value in source.items():
        got, value = loaded[name].float(), value.float()
        limit = value.abs() * (0 if state_dtype == f32 else 2**-8)
        if state_dtype == "8bit" and value.numel() >= 4096:
            limit = value.abs().view(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(value.shape) / 16
        assert ((got - value).abs() <= limit).all(), name


def moments(optimizer, number):
    values = optimizer.state_dict()["state"].get(number, {}).items()
    return {name: value for name, value in values if name not in ("step", "master", "ema")}


@pytest.mark.parametrize(
    ("name", "options"), [*STATEFUL.args[1], ("SGD", {}), ("AdamW", {"amsgrad": True})], ids=lambda it: str(it)
)
@pytest.mark.parametrize("source", ["reference", f32, bf16, "8bit"], ids=str)
@pytest.mark.parametrize("state_dtype", [f32, bf16, "8bit"], ids=str)
def test_every_state_loads_into_every_layout(name, options, source, state_dtype):
    for dtype, master_weights, error in LAYOUTS:
        params = weights(dtype, [(64, 64), (33,)])
        if source == "reference":
            first = reference(name, params[: 1 if name == "Muon" else 2], **options)
        else:
            first = make(name, params, state_dtype=source, ema_decay=0.5, **options)
        train(first, 0, 3)
        saved = checkpoint(first)
        second = make(name, copies(params_of(first)), master_weights=master_weights, state_dtype=state_dtype, **options)
        second.load_state_dict(copy.deepcopy(saved))
        values = second.state_dict()["state"]
        for i, old in saved["state"].items():
            assert_rounded(moments(first, i), moments(second, i), state_dtype)
            assert values.get(i, {}).get("step", 0) == old.get("step", 0) or name in ("SGD", "Lion", "LAMB", "Muon")
            if "ema" in old:
                assert torch.equal(values[i]["ema"], old["ema"])
            if "master" in old and master_weights != "none":
                assert ((values[i]["master"] - old["master"]).abs() <= error * old["master"].abs()).all()
        for optimizer in (first, second):  # what a load forgot starts anew here
            step(optimizer, 3, 0.125)
        if dtype == f32 and source in ("reference", f32):  # nothing else is rounded
            for i in saved["state"]:
                for key, value in moments(first, i).items():
                    error = (moments(second, i)[key] - value).abs().max()
                    assert error <= value.abs().max() * {f32: 2**-20, bf16: 2**-7, "8bit": 2**-2}[state_dtype], key


def test_codes_are_moments(tmp_path):
    """A file holds the codes of 8-bit moments: they are kept where the group asks for none, and refused by an optimizer without them."""
    switched = {"AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9}}
    for name, options in switched.items():
        first = optimizer_of(name, "fp32", options)
        train(first, 0, 2)
        first.param_groups[0].update({"amsgrad": False} if name == "AdamW" else {"momentum": 0.0})
        ak.checkpoint.save(tmp_path / name, optimizer=first)
        saved = torch.load(tmp_path / name, weights_only=True)["optimizer"]
        second = optimizer_of(name, "fp32", options, copies(params_of(first)))
        second.load_state_dict(saved)
        assert same(first.state_dict()["state"], second.state_dict()["state"])
    saved = torch.load(tmp_path / "AdamW", weights_only=True)["optimizer"]
    lion = optimizer_of("Lion", "fp32", {})
    with pytest.raises(ValueError, match="Lion: the loaded state has exp_avg_sq, max_exp_avg_sq; accepted"):
        lion.load_state_dict(saved)
