"""SkipAwareScheduler: as many scheduler steps as optimizer steps, with torch's schedulers, early or late."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from amp_kernels.amp import GradScaler, SkipAwareScheduler
from amp_kernels.optim import SGD

from .scaling import EACH, iterate, params

SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.StepLR(o, 2)]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12, cycle_momentum=False),
}
BAD = (1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1)


def made(schedule=lambda o: lr_scheduler.StepLR(o, 100), **options):
    """An optimizer, a scaler and a schedule."""
    optimizer, scaler = SGD(params(2), lr=1.0), GradScaler("cpu", **options)
    return optimizer, scaler, SkipAwareScheduler(schedule(optimizer), scaler)


def run(parts, *bad):
    """Iterations; those that are true overflow."""
    optimizer, scaler, scheduler = parts
    for overflow in bad:
        iterate(scaler, optimizer, {0} if overflow else ())
        scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@EACH
def test_the_learning_rate_follows_the_steps_taken(make, schedule):
    """Without torch's warning about the order, though the first steps are skipped; on the CPU at once."""
    optimizer, other = make(params(2)), make(params(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")  # of torch's SequentialLR
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*")
        scaler = GradScaler("cpu")
        scheduler, reference = SkipAwareScheduler(schedule(optimizer), scaler), schedule(other)
        for bad in BAD:
            iterate(scaler, optimizer, {0} if bad else ())
            scheduler.step()
            if not bad:
                other.step()
                reference.step()
            assert scheduler.get_last_lr() == reference.get_last_lr()
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert scheduler.state_dict().keys() == reference.state_dict().keys()
    assert scheduler.last_epoch == 6 if hasattr(reference, "last_epoch") else True


def test_late_answers_move_it_later_and_draining_makes_the_total_exact(slow_device):
    *_, scheduler = parts = made(SCHEDULES["lambda"])
    epochs = []
    for i, bad in enumerate(BAD):
        run(parts, bad)
        epochs.append(scheduler.last_epoch)
        for event in slow_device[: 2 * i]:  # one iteration behind
            event.done = True
    taken = [sum(not b for b in BAD[:i]) for i in range(len(BAD))]
    assert epochs[1:] == [0, *taken[1:-1]]
    scheduler.drain()
    assert scheduler.last_epoch == 6
    scheduler.drain()
    assert scheduler.last_epoch == 6


def test_state_dict_drains_and_is_the_schedulers_own(slow_device):
    *_, scheduler = parts = made(lambda o: lr_scheduler.ExponentialLR(o, 0.5))
    run(parts, 0, 1, 0)
    assert scheduler.last_epoch == 0
    state = scheduler.state_dict()
    assert state["last_epoch"] == 2
    plain = lr_scheduler.ExponentialLR(SGD(params(1), lr=1.0), 0.1)
    plain.load_state_dict(state)
    assert plain.state_dict() == state
    run(parts, 0)  # due, but it belongs to what is replaced
    scheduler.load_state_dict(state)
    scheduler.drain()
    assert scheduler.state_dict() == state
    run(parts, 0)
    scheduler.drain()
    assert scheduler.last_epoch == 3


def test_plateau_gets_the_metric_of_the_iteration(slow_device):
    """A late answer is used with the metric that came with it; the metrics of skipped iterations are not seen."""
    optimizer, scaler = SGD(params(2), lr=1.0), GradScaler("cpu")
    inner = lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
    seen = []
    inner.step = lambda metrics, epoch=None: seen.append((metrics, epoch))
    scheduler = SkipAwareScheduler(inner, scaler)
    for i, bad in enumerate((0, 1, 0, 0)):
        iterate(scaler, optimizer, {0} if bad else ())
        scheduler.step(float(i), epoch=i)
    assert seen == []
    scheduler.drain()
    assert seen == [(0.0, 0), (2.0, 2), (3.0, 3)]


def test_two_optimizers_and_several_schedulers():
    """Each follows its own optimizer, though the scaler counts an iteration with any skipped step."""
    first, second, scaler = SGD(params(2), lr=1.0), torch.optim.SGD(params(2), lr=1.0), GradScaler("cpu")
    schedulers = [SkipAwareScheduler(lr_scheduler.StepLR(o, 100), scaler) for o in (first, second, second)]
    for bad in ((1, 0), (0, 0), (1, 0), (0, 1)):
        scaler.scale(torch.ones(()))
        for optimizer, overflow in zip((first, second), bad, strict=True):
            optimizer.param_groups[0]["params"][0].grad = torch.full((2,), torch.inf if overflow else 1.0)
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
    assert [s.last_epoch for s in schedulers] == [2, 3, 3]
    assert scaler.skipped_steps.item() == 3
    late = SkipAwareScheduler(lr_scheduler.StepLR(second, 100), scaler)  # steps before it do not count
    iterate(scaler, first)
    late.step()
    assert late.last_epoch == 0
    iterate(scaler, second)
    late.step()
    assert late.last_epoch == 1


def test_once_an_epoch_it_advances_if_any_step_was_taken():
    optimizer, scaler, scheduler = made(lambda o: lr_scheduler.StepLR(o, 1, 0.5))
    for epoch in ((0, 0, 1), (1, 1, 1), (1, 0, 1)):
        for bad in epoch:
            iterate(scaler, optimizer, {0} if bad else ())
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_a_resumed_scaler_does_not_disturb_it():
    _, scaler, scheduler = parts = made()
    run(parts, 0)
    scaler.load_state_dict({**scaler.state_dict(), "_skipped_steps": 50})
    run(parts, 1, 0, 0)
    assert scheduler.last_epoch == 3


def test_gradients_that_were_unscaled_but_never_stepped_count_for_nothing():
    optimizer, scaler, scheduler = parts = made()
    run(parts, 0)
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    scaler.unscale_(optimizer)
    scaler.update()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_disabled_scaler_skips_nothing():
    optimizer, scaler, scheduler = made(lambda o: lr_scheduler.StepLR(o, 1, 0.5), enabled=False)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]
    assert scheduler.state_dict()["last_epoch"] == 2


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda parts: pickle.loads(pickle.dumps(parts))}


@pytest.mark.filterwarnings("ignore:.*has been overridden")  # torch's, of its own schedulers' copies
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("owed", [False, True])
def test_a_copy_goes_on(slow_device, copied, owed):
    """With what is still due; ``owed``: the copy is made after an update, and its first call answers that one."""
    optimizer, scaler, scheduler = original = made(lambda o: lr_scheduler.StepLR(o, 1, 0.5))
    run(original, 0, 1, 0)
    if owed:
        iterate(scaler, optimizer)
    assert scheduler.last_epoch == 0
    for optimizer, scaler, scheduler in (copied(original), original, copied(copied(original))):
        assert scheduler._optimizer is scheduler.optimizer is optimizer
        if owed:
            scheduler.step()
        scheduler.drain()
        assert scheduler.last_epoch == 2 + owed
        run((optimizer, scaler, scheduler), 1, 0, 1)
        scheduler.drain()
        assert scheduler.last_epoch == 3 + owed
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (3 + owed)


def test_a_copy_beside_the_same_scaler():
    optimizer, scaler, scheduler = parts = made()
    run(parts, 0)
    twin = copy.copy(scheduler)
    run((optimizer, scaler, twin), 1)
    assert twin.last_epoch == 1
    run((optimizer, scaler, twin), 0)
    assert twin.last_epoch == 2


@pytest.mark.filterwarnings("ignore:.*has been overridden")  # torch's, of its own schedulers' copies
def test_a_copy_under_a_disabled_scaler():
    scheduler = copy.deepcopy(made(enabled=False)[2])
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_misuse():
    optimizer, scaler = SGD(params(2), lr=1.0), GradScaler("cpu")
    inner = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"scaler has type torch.*\.GradScaler; accepted: amp_kernels\.GradScaler"):
        SkipAwareScheduler(inner, torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match="the scheduler's optimizer has type NoneType"):
        SkipAwareScheduler(object(), scaler)
    scheduler = SkipAwareScheduler(inner, scaler)
    with pytest.raises(RuntimeError, match="the scaler has not stepped this scheduler's optimizer yet"):
        scheduler.step()
    iterate(scaler, SGD(params(1), lr=1.0))  # another one
    with pytest.raises(RuntimeError, match="the scaler has not stepped this scheduler's optimizer yet"):
        scheduler.step()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = scheduler.no_such_thing
    assert copy.copy(scheduler).scheduler is inner
