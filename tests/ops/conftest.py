"""Shared by the tests of raw ops: each runs once for every backend that was built, products on the CPU once for every instruction
set that this machine has."""

import contextlib

import pytest
import torch

from amp_kernels._dispatch import cpu_isa, load, nodes

from ..helpers.backends import use

BUILT = [name for name in ("cpu", "emulate", "cuda", "triton") if name not in load.absent()]
TARGETS = [("cpu", name) for name in ("reference", *BUILT) if name not in ("cuda", "triton")]
TARGETS += [("cpu", f"cpu/{isa}") for isa in cpu_isa.available() if isa != cpu_isa.chosen()]
if torch.cuda.is_available():
    TARGETS += [pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in ("cuda", "triton") if name in BUILT]


@pytest.fixture(params=TARGETS, ids="-".join)
def device(request):
    device, backend = request.param
    with use(backend):
        yield device


@pytest.fixture(params=["python", "nodes"] if "nodes" not in load.absent() else ["python"])
def implementation(request):
    """Both implementations of linear and matmul: the Python functions, and where it is there the C++ of the plain case."""
    with nodes.refused() if request.param == "python" else contextlib.nullcontext():
        yield request.param


@pytest.fixture(params=cpu_isa.available())
def every_cpu_isa(request):
    with cpu_isa.cpu_isa(request.param):
        yield request.param


@pytest.fixture(params=[name for name in ("cpu", "emulate") if name in BUILT])
def compiled(request):
    """The kernels of the CPU, and CUDA's on the emulator."""
    with use(request.param):
        yield request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
