"""Steps that only read addresses anew equal steps that look at everything, whatever changes in between."""

import copy
import gc
import logging
import weakref

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._dispatch import nodes
from amp_kernels.ops._shadows import fresh_shadow

from .optimizers import STATEFUL, bf16, f16, f32, fill
from .pairs import Pair, cached, make_params, set_grads, warmed

pytestmark = pytest.mark.skipif(nodes.step_walk() is None, reason="the module _nodes was not built for this torch")


def test_without_the_module_no_step_is_cached(monkeypatch, python_walks):
    monkeypatch.setattr(nodes, "step_walk", lambda: None)
    pair = Pair(warm=False, dtypes=(f32, bf16), groups=2, shadow_dtype=bf16)
    for number in range(4):
        pair.check_step(number)
        assert cached(pair.fast) is None


# ---- the same bits ----


@STATEFUL
@pytest.mark.parametrize("mode", ["fp32", "split", "none", "none_rne"])
def test_hits_have_the_bits_of_misses(name, options, mode):
    pair = Pair(
        name, options, (f32, bf16, f16), groups=2, lr=1e-2, master_weights=mode, shadow_dtype=bf16, ema_decay=0.9,
        max_grad_norm=0.5, skip_nonfinite=True,
    )  # fmt: skip
    pair.check_step(3, hit=True)
    assert fresh_shadow(pair.params[0], bf16) is not None


@pytest.mark.parametrize("options", [{"zero_grads": True}, {"amsgrad": True}])
def test_hits_with_other_options(options):
    pair = Pair(**options)
    pair.check_step(3, hit=True)
    assert all(p.grad.any() or not p.numel() for p in pair.params) == ("zero_grads" not in options)


def test_scaler_and_flags_of_tensors_are_the_same():
    results = []
    for forget in (False, True):
        params = make_params((f32, bf16))
        optimizer = akopt.AdamW([*zip("abcdefghijklmnop", params, strict=True)], lr=0.1)
        scaler = ak.GradScaler("cpu", init_scale=8.0, max_consecutive_skips=2)
        scaler.scale(torch.ones(()))
        seen = []
        for number in range(8):
            set_grads(params, number)
            for i in {3: [3], 5: [3], 6: [4, 11]}.get(number, []):
                params[i].grad[(-1,) * params[i].dim()] = torch.inf
            if forget:
                optimizer._plan.forget()
            scaler.step(optimizer, max_norm=1.0)
            try:
                scaler.update()
            except RuntimeError as error:
                seen.append(str(error))
            seen.append((scaler.last_grad_norm.item(), scaler.get_scale(), scaler.last_step_skipped))
        results.append((seen, [p.tolist() for p in params], [s["step"].item() for s in optimizer.state.values()]))
    assert str(results[0]) == str(results[1])
    assert results[0][0][3][2] is True
    assert any("2 of 16 gradients were infinite or NaN: e; l" in str(entry) for entry in results[0][0])


# ---- gradients that change ----


def grads_of(dtype):
    def assign(params, number):
        for p in params:
            p.grad, p.grad_dtype = None, None  # torch: any
        set_grads(params, number, dtype)

    return assign


def test_gradients_of_another_dtype():
    pair = Pair(dtypes=(f32, bf16))
    for number, (dtype, hit) in enumerate([(bf16, False), (bf16, True), (f16, False), (f32, False), (f32, True)], 3):
        pair.check_step(number, hit=hit, grads=grads_of(dtype))


def test_gradients_that_are_not_what_is_in_memory():
    def negated(params, number):
        set_grads(params, number)
        params[3].grad = torch._neg_view(params[3].grad)

    pair = Pair(warm=False)
    for number in range(4):
        pair.check_step(number, hit=False, grads=negated)
    pair.check_step(4)
    pair.check_step(5, hit=True)
    pair.check_step(6, hit=False, grads=negated)


def test_gradients_with_other_strides_are_copied_into_order(caplog):
    def transposed(params, number):
        set_grads(params, number)
        params[0].grad = params[0].grad.t().contiguous().t()

    pair = Pair()
    with caplog.at_level(logging.WARNING, "amp_kernels"):
        for number in (3, 4, 5):
            pair.check_step(number, hit=False, grads=transposed)
            assert cached(pair.fast) is None  # making it would cost more than it saves
    assert any("copies gradients" in message for message in caplog.messages)
    pair.check_step(6)
    pair.check_step(7, hit=True)


def test_a_gradient_of_another_size_is_refused():
    """In the same memory with the same strides: the kernel, which goes by the parameter's size, would read past its end."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = warmed(params)
    before = [p.detach().clone() for p in params]
    params[1].grad.resize_(4)
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_gradients_that_stay_in_place_and_move():
    def in_place(params, number):
        for p in params:
            p.grad.mul_(number)

    pair = Pair()
    pair.check_step(3, hit=True, grads=in_place)
    pair.both(lambda optimizer, _: optimizer.zero_grad(set_to_none=False))
    pair.check_step(4, hit=True, grads=lambda *_: None)
    pair.both(lambda optimizer, _: optimizer.zero_grad(set_to_none=True))
    assert pair.fast.step() is None  # nothing to do
    pair.check_step(5, hit=False)


@pytest.mark.parametrize("which", [slice(0, 1), slice(3, 4), slice(2, 5), slice(0, 5)])
def test_gradients_that_come_and_go(which):
    def partial(params, number):
        set_grads(params, number)
        for p in params[which]:
            p.grad = None

    pair = Pair(groups=2)
    pair.check_recovery(3, grads=partial)
    pair.check_recovery(6)


def test_memory_of_a_freed_gradient_is_never_read():
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(3)]
    optimizer = akopt.SGD(params, lr=1.0)
    for value in range(8):
        fill(params, float(value))
        optimizer.step()
        for p in params:
            p.grad = None
        gc.collect()
        rubbish = [torch.full((64,), torch.nan) for _ in range(6)]  # takes the freed memory
        assert all(torch.equal(p, torch.full((64,), -float(value * (value + 1) // 2))) for p in params)
        del rubbish


def test_an_optimizer_that_its_parameter_reaches_is_freed():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = warmed([p])
    assert cached(optimizer) is not None
    p.owner = optimizer
    gone = weakref.ref(optimizer), weakref.ref(p)
    del p, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_no_gradient_is_kept_alive():
    p = torch.nn.Parameter(torch.ones(3))
    warmed([p])
    grad = weakref.ref(p.grad)
    p.grad = None
    gc.collect()
    assert grad() is None


# ---- parameters, groups and state that change ----


def other_memory(optimizer, params):
    params[3].data = params[3].data.clone() + 1  # as large, elsewhere


def other_dtype(optimizer, params):
    for p in params:
        p.grad = None
        p.data = p.data.half()


def replaced(optimizer, params):
    optimizer.state[params[0]] = {k: v.clone() * 2 for k, v in optimizer.state[params[0]].items()}


def removed(optimizer, params):
    del optimizer.state[params[0]]


def exchanged(optimizer, params):
    state = optimizer.state
    p, q = params[3], params[5]
    both = {k: v.clone() for k, v in state[p].items()}
    state[p] = {k: v + 1 for k, v in both.items()}
    state[q] = {k: v * 3 for k, v in state[q].items()}


def crossed(optimizer, params):
    """The same dicts in the same order, under other keys."""
    one, other = optimizer.state.pop(params[6]), optimizer.state.pop(params[7])
    optimizer.state[params[7]], optimizer.state[params[6]] = one, other


def cleared(optimizer, params):
    optimizer.state.clear()


def loaded(optimizer, params):
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        values["exp_avg"] *= 0.5
    optimizer.load_state_dict(saved)


def another_dict(optimizer, params):
    optimizer.state = type(optimizer.state)(dict, {p: dict(v) for p, v in optimizer.state.items()})
    replaced(optimizer, params)


def group_added(optimizer, params):
    params.append(torch.nn.Parameter(torch.ones(9)))
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})


def parameters_swapped(optimizer, params):
    members = optimizer.param_groups[0]["params"]
    members[0], members[1] = members[1], members[0]


def parameter_removed(optimizer, params):
    optimizer.param_groups[0]["params"].pop(0)


def moved_to_the_next_group(optimizer, params):
    """The parameters in order stay the same."""
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())
    optimizer.param_groups[1]["lr"] = 0.5


CHANGES = [
    other_memory, other_dtype, replaced, removed, exchanged, crossed, cleared, loaded, another_dict, group_added,
    parameters_swapped, parameter_removed, moved_to_the_next_group,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    pair = Pair(groups=2)
    old = [p.detach() for p in pair.params]
    pair.both(change)
    kept = [p.clone() for p in old]
    pair.check_recovery()
    if change in (other_memory, other_dtype):  # memory that the parameter has left is not written
        moved = slice(3, 4) if change is other_memory else slice(None)
        assert all(torch.equal(p, q) for p, q in zip(old[moved], kept[moved], strict=True))


def test_seeded_rounding_follows_the_number_of_a_parameter():
    pair = Pair("SGD", {}, (bf16,), groups=2, master_weights="none")
    pair.both(lambda optimizer, params: optimizer.param_groups.reverse())
    pair.check_step(3, hit=False)


def test_parameter_data_with_other_strides_at_the_same_address():
    """And a gradient that was there before: elements must be matched by position, not by memory."""

    def stale(params, number):
        for p in params[:3] + params[4:]:
            p.grad.add_(number)

    def transpose(optimizer, params):
        params[5].data = params[5].data.as_strided((7, 6), (6, 1))

    pair = Pair()
    address = pair.params[5].data_ptr()
    pair.both(transpose)
    assert pair.params[5].data_ptr() == address
    pair.check_step(3, hit=False, grads=stale)
    pair.check_step(4, hit=False, grads=stale)  # the gradient is copied into order


def test_several_chunks():
    """More parameters than are looked at at once."""
    count = 515
    params = [torch.nn.Parameter(torch.full((i % 5 + 1,), float(i))) for i in range(count)]
    optimizer = akopt.SGD(params, lr=1.0)
    for step in range(5):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, float(i))
        if step == 4:
            assert cached(optimizer) is not None
            params[-1].data = params[-1].data.clone()
        optimizer.step()
        assert all(torch.equal(p, torch.full_like(p, -float(step) * i)) for i, p in enumerate(params))
