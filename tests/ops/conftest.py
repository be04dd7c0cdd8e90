"""What the tests of raw ops share: each runs once for every backend that was built."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import load

BUILT = [name for name in ("cpu", "emulate", "cuda", "triton") if name not in load.absent()]
TARGETS = [("cpu", name) for name in ("reference", *BUILT) if name not in ("cuda", "triton")]
if torch.cuda.is_available():
    TARGETS += [pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in ("cuda", "triton") if name in BUILT]


@pytest.fixture(params=TARGETS, ids="-".join)
def device(request):
    device, backend = request.param
    with ak.backend(backend):
        yield device


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def threads():
    """``threads(n)`` sets torch's number of threads for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
