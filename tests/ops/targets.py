"""Targets of the tests of one op: every device that is there, with every backend of the op on it."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels.cli.check import available_backends


def backends_on_cpu(op):
    """The reference too. Triton's interpreter has tests of its own."""
    return ["reference", *(name for name in available_backends(op, "cpu") if name != "triton")]


def device_for(op, without=()):
    """A fixture ``device``: the name of one, within the block of a backend, for each pair that there is."""
    targets = [("cpu", name) for name in backends_on_cpu(op) if name not in without]
    if torch.cuda.is_available():
        targets += [pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in available_backends(op, "cuda")]

    @pytest.fixture(params=targets, ids="-".join, name="device")
    def on_each(request):
        device, backend = request.param
        with ak.backend(backend):
            yield device

    return on_each
