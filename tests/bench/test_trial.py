"""One run of the training benchmark: it learns, it continues bit for bit, and what it reports about itself is true."""

import dataclasses
import itertools

import pytest
import torch

from bench.training.data import load_text
from bench.training.trainers import TRAINERS
from bench.training.trial import Settings, Trial

EVERY_PROVIDER = pytest.mark.parametrize("provider", TRAINERS)


@pytest.fixture(scope="module")
def text():
    return load_text()


def settings(**changes) -> Settings:
    base = Settings("nano", 24, ("fp16",), tuple(TRAINERS), scaler=True, seed=0, deterministic=False, device="cpu")
    return dataclasses.replace(base, **changes)


@EVERY_PROVIDER
def test_skipped_steps_are_those_where_the_scale_fell(text, provider):
    """The counter comes from the optimizer, the scale from the scaler: they must tell the same story."""
    trial = Trial(settings(steps=30), text, provider, "fp16")
    trial.trainer.scaler.load_state_dict({**trial.trainer.scaler.state_dict(), "scale": 2.0**26})
    assert trial.train()
    result = trial.result()
    scales = [2.0**26, *result["scales"]]
    falls = sum(after < before for before, after in itertools.pairwise(scales))
    assert result["skipped_steps"] == falls > 0
    assert result["final_scale"] == scales[-1]


@EVERY_PROVIDER
def test_memory_is_the_weights_two_moments_and_the_most_on_top(text, provider):
    """In a flat buffer each moment is a view of the whole, which must not count once a parameter."""
    trial = Trial(settings(steps=2), text, provider, "fp32")
    trial.train()
    weights = 4 * sum(param.numel() for param in trial.trainer.model.parameters())
    held = trial.trainer.held_bytes()
    assert held == pytest.approx(3 * weights, rel=0.02)
    assert trial.peak_bytes > 4 * weights  # a step adds the gradients and activations
    with trial._count():
        first, second = torch.empty(10 << 20, dtype=torch.uint8), torch.empty(5 << 20, dtype=torch.uint8)
        del first
        third = torch.empty(3 << 20, dtype=torch.uint8)
    assert trial.peak_bytes == pytest.approx(held + (15 << 20), abs=1000)
    del second, third
