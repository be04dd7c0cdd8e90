"""Saved, loaded and pickled scalers: torch's entries, its own, and the counts of skips."""

import pickle

import pytest
import torch

from amp_kernels.amp import GradScaler
from amp_kernels.optim import SGD

from .scaling import iterate, params


def trained():
    optimizer = SGD(params(4), lr=0.1)
    scaler = GradScaler(
        "cpu", init_scale=8.0, growth_interval=5, hysteresis=3, consecutive_hysteresis=True, min_scale=0.5
    )
    for bad in (0, 1, 0, 0):
        iterate(scaler, optimizer, {0} if bad else ())
    return optimizer, scaler


@pytest.mark.parametrize("initialised", [False, True])
def test_state_dict_round_trip(initialised):
    _, scaler = trained()
    state = scaler.state_dict()
    torchs = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    ours = {"min_scale", "max_scale", "hysteresis", "consecutive_hysteresis"}
    assert set(state) == torchs | ours | {"_hysteresis_tracker", "_skipped_steps", "_consecutive_skips"}
    assert all(type(v) in (int, float, bool) for v in state.values())
    assert (state["_hysteresis_tracker"], state["_growth_tracker"], state["_skipped_steps"]) == (3, 2, 1)
    other = GradScaler("cpu")
    if initialised:
        other.scale(torch.ones(()))
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.scale(torch.ones(()))
    assert other.state_dict() == state
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        other.load_state_dict({})


@pytest.mark.parametrize("initialised", [False, True])
def test_state_dict_interchange_with_torch(initialised):
    _, scaler = trained()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert scaler.state_dict().items() >= theirs.state_dict().items()
    other = GradScaler("cpu", hysteresis=3, max_scale=100.0)
    if initialised:
        other.scale(torch.ones(()))
    other.load_state_dict(theirs.state_dict())
    assert other.state_dict().items() >= theirs.state_dict().items()
    assert (other.state_dict()["hysteresis"], other.state_dict()["max_scale"]) == (3, 100.0)
    assert other.state_dict()["_hysteresis_tracker"] == 3


def test_pickling_keeps_counts_and_option():
    optimizer, scaler = SGD(params(4), lr=0.1), GradScaler("cpu", max_consecutive_skips=3)
    for bad in (set(), {0}, {0}):
        iterate(scaler, optimizer, bad)
    other = pickle.loads(pickle.dumps(scaler))
    for _ in range(2):
        assert other.state_dict() == scaler.state_dict()
        other.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        iterate(other, optimizer, {0})
    assert scaler.last_step_skipped is True  # the original is as it was
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)


@pytest.mark.parametrize("initialised", [False, True])
def test_the_count_survives_a_checkpoint_and_the_option_is_not_part_of_it(initialised):
    (p,) = params(2)
    optimizer, scaler = SGD([p], lr=0.1), GradScaler("cpu", max_consecutive_skips=9)
    for bad in ({0}, (), {0}, {0}):
        iterate(scaler, optimizer, bad)
    state = scaler.state_dict()
    assert (state["_skipped_steps"], state["_consecutive_skips"]) == (3, 2)
    assert "max_consecutive_skips" not in state
    other = GradScaler("cpu", max_consecutive_skips=3)
    if initialised:
        other.scale(torch.ones(()))
    other.load_state_dict(state)
    assert (other.skipped_steps.item(), other.consecutive_skips.item(), other.last_step_skipped) == (3, 2, None)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        iterate(other, optimizer, {0})
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    other.load_state_dict(theirs.state_dict())
    assert (other.skipped_steps.item(), other.consecutive_skips.item()) == (0, 0)


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ({"scale": "a"}, TypeError, "scale is 'a', of type str; accepted: a number from 0.0"),
        ({"scale": -5.0}, ValueError, "scale is -5.0; accepted: a number from 0.0"),
        ({"growth_interval": 1.5}, TypeError, "growth_interval is 1.5, of type float; accepted: a whole number from 0"),
    ],
)
def test_a_state_with_bad_numbers_is_refused_before_anything_changes(entry, error, words):
    _, scaler = trained()
    before = scaler.state_dict()
    with pytest.raises(error, match=f"GradScaler.load_state_dict: {words}"):
        scaler.load_state_dict({**before, "growth_factor": 3.0, **entry})
    assert scaler.state_dict() == before
