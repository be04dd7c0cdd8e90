"""Steps that only read addresses anew: numbers in the groups, errors, side effects, and what their ops refuse."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._dispatch import policy
from amp_kernels.ops import _blocks, check_and_norm
from amp_kernels.optim import _cached_step

from .pairs import Pair, bf16, f16, set_grads

# ---- numbers ----


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.5),
        ("lr", torch.tensor(0.25)),
        ("betas", (0.5, 0.75)),
        ("betas", [0.5, 0.75]),
        ("eps", 1e-3),
        ("weight_decay", 0.5),
        ("maximize", True),
        ("amsgrad", True),
        ("ema_decay", 0.5),
        ("decoupled_weight_decay", False),
    ],
)
def test_numbers_written_into_groups(key, value):
    pair = Pair("AdamW", {"lr": 0.1}, groups=2)
    pair.warm()
    pair.both(lambda optimizer, _: optimizer.param_groups[1].__setitem__(key, value))
    for number in range(3, 6):
        pair.step(number)
    pair.both(lambda optimizer, _: optimizer.param_groups[0].__setitem__(key, value))
    pair.step(6)


@pytest.mark.parametrize(("key", "on", "off"), [("amsgrad", True, False), ("ema_decay", 0.5, None)])
def test_state_switched_off(key, on, off):
    pair = Pair("AdamW", {"lr": 0.1, key: on}, groups=2)
    pair.warm()
    pair.both(lambda optimizer, _: optimizer.param_groups[1].__setitem__(key, off))
    pair.step(3)
    pair.step(4)


def test_numbers_under_other_keys():
    def exchange(optimizer, params):
        group = optimizer.param_groups[0]
        keys = {"eps": "weight_decay", "weight_decay": "eps"}
        items = [(keys.get(key, key), value) for key, value in group.items()]
        group.clear()
        group.update(items)

    pair = Pair("AdamW", {"lr": 0.1, "eps": 0.5, "weight_decay": 0.1})
    pair.warm()
    pair.both(exchange)
    pair.step(3)


def test_option_of_the_optimizer_changed():
    pair = Pair("SGD", {"lr": 0.1}, (bf16,), master_weights="none")
    pair.warm()
    pair.both(lambda optimizer, _: setattr(optimizer, "master_weights", "none_rne"))
    pair.step(3)


def test_values_changed_in_place():
    pair = Pair("AdamW", {"lr": 0.1, "betas": [0.9, 0.99]})
    pair.both(lambda optimizer, _: optimizer.param_groups[0].update(lr=torch.tensor(0.1), betas=[0.9, 0.99]))
    pair.warm()

    def write(optimizer, params):
        optimizer.param_groups[0]["lr"].fill_(0.5)
        optimizer.param_groups[0]["betas"][0] = 0.25

    pair.both(write)
    pair.step(3, resolved=True)


def test_schedulers_do_not_cost_the_memory():
    pair = Pair("AdamW", {"lr": 0.1}, groups=2)
    pair.warm()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.fast, pair.slow)]
    for number in range(3, 6):
        settings = pair.fast._hyper_parameters
        pair.step(number, resolved=True)
        assert pair.fast._hyper_parameters is settings or number == 3  # the scheduler adds a key
        for scheduler in schedulers:
            scheduler.step()
    assert pair.fast.param_groups[0]["lr"] == 0.1 / 8


@pytest.mark.parametrize(
    ("key", "value"), [("lr", float("nan")), ("eps", float("nan")), ("betas", (0.9, float("nan")))]
)
def test_nan_is_refused_by_resolved_steps(key, value):
    pair = Pair()
    pair.warm()
    before = [p.clone() for p in pair.params]
    pair.fast.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"{key} is .*nan"):
        pair.fast.step()
    assert all(torch.equal(p, q) for p, q in zip(pair.params, before, strict=True))


# ---- errors and side effects ----


def test_versions_are_bumped():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = akopt.AdamW([p])
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer._cached_step is not None
    state = optimizer.state[p]
    loss = (p * p).sum() + (p * state["exp_avg"]).sum()
    versions = p._version, state["exp_avg"]._version, state["step"]._version
    optimizer.step()
    assert (p._version, state["exp_avg"]._version, state["step"]._version) > versions
    assert state["exp_avg"]._version > versions[1]
    assert state["step"]._version > versions[2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_call_below_autograd_bumps_versions():
    scale, tracker, left = torch.tensor(8.0), torch.zeros((), dtype=torch.int32), torch.ones((), dtype=torch.int32)
    versions = [t._version for t in (scale, tracker, left)]
    ak.ops.update_scale.update_scale_(scale, tracker, left, [torch.tensor(0.0)])
    assert [t._version for t in (scale, tracker, left)] == [version + 1 for version in versions]


def test_shadow_of_replaced_data_after_a_skipped_step():
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = akopt.AdamW([p], shadow_dtype=bf16, skip_nonfinite=True)
    for _ in range(3):
        p.grad = torch.ones(5)
        optimizer.step()
    p.data = torch.full((5,), 3.0)
    p.grad = torch.full((5,), torch.inf)
    optimizer.step()
    assert torch.equal(p, torch.full((5,), 3.0))
    assert torch.equal(ak.ops._shadows.fresh_shadow(p, bf16), p.to(bf16))


def test_sparse_gradients_still_raise():
    embedding = torch.nn.Embedding(5, 4)
    optimizer = akopt.SGD(embedding.parameters(), lr=0.1)
    for _ in range(3):
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._cached_step is not None
    embedding.sparse = True
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.clone()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_zero_grads():
    pair = Pair("AdamW", {"lr": 0.1}, zero_grads=True)
    pair.warm()
    assert all(not p.grad.any() for p in pair.params)


def test_other_backends_get_lists(monkeypatch):
    pair = Pair()
    pair.warm()
    reference, calls = pair.fast._op.reference, []
    monkeypatch.setattr(pair.fast._op, "reference", lambda *args: (calls.append(len(args[0])), reference(*args))[1])
    with ak.backend("reference"):
        for number in range(3, 6):
            before = pair.fast._cached_step
            set_grads(pair.params, number)
            pair.fast.step()
            assert (pair.fast._cached_step is before) == (number > 3)
    assert calls == [len(pair.params)] * 3
    for number in range(3, 6):
        set_grads(pair.slow_params, number)
        pair.slow.step()
    pair.check()


def test_dispatch_modes_see_lists():
    calls = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "amp_kernels":
                calls.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    pair = Pair()
    pair.warm()
    with Mode():
        for number in range(4):
            set_grads(pair.params, number)
            pair.fast.step()
    assert calls == [len(pair.params)] * 4


def test_no_gradient_is_kept_alive():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = akopt.AdamW([p])
    for _ in range(4):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optimizer._cached_step is not None
    grad = weakref.ref(p.grad)
    p.grad = None
    gc.collect()
    assert grad() is None


def test_copies_and_pickles_leave_addresses_behind():
    pair = Pair()
    pair.warm()
    twin = copy.deepcopy(pair.fast)
    assert twin._cached_step is None
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    before = [p.clone() for p in pair.params]
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(pair.params, before, strict=True))


def test_several_chunks():
    """More parameters than are looked at at once."""
    count = 2 * _cached_step._Chunk.SIZE + 3
    params = [torch.nn.Parameter(torch.full((i % 5 + 1,), float(i))) for i in range(count)]
    optimizer = akopt.SGD(params, lr=1.0)
    for _ in range(4):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, float(i))
        optimizer.step()
    assert optimizer._cached_step is not None
    assert all(torch.equal(p, torch.full_like(p, -3.0 * i)) for i, p in enumerate(params))
    last = params[-1]
    last.data = last.data.clone()
    optimizer.step()
    assert torch.equal(last, torch.full_like(last, -4.0 * (count - 1)))


# ---- without torch's test of tensors ----


@pytest.mark.parametrize("private", [True, False])
def test_alike(monkeypatch, private):
    if not private:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    base = [torch.zeros(4, 4), torch.zeros(3, dtype=bf16)]
    test = _cached_step.tensor_guard(base)
    assert test([torch.ones(4, 4), torch.ones(3, dtype=bf16)])
    others = [
        torch.zeros(4, 4).t(), torch.zeros(4, 5)[:, :4], torch.zeros(4, 4, dtype=f16), torch.zeros(16), None,
        torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4, device="meta"), torch.nn.Parameter(torch.zeros(4, 4)),
    ]  # fmt: skip
    for other in others:
        assert not test([other, base[1]])
    assert not test([base[1], base[0]])
    if private:
        pair = Pair()
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
        pair.warm()


# ---- what the ops still refuse ----


def table_of(params):
    optimizer = akopt.AdamW(params, lr=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    ((batch, grads, table),) = optimizer._collect()
    settings = optimizer._current_hyper_parameters()
    tail = ([], None, None, None, [0.1], *settings.hyper, settings.decays, settings.flags, 0.0, 0)
    return grads, table.tensor.clone(), optimizer._state_of(batch, settings), tail


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 0, "params\\[1\\] is at address 0"),
        (1, 2, "grads\\[1\\] is at address 2"),
        (2, 1 << 40, "needs 1099511627776 elements"),
        (2, -1, "has -1 elements"),
        (3, 7, "params\\[1\\] must have dtype float16, bfloat16, float32; got float64"),
        (4, 3, "grads\\[1\\] must have dtype"),
        (4, 261, "grads\\[1\\] must have dtype"),
        (5, 1, "names block 1; there are 1"),
        (6, -16, "from element -16"),
        (6, 32, "from element 32"),
        (7, 2, "steps"),
        (8, 1, "names group 1"),
        (9, 1 << 32, "index 4294967296"),
    ],
)
@pytest.mark.skipif(not policy.built("adamw_").cpu, reason="the C++ library is not built")
def test_rows_are_checked(column, value, message):
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(16))]
    _, table, state, tail = table_of(params)
    table[1, column] = value
    before = [p.clone() for p in params]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.amp_kernels.adamw_([], [], *state, table, *tail)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.skipif(not policy.built("check_and_norm").cpu, reason="the C++ library is not built")
def test_check_and_norm_reads_the_table():
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(16))]
    grads, table, *_ = table_of(params)
    op = torch.ops.amp_kernels.check_and_norm
    for options in ({}, {"per_tensor": True}, {"norm_type": float("inf")}):
        for one, other in zip(op(grads, None, **options), op(grads[:1], None, table, **options), strict=True):
            assert torch.equal(one, other)
    for wrong in (table[:, :9], table.int(), table.t().contiguous()[:3]):
        with pytest.raises(RuntimeError, match="check_and_norm: table must"):
            op(grads[:1], None, wrong)
    with pytest.raises(NotImplementedError, match="only the compiled kernels"):
        check_and_norm.op.reference(grads[:1], None, table)
    assert _blocks.TABLE_DTYPES[torch.float64] == 7
