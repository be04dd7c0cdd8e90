"""The Triton kernels as the PTX that Triton makes of them: every op on its samples, against the reference."""

import pytest

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.testing.backends import check_backend

from .preloaded import machine, set_chip
from .triton_driver import install

install(machine())
OPS = [name for name, op in sorted(REGISTRY.items()) if op.built.triton]
EVERY_RUN = {(80, "unscale_"), (80, "lion_"), (90, "update_scale_"), (90, "norm_forward"), (90, "gemm_accumulate_")}


@pytest.fixture(autouse=True)
def _shared_memory_is_the_compilers():
    """Triton 3.6 leaves out proxy fences after mbarrier.init and between cp.async and wgmma, and lets two warps store the same value.
    What it does in shared memory is its business; memory that kernels share, and results under any schedule, are ours."""
    machine().device.orders_shared = False
    yield
    machine().device.orders_shared = True


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        pytest.param(*case, marks=[] if case in EVERY_RUN else pytest.mark.exhaustive)
        for case in ((capability, name) for capability in (80, 90) for name in OPS)
    ],
)
def test_samples(capability, name, seeds):
    for seed in seeds:
        it = set_chip(capability, 2)
        it.seed = seed
        it.launched.clear()
        assert check_backend(REGISTRY[name], "triton", "cuda") > 0
        assert it.launched
