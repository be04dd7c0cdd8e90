"""Skipped steps in a row: the counters, what the host hears and when, the abort and the tensors that it names."""

import pytest
import torch

from amp_kernels.amp import GradScaler
from amp_kernels.amp._readback import AsyncReader
from amp_kernels.amp._skips import SkipRecord
from amp_kernels.optim import SGD

from ..helpers.ops import Ops
from .scaling import EACH, is_ours, iterate, params


def record(limit=None):
    skips = SkipRecord(limit)
    skips.create_counters(torch.device("cpu"))
    return skips


def test_flags_that_were_added_up_count_once():
    """Somebody's all_reduce(SUM) over ranks makes 2.0 of two overflows."""
    skips = record()
    for _ in range(2):
        skips.end_iteration([torch.tensor(2.0)], {}, False, torch.tensor(8.0))
    assert skips.counts() == (2, 2)


def test_a_flag_from_elsewhere_is_said_to_be_one():
    """An all-reduce over ranks, for example."""
    with pytest.raises(RuntimeError, match="No gradient here was infinite or NaN"):
        record(limit=1).end_iteration([torch.tensor(1.0)], {}, False, torch.tensor(8.0))


@EACH
@pytest.mark.parametrize("explicit", [False, True])
def test_the_abort_names_the_tensors_of_the_last_skip(make, explicit):
    """With names where the optimizer knows them, else by group, place and shape; the update itself is complete."""
    weights = params((2, 3), (4,), (5,))
    weights[1].requires_grad_(True)
    optimizer = make([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}])
    scaler = GradScaler("cpu", init_scale=1024.0, max_consecutive_skips=3)
    for bad in ({0}, {0}, (), {1}, {0, 1}):
        iterate(scaler, optimizer, bad, explicit)
    with pytest.raises(RuntimeError) as error:
        iterate(scaler, optimizer, {0, 2}, explicit)
    assert str(error.value) == (
        "GradScaler: 3 steps in a row were skipped (max_consecutive_skips is 3), and the loss scale is 32.0. In the "
        "last of them 2 of 3 gradients were infinite or NaN: group 0, parameter 0, shape [2, 3]; group 1, parameter 0, "
        "shape [5]"
    )
    with pytest.raises(RuntimeError, match=r"4 steps in a row.*1 of 3 gradients.*group 0, parameter 1, shape \[4\]$"):
        iterate(scaler, optimizer, {1}, explicit)
    for bad in ((), {0}, {0}):
        iterate(scaler, optimizer, bad, explicit)  # a step was taken, so the count starts over
    assert scaler.consecutive_skips.item() == 2


@EACH
def test_the_abort_uses_the_names_of_named_parameters(make):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer, scaler = make(model.named_parameters()), GradScaler("cpu", max_consecutive_skips=1)
    iterate(scaler, optimizer)
    with pytest.raises(RuntimeError, match=r"2 of 4 gradients were infinite or NaN: 0.bias; 1.weight$"):
        iterate(scaler, optimizer, {1, 2})


def test_long_lists_are_cut():
    optimizer, scaler = SGD(params(*[(1,)] * 30), lr=0.1), GradScaler("cpu", max_consecutive_skips=1)
    with pytest.raises(RuntimeError, match=r"30 of 30 .*parameter 9, shape \[1\]; and 20 more$"):
        iterate(scaler, optimizer, range(30))


def test_a_parameter_without_gradient_does_not_shift_the_names():
    weights = params(1, 2, 3)
    optimizer, scaler = SGD(weights, lr=0.1), GradScaler("cpu", max_consecutive_skips=1)
    scaler.scale(torch.ones(()))
    weights[0].grad, weights[2].grad = torch.ones(1), torch.full((3,), torch.inf)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"1 of 2 .*: group 0, parameter 2, shape \[3\]$"):
        scaler.update()


@EACH
@pytest.mark.parametrize("limit", [None, 9])
def test_the_option_costs_one_more_read_of_other_optimizers(make, limit):
    optimizer, scaler = make(params(2)), GradScaler("cpu", max_consecutive_skips=limit)
    ours = is_ours(optimizer)
    checks = []
    for _ in range(3):
        with Ops() as ops:
            iterate(scaler, optimizer, {0})
        checks.append(ops.count("check_and_norm"))
    fused = "fused" in optimizer.defaults and optimizer.defaults["fused"]
    assert checks == [(1 if ours or fused else 0) + (limit is not None and not ours)] * 3


@pytest.mark.parametrize(
    ("limit", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (float("nan"), TypeError)]
)
def test_bad_limits(limit, error):
    with pytest.raises(error, match=f"GradScaler: max_consecutive_skips is {limit}"):
        GradScaler("cpu", max_consecutive_skips=limit)


# ---- on a device that is behind ----


def test_the_host_does_not_wait_and_hears_in_order(slow_device):
    (p,) = params(2)
    optimizer, scaler = SGD([p], lr=0.1), GradScaler("cpu")
    iterate(scaler, optimizer, {0})
    assert scaler.last_step_skipped is None  # not known yet, and not waited for
    iterate(scaler, optimizer)
    slow_device[1].done = True
    assert scaler.last_step_skipped is None  # the first comes first
    slow_device[0].done = True
    assert scaler.last_step_skipped is False
    assert scaler.skipped_steps.item() == 1


def test_the_abort_comes_late_and_speaks_of_the_right_iteration(slow_device):
    """Two overflows in a row, of which the host hears during the third iteration, a good one."""
    weights = params(1, 2)
    optimizer, scaler = SGD(weights, lr=0.1), GradScaler("cpu", max_consecutive_skips=2)
    iterate(scaler, optimizer, {0})
    iterate(scaler, optimizer, {1})
    before = [w.detach().clone() for w in weights]
    slow_device[0].done = slow_device[1].done = True
    with pytest.raises(RuntimeError, match=r"^GradScaler: 2 steps in a row.*: group 0, parameter 1, shape \[2\]$"):
        iterate(scaler, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights, strict=True))  # that step was taken
    iterate(scaler, optimizer)


def test_ranks_wait_for_the_answer_before_the_last_and_take_no_later_one(slow_device):
    """However fast each of their devices is, all then raise in the same iteration."""
    reader = AsyncReader()
    for i in range(3):
        reader.push(torch.tensor([float(i)]), i)
    slow_device[2].done = True  # a fast one has all answers already
    assert [note for _, note in reader.all_but_last()] == [0, 1]
    assert [note for _, note in reader.arrived()] == [2]
    assert [note for _, note in reader.all_but_last()] == []


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_reader_keeps_its_pinned_memory_and_events(monkeypatch):
    """And never hands out memory that a value is still on its way to, or that another dtype or device needs."""

    class Event:
        device, done = None, False

        def record(self, stream):
            self.device, self.done = stream, False
            events.append(self)

        def query(self):
            return self.done

    events, made, empty = [], [], torch.empty

    def pinned(shape, dtype, device, pin_memory):
        assert pin_memory
        made.append(empty(shape, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream or torch.device("cpu"))
    reader, stream, answers = AsyncReader(), None, []

    def push(value, dtype=torch.int64):
        reader.push(torch.tensor([value], dtype=dtype).as_subclass(OnGpu), f"of {value}")

    push(1)
    push(2)
    assert len(made) == 2
    events[0].done = True
    answers += reader.arrived()
    push(3)  # where 1 was
    for event in events[1:]:
        event.done = True
    answers += reader.arrived()
    assert answers == [([value], f"of {value}") for value in (1, 2, 3)]
    assert len(made) == 2
    push(0.5, torch.float32)
    assert [m.dtype for m in made[2:]] == [torch.float32]
    events[-1].done = True
    stream = torch.device("cuda", 1)
    assert list(reader.arrived()) == [([0.5], "of 0.5")]
    push(0.25, torch.float32)
    events[-1].done = True
    assert list(reader.arrived()) == [([0.25], "of 0.25")]
    push(0.75, torch.float32)
    assert len(made) == 4  # an event belongs to its device
