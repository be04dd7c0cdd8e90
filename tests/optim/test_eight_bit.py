"""Moments in 8 bits and masters of 24: which parameters have them, their memory, state and everything else that a step does.
tests/ops/test_moments8.py has the arithmetic, test_eight_bit_checkpoints.py saved states."""

import gc
import logging

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._dispatch.policy import requested_backend
from amp_kernels._raw._block8 import FIRST, SECOND, decode, encode

from ..helpers.generators import normal
from .eight_bit import EACH_KIND, assert_same_tensors, bits, optimizer_of, step, train, weights
from .optimizers import STATEFUL, bf16, f32, params_of

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
        tensors = [it for it in gc.get_objects() if type(it) in (torch.Tensor, torch.nn.Parameter)]
        dense = [t.untyped_storage() for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]
        return {storage.data_ptr(): storage.nbytes() for storage in dense}

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
    if name == "Muon" and requested_backend() == "emulate":
        pytest.skip("products of the CUDA kernels add in another order")
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
    assert all(group["seed"] == 6 for group in other.state_dict()["param_groups"])


def test_a_seed_in_groups_is_the_optimizers():
    """Also before a checkpoint is loaded, so that a resumed run continues."""

    def of_groups(*seeds):
        params = weights()
        groups = [{"params": params[:2], **seeds[0]}, {"params": params[2:], **seeds[1]}]
        return akopt.AdamW(groups, state_dtype="8bit")

    runs = [of_groups({"seed": seed}, more) for seed, more in ((5, {"seed": 5}), (5, {}), (9, {}), (0, {}))]
    for group in runs[2].param_groups:
        group["seed"] = 5
    runs[3].seed = 5
    for optimizer in runs:
        train(optimizer, 0, 2)
        assert optimizer.seed == 5
        assert_same_tensors(bits(optimizer), bits(runs[0]))
    resumed = of_groups({}, {})
    resumed.load_state_dict(runs[1].state_dict())
    for mine, p in zip(params_of(resumed), params_of(runs[1]), strict=True):
        mine.data.copy_(p)
    for optimizer in (runs[0], resumed):
        step(optimizer, 2)
    assert_same_tensors(params_of(resumed), params_of(runs[0]))

    refused = r"AdamW: groups have the seeds \[1, 2\]; accepted: the same one in all"
    with pytest.raises(ValueError, match=refused):
        of_groups({"seed": 1}, {"seed": 2})
    optimizer = of_groups({"seed": 1}, {})
    before = [p.clone() for p in params_of(optimizer)]
    optimizer.param_groups[0]["seed"] = 2
    with pytest.raises(ValueError, match=refused):
        step(optimizer, 0)
    assert_same_tensors(params_of(optimizer), before)
    with pytest.raises(ValueError, match="AdamW: seed is -1"):
        optimizer.seed = -1


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
