"""Steps that only read addresses anew equal steps that look at everything, whatever changes in between."""

import copy
import gc
import logging

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

from .pairs import Pair, bf16, f16, f32, make_params, set_grads

OPTIMIZERS = [
    ("AdamW", {"lr": 1e-2, "amsgrad": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    ("SGD", {"lr": 1e-2}),
    ("Lion", {"lr": 1e-3}),
    ("LAMB", {"lr": 1e-2}),
]


# ---- the same bits ----


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize("mode", ["fp32", "split", "none", "none_rne"])
def test_resolved_steps_have_the_bits_of_others(name, options, mode):
    pair = Pair(
        name, options, (f32, bf16, f16), groups=2, master_weights=mode, shadow_dtype=bf16, ema_decay=0.9,
        max_grad_norm=0.5, skip_nonfinite=True,
    )  # fmt: skip
    pair.warm()
    pair.step(3, resolved=True)
    assert ak.ops._shadows.fresh_shadow(pair.params[0], bf16) is not None


def test_scaler_and_blame_are_the_same():
    results = []
    for forget in (False, True):
        params = make_params((f32, bf16))
        optimizer = akopt.AdamW(params, lr=0.1)
        scaler = ak.GradScaler("cpu", init_scale=8.0, max_consecutive_skips=3)
        scaler.scale(torch.ones(()))
        seen = []
        for number in range(7):
            set_grads(params, number)
            if number in (3, 5):
                params[3].grad[17] = torch.inf
            if forget:
                optimizer._cached_step = None
            scaler.step(optimizer, max_norm=1.0)
            blamed = [flags.tolist() for _, _, flags in scaler._nonfinite]
            scaler.update()
            seen.append((scaler.last_grad_norm.item(), scaler.get_scale(), scaler.last_step_skipped, blamed))
        assert (optimizer._cached_step is not None) == (not forget) or forget
        results.append((seen, [p.tolist() for p in params], [s["step"].item() for s in optimizer.state.values()]))
    assert str(results[0]) == str(results[1])
    assert results[0][0][3][2] is True


def test_groups_do_not_share_their_numbers():
    """What elements have in common is derived once for parameters of one group and step count."""

    def run(*which):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in which]
        optimizer = akopt.AdamW([{"params": [p], "lr": 0.1 * (i + 1)} for p, i in zip(params, which, strict=True)])
        for _ in range(4):
            for p in params:
                p.grad = torch.linspace(-1, 1, 5)
            optimizer.step()
        return params

    for p, i in zip(run(0, 1, 2), range(3), strict=True):
        assert torch.equal(p, *run(i))


# ---- everything that may change ----


def grads_of(dtype):
    def assign(params, number):
        for p in params:
            p.grad, p.grad_dtype = None, None  # torch: any
        set_grads(params, number, dtype)

    return assign


def test_gradients_of_another_dtype():
    pair = Pair(dtypes=(f32, bf16))
    pair.warm()
    pair.step(3, resolved=False, grads=grads_of(bf16))
    pair.step(4, resolved=True, grads=grads_of(bf16))
    pair.step(5, resolved=False, grads=grads_of(f16))
    pair.step(6, resolved=False, grads=grads_of(f32))
    pair.step(7, resolved=True, grads=grads_of(f32))


def test_gradients_that_are_not_what_is_in_memory():
    def negated(params, number):
        set_grads(params, number)
        params[3].grad = torch._neg_view(params[3].grad)

    pair = Pair("AdamW", {"lr": 0.1})
    for number in range(4):
        pair.step(number, resolved=False, grads=negated)
    pair.step(4)
    pair.step(5, resolved=True)
    pair.step(6, resolved=False, grads=negated)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_main_grads(set_to_none):
    """fp32 gradients of bf16 weights, in memory that stays."""
    ends = []
    for forget in (False, True):
        torch.manual_seed(3)
        model = ak.nn.MLP(16, 32, dtype=bf16)
        optimizer = akopt.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
        with ak.nn.accumulate_fp32(model):
            for number in range(5):
                for _ in range(2):
                    model(torch.full((4, 16), 0.1 * number - 0.3, dtype=bf16)).float().square().sum().backward()
                if forget:
                    optimizer._cached_step = None
                before = optimizer._cached_step
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert forget or (before is not None and optimizer._cached_step is before)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_gradients_with_other_strides_are_copied_into_order(caplog):
    def transposed(params, number):
        set_grads(params, number)
        params[0].grad = params[0].grad.t().contiguous().t()

    pair = Pair()
    pair.warm()
    with caplog.at_level(logging.WARNING, "amp_kernels"):
        for number in (3, 4, 5):
            pair.step(number, resolved=False, grads=transposed)
            assert pair.fast._cached_step is None  # making it would cost more than it saves
    assert any("copies gradients" in message for message in caplog.messages)
    pair.step(6)
    pair.step(7, resolved=True)


def test_gradients_that_stay_in_place_and_move():
    def in_place(params, number):
        for p in params:
            p.grad.mul_(number)

    pair = Pair()
    pair.warm()
    pair.step(3, resolved=True, grads=in_place)
    pair.both(lambda optimizer, _: optimizer.zero_grad(set_to_none=False))
    pair.step(4, resolved=True, grads=lambda *_: None)
    pair.both(lambda optimizer, _: optimizer.zero_grad(set_to_none=True))
    assert pair.fast.step() is None  # nothing to do
    pair.step(5, resolved=False)


def test_memory_of_a_freed_gradient_is_never_read():
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(3)]
    optimizer = akopt.SGD(params, lr=1.0)
    for value in range(8):
        for p in params:
            p.grad = torch.full((64,), float(value))
        optimizer.step()
        for p in params:
            p.grad = None
        gc.collect()
        rubbish = [torch.full((64,), torch.nan) for _ in range(6)]  # takes the freed memory
        assert all(torch.equal(p, torch.full((64,), -float(value * (value + 1) // 2))) for p in params)
        del rubbish


@pytest.mark.parametrize("which", [0, 3, slice(2, 5), slice(0, 5)])
def test_gradients_that_come_and_go(which):
    def partial(params, number):
        set_grads(params, number)
        for p in params[which] if isinstance(which, slice) else [params[which]]:
            p.grad = None

    pair = Pair("AdamW", {"lr": 0.1}, groups=2)
    pair.warm()
    pair.step(3, resolved=False, grads=partial)
    pair.step(4, grads=partial)
    pair.step(5, resolved=True, grads=partial)
    pair.step(6, resolved=False)
    pair.step(7)
    pair.step(8, resolved=True)


def test_parameter_data_replaced():
    pair = Pair()
    pair.warm()

    def swap(optimizer, params):
        params[3].data = params[3].data.clone() + 1  # as large, elsewhere

    pair.both(swap)
    old = pair.params[3].data
    pair.both(swap)
    kept = old.clone()
    pair.step(3, resolved=False)
    assert torch.equal(old, kept)
    pair.step(4)
    pair.step(5, resolved=True)


def test_parameter_data_with_other_strides_at_the_same_address():
    """And a gradient that was there before: elements must be matched by position, not by memory."""

    def stale(params, number):
        for p in params[:3] + params[4:]:
            p.grad.add_(number)

    def transpose(optimizer, params):
        params[5].data = params[5].data.as_strided((7, 6), (6, 1))

    pair = Pair()
    pair.warm()
    address = pair.params[5].data_ptr()
    pair.both(transpose)
    assert pair.params[5].data_ptr() == address
    pair.step(3, resolved=False, grads=stale)
    pair.step(4, resolved=False, grads=stale)  # the gradient is copied into order


def test_model_converted_between_steps():
    def to_half(optimizer, params):
        for p in params:
            p.grad = None
            p.data = p.data.half()

    pair = Pair("AdamW", {"lr": 0.1})
    pair.warm()
    pair.both(to_half)
    pair.step(3, resolved=False)
    assert all("master" in pair.fast.state[p] for p in pair.params)
    pair.step(4)
    pair.step(5, resolved=True)


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
    optimizer.state[params[0]] = {k: v * 2 for k, v in optimizer.state[params[0]].items()}


@pytest.mark.parametrize("how", [replaced, removed, exchanged, crossed, cleared, loaded, another_dict])
def test_state_changed_by_the_user(how):
    pair = Pair("AdamW", {"lr": 0.1})
    pair.warm()
    pair.both(how)
    pair.step(3, resolved=False)
    pair.step(4)
    pair.step(5, resolved=True)


def test_groups_and_parameters_added_and_removed():
    pair = Pair("AdamW", {"lr": 0.1})
    pair.warm()

    def add(optimizer, params):
        params.append(torch.nn.Parameter(torch.ones(9)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})

    def remove(optimizer, params):
        optimizer.param_groups[0]["params"].remove(next(p for p in params if p is params[0]))

    def swap(optimizer, params):
        members = optimizer.param_groups[0]["params"]
        members[0], members[1] = members[1], members[0]

    for number, (change, resolves) in enumerate([(add, True), (swap, True), (swap, True)]):
        pair.both(change)
        pair.step(10 * number, resolved=False)
        pair.step(10 * number + 1)
        pair.step(10 * number + 2, resolved=resolves)
    pair.both(lambda optimizer, _: optimizer.param_groups[0]["params"].pop(0))
    pair.step(40, resolved=False)


def test_parameter_moved_to_the_next_group():
    """The parameters in order stay the same."""

    def move(optimizer, params):
        first, second = (group["params"] for group in optimizer.param_groups)
        second.insert(0, first.pop())

    pair = Pair("SGD", {"lr": 0.1}, groups=2)
    pair.both(lambda optimizer, _: optimizer.param_groups[1].update(lr=0.5))
    pair.warm()
    pair.both(move)
    pair.step(3, resolved=False)


def test_seeded_rounding_follows_the_number_of_a_parameter():
    pair = Pair("SGD", {"lr": 0.1}, (bf16,), groups=2, master_weights="none")
    pair.warm()
    pair.both(lambda optimizer, params: optimizer.param_groups.reverse())
    pair.step(3, resolved=False)
