"""Moments in 8 bits and masters of 24: which parameters have them, their memory, state, checkpoints and everything else that a
step does. tests/ops/test_moments8.py has the arithmetic."""

import copy
import gc
import io
import logging
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._raw._block8 import FIRST, SECOND, decode, encode
from amp_kernels.testing.generators import normal

from .optimizers import STATEFUL, bf16, checkpoint, copies, f16, f32, make, params_of, reference, same

SHAPES = [(64, 64), (33,), (4, 32, 40), (64, 96)]
KINDS = {
    "fp32": (f32, "fp32"),
    "bf16 split24": (bf16, "split24"),
    "fp16 split24": (f16, "split24"),
    "none": (bf16, "none"),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EIGHT = {"state_dtype": "8bit", "seed": 5}


def weights(dtype=f32, shapes=SHAPES):
    """The last matrix is transposed in memory."""
    params = [torch.nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    params[-1].data = params[-1].data.t().contiguous().t()
    return params


def optimizer_of(name, kind, options, params=None, **more):
    dtype, master = KINDS[kind]
    return make(name, weights(dtype) if params is None else params, master_weights=master, **EIGHT, **options, **more)


def step(optimizer, number, scale=1.0):
    for i, p in enumerate(params_of(optimizer)):
        p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=100 * number + i) * scale)
    optimizer.step()


def train(optimizer, first, last):
    for number in range(first, last):
        step(optimizer, number)
    return params_of(optimizer)


def bits(optimizer, counts=True):
    """All that a step may write: parameters and buffers; with or without the counts of steps."""
    params = params_of(optimizer)
    places = [optimizer.store.places[id(p)] for p in params if id(p) in optimizer.store.places]
    blocks = dict.fromkeys(place.block for place in places)
    buffers = (buffer for block in blocks for buffer in block.tensors()[0 if counts else 1 :])
    return [t.detach().clone() for t in (*params, *buffers)]


def assert_same_tensors(one, other):
    assert len(one) == len(other)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- which parameters, and their memory ----


def test_the_shape_decides(caplog):
    eight = [(64, 64), (128, 32), (2, 64, 33), (128, 3, 32)]
    sixteen = [(63, 64), (4096,), (65536,), (128, 33), (0, 64), (), (64, 3, 33)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in eight + sixteen]
    optimizer = akopt.AdamW(params, state_dtype="8bit")
    with caplog.at_level(logging.DEBUG, "amp_kernels"):
        step(optimizer, 0)
    for p in params:
        held = dict(optimizer.state[p].items())
        assert ("exp_avg_code" in held) == (tuple(p.shape) in eight), p.shape
        if "exp_avg_code" in held:
            assert held["exp_avg_code"].shape == p.shape
            assert held["exp_avg_sq_scale"].numel() == p.numel() // 32
        else:
            assert held["exp_avg"].dtype == bf16
    (message,) = [record.getMessage() for record in caplog.records if "8 bits" in record.getMessage()]
    assert message.startswith(
        "AdamW: moments in bfloat16 instead of 8 bits, by shape: [63, 64], [4096], [65536], [128, 33]"
    )


@pytest.mark.parametrize(
    ("dtype", "options", "held"),
    [
        (bf16, {"master_weights": "split24", "state_dtype": "8bit"}, 5.0625),
        (bf16, {"master_weights": "split", "state_dtype": "8bit"}, 6.0625),
        (f32, {"state_dtype": "8bit"}, 6.0625),
        (bf16, {"master_weights": "split", "state_dtype": bf16}, 8.0),
        (bf16, {}, 14.0),
    ],
)
def test_bytes_held_by_parameters_and_state(dtype, options, held):
    """Storages that exist after two steps without gradients, and did not before."""

    def storages():
        gc.collect()
        tensors = [it for it in gc.get_objects() if isinstance(it, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}

    before = storages()
    params = [
        torch.nn.Parameter(torch.ones(512, 1024, dtype=dtype)),
        torch.nn.Parameter(torch.ones(256, 2048, dtype=dtype)),
    ]
    optimizer = akopt.AdamW(params, **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    size = sum(size for address, size in storages().items() if address not in before)
    assert held <= size / sum(p.numel() for p in params) < held + 0.001


# ---- a step ----


@STATEFUL
@EACH_KIND
def test_steps_have_the_references_bits(name, options, kind):
    """From lists and from addresses, which later steps take."""
    runs = [optimizer_of(name, kind, options) for _ in range(2)]
    train(runs[0], 0, 5)
    with ak.backend("reference"):
        train(runs[1], 0, 5)
    assert_same_tensors(*map(bits, runs))


@STATEFUL
@pytest.mark.parametrize(
    "more",
    [{"max_grad_norm": 0.5}, {"ema_decay": 0.5}, {"shadow_dtype": bf16}, {"zero_grads": True}, {"unscale_grads": True}],
    ids=lambda more: next(iter(more)),
)
def test_everything_else_of_a_step(name, options, more):
    """Under a scaler, with a skipped step, a rate that is a tensor, against the reference."""
    runs = []
    for backend in ("cpu", "reference"):
        with ak.backend(backend):
            optimizer = optimizer_of(name, "fp32", options, **more)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(0.01)
            scaler = ak.GradScaler("cpu", init_scale=64.0)
            scaler.scale(torch.ones(()))
            for number in range(4):
                for i, p in enumerate(params_of(optimizer)):
                    p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=100 * number + i) * scaler.get_scale())
                if number == 2:
                    params_of(optimizer)[0].grad[5, 7] = torch.inf
                before = bits(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert scaler.last_step_skipped == (number == 2)
                if number == 2:
                    assert_same_tensors(bits(optimizer), before)
            assert not more.get("zero_grads") or not any(p.grad.any() for p in params_of(optimizer))
            runs.append([*bits(optimizer), *(p.grad for p in params_of(optimizer))])
    assert_same_tensors(*runs)


@EACH_KIND
def test_the_seed_decides_the_bits(kind):
    first, again, other = (optimizer_of("AdamW", kind, {}) for _ in range(3))
    other.seed = 6
    for optimizer in (first, again, other):
        train(optimizer, 0, 3)
    assert_same_tensors(bits(first), bits(again))
    assert not all(map(torch.equal, bits(first), bits(other)))
    assert all(group["seed"] == 5 for group in first.param_groups)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_compiled_step(name):
    options = {"momentum": 0.9} if name == "SGD" else {}
    runs = [optimizer_of(name, "bf16 split24", options) for _ in range(2)]
    for optimizer, compiled in zip(runs, (False, True), strict=True):
        call = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            for i, p in enumerate(params_of(optimizer)):
                p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=100 * number + i))
            call()
    assert_same_tensors(*map(bits, runs))


# ---- state ----


def test_state_shows_codes_and_reads_as_float32():
    optimizer = optimizer_of("AdamW", "bf16 split24", {})
    params = train(optimizer, 0, 3)
    for i in (0, 3):
        p, state, exported = params[i], optimizer.state[params[i]], optimizer.state_dict()["state"][i]
        names = ["step", "exp_avg", "exp_avg_sq", "master"]
        assert list(state) == names
        assert exported.keys() == {*names}
        stored = {"exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale", "remainder", "step"}
        assert dict(state.items()).keys() == stored
        for name, format in (("exp_avg", FIRST), ("exp_avg_sq", SECOND)):
            code, scale = state[name + "_code"], state[name + "_scale"]
            assert code.stride() == p.stride()
            assert code.data_ptr() % 32 == 0  # a view of the flat buffer
            ordered = code if p.is_contiguous() else code.t()
            value = decode(ordered.reshape(-1), scale.reshape(-1), format).view(ordered.shape)
            assert torch.equal(state[name] if p.is_contiguous() else state[name].t(), value)
            assert torch.equal(state[name], exported[name])
            assert name in state
            assert state.get(name).dtype == f32
        assert "exp" not in state
        with pytest.raises(KeyError):
            state["exp"]
        with pytest.raises(TypeError, match="exp_avg_code cannot be removed alone"):
            del state["exp_avg_code"]


def test_a_moment_may_be_assigned():
    optimizer = optimizer_of("AdamW", "fp32", {})
    params = train(optimizer, 0, 2)
    for p in (params[0], params[-1]):
        value = normal(*p.shape, seed=9)
        optimizer.state[p]["exp_avg"] = value
        ordered = value if p.is_contiguous() else value.t()
        wanted = decode(*encode(ordered.reshape(-1), FIRST), FIRST).view(ordered.shape)
        got = optimizer.state[p]["exp_avg"]
        assert torch.equal(got if p.is_contiguous() else got.t(), wanted)
        with pytest.raises(ValueError, match=r"exp_avg has shape \[3\]; accepted: \[64, "):
            optimizer.state[p]["exp_avg"] = torch.ones(3)
    kept = optimizer.state[params[0]]
    step(optimizer, 3)
    assert optimizer.state[params[0]] is kept


def test_replaced_and_cleared_states_are_adopted():
    optimizer, other = (optimizer_of("AdamW", "fp32", {}) for _ in range(2))
    for each in (optimizer, other):
        train(each, 0, 3)
    p, q = params_of(optimizer)[0], params_of(other)[0]
    optimizer.state[p] = dict(optimizer.state[p].items())  # codes and exponents, as they are
    other.state[q] = {key: value.clone() for key, value in other.state_dict()["state"][0].items()}
    for each in (optimizer, other):
        step(each, 3)
    assert torch.equal(p, q)
    fresh = optimizer_of("AdamW", "fp32", {})
    train(fresh, 0, 4)
    assert torch.equal(p, params_of(fresh)[0])
    optimizer.state.clear()
    step(optimizer, 4)
    assert optimizer.state[p]["step"] == 1


# ---- checkpoints ----


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


def test_a_checkpoint_holds_codes(tmp_path):
    """Of parameters in row-major order, so that the file is no larger than the state."""
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
        (
            lambda v: v.update(exp_avg_scale=torch.ones(3, dtype=torch.uint8)),
            ValueError,
            "has 3 elements; accepted: 128, one",
        ),
        (
            lambda v: v.update(exp_avg_code=v["exp_avg_code"].float()),
            TypeError,
            "exp_avg_code is torch.float32; accepted: uint8",
        ),
        (lambda v: v.update(exp_avg_scale=v["exp_avg_scale"].to(torch.int8)), TypeError, "exp_avg_scale is torch.int8"),
        (lambda v: v.update(remainder=torch.ones(3)), ValueError, "has the remainder of a split master"),
    ],
)
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


def test_a_saved_file_is_read_by_torch(tmp_path):
    optimizer = optimizer_of("Lion", "bf16 split24", {})
    train(optimizer, 0, 1)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert buffer.getbuffer().nbytes > 0
