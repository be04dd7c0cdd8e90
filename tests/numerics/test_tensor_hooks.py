"""Hooks on tensors: as many as live, on every graph that does, once on a leaf, and none after the block."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_kernels.numerics import GradientHistogram, find_nonfinite


class Table(nn.Module):
    """Its output is its parameter, which outlives every graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = Table(), nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x * self.table())


def handles():
    gc.collect()
    return sum(type(thing) is RemovableHandle for thing in gc.get_objects())


@pytest.mark.parametrize("block", [find_nonfinite, GradientHistogram])
def test_a_long_run_keeps_no_more_than_a_short_one(block):
    model, before = Model(), handles()
    with block(model):
        for _ in range(300):
            model(torch.ones(3)).sum().backward()
        assert handles() - before < 150
    assert handles() == before


def test_a_parameter_that_is_an_output_counts_once_a_backward():
    model = Model()
    with GradientHistogram(model) as histogram:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(3)).sum().backward()
    assert histogram.counts("activations table").sum() == 3 * 3


def test_graphs_that_are_kept_are_watched_and_left():
    model = nn.Linear(3, 2)
    with GradientHistogram(model) as histogram:
        outputs = [model(torch.ones(3)) for _ in range(300)]
        outputs[0].sum().backward()
        assert histogram.counts("activations").sum() == 2
    for out in outputs[1:]:
        out.sum().backward()
    assert histogram.counts("activations").sum() == 2
    assert not any(out._backward_hooks for out in outputs)
