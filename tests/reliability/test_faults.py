"""Faults in training: afterwards the state is consistent, the error is clear, and the next step is that of a twin which
never saw the fault."""

import collections
import copy
import re

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels as ak
from amp_kernels._dispatch import nodes
from amp_kernels._raw import check_and_norm
from amp_kernels.amp._records import record_of
from amp_kernels.optim import _matrices

from ..helpers.bits import assert_same_bits
from ..helpers.generators import normal
from .loop import assert_same, flat, is_same
from .twin import EACH, Twin, after, started, without

# ---- bad numbers ----


@EACH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite(name, dtype, options, value):
    twin = started(name, dtype, options)
    twin.step(2, value)
    assert twin.scaler.get_scale() == 2.0**7
    assert twin.scaler.skipped_steps == 1
    twin.scaler.update(2.0**8)  # the twin's, which rounding in 16 bits depends on
    assert_same(after(twin), without(name, dtype, options))


# ---- exceptions ----


class Fault(Exception):
    pass


def raise_fault(*_):
    raise Fault


def in_a_forward_hook(twin):
    return twin.model[1].register_forward_hook(raise_fault)


def in_a_backward_hook(twin):
    return twin.model[2].register_full_backward_hook(raise_fault)


def in_a_gradient_hook(twin):
    return twin.model[0].weight.register_hook(raise_fault)


def after_the_first_gradient(twin):
    """Some gradients are there then, and others are not."""
    return twin.model[2].weight.register_post_accumulate_grad_hook(raise_fault)


def before_the_step(twin):
    return twin.optimizer.register_step_pre_hook(raise_fault)


@EACH
@pytest.mark.parametrize(
    "place", [in_a_forward_hook, in_a_backward_hook, in_a_gradient_hook, after_the_first_gradient, before_the_step]
)
def test_an_exception(name, dtype, options, place):
    twin = started(name, dtype, options)
    hook = place(twin)
    with pytest.raises(Fault):
        twin.step(2)
    hook.remove()
    assert_same(after(twin), without(name, dtype, options))


def test_an_exception_after_the_step():
    """The step counts, and the scaler says what is missing."""
    twin = started()
    hook = twin.optimizer.register_step_post_hook(raise_fault)
    with pytest.raises(Fault):
        twin.step(2)
    hook.remove()
    assert_same(after(twin), without(batches=(0, 1, 2, 3, 4)))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_an_exception_between_unscale_and_step(explicit, clip):
    """The next step must not take scaled gradients for unscaled ones."""
    twin = started()
    twin.backward(2)
    twin.scaler.unscale_(twin.optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.1)
    twin.backward(3)
    if explicit:
        twin.scaler.unscale_(twin.optimizer)
    twin.update()
    assert_same(after(twin, [4]), without())


def test_gradients_that_were_kept_after_it():
    """Neither scale fits them: they are refused until they are given up."""
    twin = started()
    twin.backward(2)
    twin.scaler.unscale_(twin.optimizer)
    before = twin.state()
    twin.scaler.scale(twin.loss(3)).backward()
    for call in (twin.update, lambda: twin.scaler.unscale_(twin.optimizer)):
        with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) and scaler\.update\(\)"):
            call()
    assert_same(twin.state(), before)
    twin.optimizer.zero_grad()
    twin.scaler.update()
    assert_same(after(twin), without())


def test_another_loss_with_unscaled_gradients_is_no_fault():
    """Two optimizers, one unscaled and clipped around the other's backward."""
    twin, other = started(), Twin()
    twin.backward(2)
    twin.scaler.unscale_(twin.optimizer)
    twin.scaler.scale(other.loss(7)).backward()
    torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.1)
    twin.scaler.step(twin.optimizer)
    twin.scaler.step(other.optimizer)
    twin.scaler.update()
    expected = started()
    expected.backward(2)
    expected.scaler.unscale_(expected.optimizer)
    torch.nn.utils.clip_grad_norm_(expected.model.parameters(), 0.1)
    expected.update()
    assert_same(twin.state(), expected.state())


def test_a_new_optimizer_at_the_address_of_one_that_was_given_up():
    first, second = Twin().optimizer, Twin().optimizer
    records = collections.defaultdict(_refresh_per_optimizer_state)
    record_of(records, first)["stage"] = OptState.UNSCALED
    records[id(second)] = records.pop(id(first))
    assert record_of(records, second)["stage"] is OptState.READY


# ---- interrupts ----


# ---- parameters that come, go, move ----


@EACH
def test_a_parameter_that_is_frozen_and_thawed(name, dtype, options):
    """While it has no gradient nothing of it changes, and the others go on as in a twin that dropped it."""
    twin, weight = started(name, dtype, options), 0
    param = list(twin.model.parameters())[weight]
    before = {key: value.clone() for key, value in twin.optimizer.state[param].items()}
    kept = param.detach().clone()
    param.requires_grad_(False)
    twin.step(3)
    twin.step(4)
    assert_same_bits(param.detach(), kept)
    assert_same(twin.optimizer.state[param], before)
    param.requires_grad_(True)
    twin.step(5)
    assert not torch.equal(param, kept)
    assert name == "SGD" or twin.optimizer.state[param]["step"] == before["step"] + 1


@EACH
def test_a_model_that_is_cast_is_as_one_that_was_loaded_so(name, dtype, options):
    twin = started(name, dtype, options)
    saved = copy.deepcopy(twin.optimizer.state_dict())
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    loaded = Twin(name, other, options)
    loaded.model.load_state_dict(twin.model.state_dict())
    loaded.optimizer.load_state_dict(saved)
    twin.model.to(other)
    twin.dtype = other
    for one in (twin, loaded):
        if options.get("master_weights") == "split" or dtype == torch.float16:
            one.optimizer.reload_model_params()
    assert_same(after(twin), after(loaded))


# ---- state that is edited ----


@EACH
def test_a_state_that_is_replaced_counts(name, dtype, options):
    """``state[p][key] = value`` is as writing into it."""
    twin, expected = started(name, dtype, options), started(name, dtype, options)
    key = "momentum_buffer" if name == "SGD" else "exp_avg"
    for param in twin.model.parameters():
        twin.optimizer.state[param][key] = torch.full(param.shape, 0.25)
    for param in expected.model.parameters():
        expected.optimizer.state[param][key].fill_(0.25)
    assert_same(after(twin), after(expected))


def test_a_state_that_does_not_fit_is_refused():
    twin, expected = started(), started()
    state = twin.optimizer.state[twin.model[0].weight]
    with pytest.raises(ValueError, match=r"exp_avg has shape \[3\]; accepted: \[6, 4\]"):
        state["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg has shape \[3\]; accepted: \[6, 4\]"):
        state.update(exp_avg=torch.zeros(3))
    for remove in (lambda: state.pop("exp_avg"), lambda: state.__delitem__("exp_avg")):
        with pytest.raises(TypeError, match=r"exp_avg cannot be removed alone; accepted: del optimizer\.state"):
            remove()
    state["note"] = "mine"
    assert state.pop("note") == "mine"
    assert state.pop("note", 1) == 1
    assert_same(after(twin), after(expected))


def test_numbers_and_counts_may_be_set():
    twin = started()
    twin.optimizer.state[twin.model[0].weight]["step"] = 7
    twin.step(3)
    assert twin.optimizer.state[twin.model[0].weight]["step"] == 8
    assert twin.optimizer.state[twin.model[2].weight]["step"] == 3


def test_checkpoints_hold_plain_dicts():
    assert {type(values) for values in started().optimizer.state_dict()["state"].values()} == {dict}


# ---- memory ----


def huge(dtype):
    return torch.ones(1, 8, dtype=dtype).expand(1 << 44, 8)


@pytest.mark.parametrize("call", [ak.layer_norm, ak.rms_norm])
def test_no_memory_in_a_forward(call):
    with pytest.raises(torch.OutOfMemoryError, match=r"norm_forward: out of memory \("):
        call(huge(torch.bfloat16), 8)


def test_no_memory_in_a_backward(monkeypatch):
    """An op of the backward gets no memory: the error is torch's, some gradients are there, and the next step is right."""
    from amp_kernels._raw import norm_backward

    real, twin = norm_backward.op._overloads["cpu"], started("AdamW", torch.bfloat16)

    def full(*_, **__):
        huge(torch.bfloat16).contiguous()  # torch's own words

    monkeypatch.setitem(norm_backward.op._overloads, "cpu", full)
    said = r"norm_backward: out of memory .*can't allocate memory"
    with nodes.refused(), pytest.raises(torch.OutOfMemoryError, match=said):  # a node in C++ calls no op
        twin.step(2)
    monkeypatch.setitem(norm_backward.op._overloads, "cpu", real)
    assert_same(after(twin), without("AdamW", torch.bfloat16))


def test_other_errors_stay_what_they_are():
    with pytest.raises(Exception, match="must have dtype") as caught:
        check_and_norm.op([torch.ones(3, dtype=torch.int64)])
    assert not isinstance(caught.value, torch.OutOfMemoryError)


# ---- a step of several passes ----


class FaultAt(TorchDispatchMode):
    """The operation number ``count`` that torch runs fails before it does anything, as one that gets no memory."""

    def __init__(self, count):
        super().__init__()
        self.left = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError(str(func))
        return func(*args, **kwargs or {})


#: What moves weights and moments comes last, without memory that the step has not had before, and cannot fail.
LAST = re.compile(r"muon_|adamw_|increment|_foreach_zero_")
MUONS = {
    "float32": (torch.float32, {}),
    "chunks": (torch.float32, {"ema_decay": 0.9}),
    "split": (torch.bfloat16, {"master_weights": "split", "max_grad_norm": 0.5}),
    "8 bits": (torch.bfloat16, {"state_dtype": "8bit", "master_weights": "none", "seed": 3}),
}


def muon(dtype, options):
    """Matrices of several shapes and orders in memory, and AdamW's groups, with their gradients of a step."""
    shapes = [(64, 64), (64, 96), (16, 24), (64, 64)]
    matrices = [torch.nn.Parameter(normal(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes)]
    matrices.append(torch.nn.Parameter(normal(24, 16, dtype=dtype, seed=8).t()))
    vectors = [torch.nn.Parameter(normal(24, dtype=dtype, seed=9))]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
    return ak.optim.Muon(groups, lr=2.0**-5, **options), [*matrices, *vectors]


def set_grads(params, batch):
    for i, param in enumerate(params):
        param.grad = torch.empty_like(param).copy_(normal(*param.shape, dtype=param.dtype, seed=100 * batch + i))


def of(optimizer, params):
    return dict(flat({"weights": [param.detach() for param in params], "optimizer": optimizer.state_dict()}))


def muon_after(dtype, options, batches):
    optimizer, params = muon(dtype, options)
    for batch in batches:
        set_grads(params, batch)
        optimizer.step()
    return optimizer, params


@pytest.mark.parametrize("kind", MUONS)
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_muon_step_that_gets_no_memory_anywhere(monkeypatch, kind, taken, every):
    """Nothing has been changed, and the step is right once it is taken again."""
    if kind == "chunks":
        monkeypatch.setattr(_matrices, "CHUNK_ELEMENTS", 5000)
    expected = of(*muon_after(*MUONS[kind], range(taken + 2)))
    for place in range(7 * taken % every, 10**6, every):
        optimizer, params = muon_after(*MUONS[kind], range(taken))
        before = of(optimizer, params)
        set_grads(params, taken)
        try:
            with FaultAt(place):
                optimizer.step()
        except torch.OutOfMemoryError as error:
            after = of(optimizer, params)
            after = {key: after[key] for key in before}
            if LAST.search(str(error)) and not is_same(after, before):
                break
            assert_same(after, before)
            optimizer.step()
        else:
            break
        set_grads(params, taken + 1)
        optimizer.step()
        assert_same(of(optimizer, params), expected)
    assert place > 100
