"""Tensors that move between devices: what the CPU reads has arrived."""

import re
from pathlib import Path

import pytest
import torch

import amp_kernels
from amp_kernels._dispatch.devices import Copies, at

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PACKAGE = Path(amp_kernels.__file__).parent


class OnDevice:
    """A tensor that notes how it is moved."""

    def __init__(self, device):
        self.device, self.moved = device, []

    def to(self, device, *, non_blocking=False, copy=False):
        self.moved.append((device, non_blocking))
        return self


@pytest.mark.parametrize(
    ("source", "target", "blocks"), [(GPU, CPU, True), (CPU, GPU, False), (GPU, torch.device("cuda", 1), False)]
)
def test_copies_to_the_cpu_are_waited_for(source, target, blocks):
    for move in (at, lambda tensor, device: Copies(tensor).get(device)):
        tensor = OnDevice(source)
        move(tensor, target)
        assert tensor.moved == [(target, not blocks)]


def test_nobody_else_moves_without_a_wait():
    """Whoever does has a reason of its own: tables that go to a GPU, an event that is waited for, a batch for a graph,
    lanes of buckets with their events."""
    allowed = {
        "_dispatch/devices.py",
        "_sharding/evidence.py",
        "_triton/_tables.py",
        "amp/_readback.py",
        "amp/graph_step.py",
        "optim/_host.py",
    }
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"non_blocking=", path.read_text())
    }
    assert found == allowed
