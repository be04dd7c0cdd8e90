"""Every op on every backend that exists on a GPU, against the reference: the samples that opcheck sees, then larger lists."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli.check import available_backends, check_backend

pytestmark = pytest.mark.gpu

BACKENDS = {name: ["cuda", *["triton"] * op.built.triton] for name, op in REGISTRY.items() if not op.composite}
CASES = [(name, backend) for name in sorted(BACKENDS) for backend in BACKENDS[name]]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_backend_equals_the_reference(name, backend):
    op = REGISTRY[name]
    if backend in available_backends(op, "cuda"):
        assert check_backend(op, backend, "cuda") > 0


def test_the_compiled_kernels_are_there():
    """A GPU machine that silently ran on the reference would pass every other test."""
    assert "cuda" in available_backends(REGISTRY["check_and_norm"], "cuda")
    assert "triton" in available_backends(REGISTRY["check_and_norm"], "cuda")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_norm_of_large_lists(backend, dtype, offset):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [1, 7, 4096, 1_000_003, 0, 33_554_432]
    grads = [torch.randn(n + offset, device="cuda", generator=generator).to(dtype)[offset:] for n in sizes]
    with ak.backend(backend):
        first = torch.ops.amp_kernels.check_and_norm if backend == "cuda" else REGISTRY["check_and_norm"]
        sum_sq, found_inf = first(grads)
        again, _ = first(grads)
    expected = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(sum_sq.double(), expected, rtol=1e-5, atol=0)
    assert found_inf.item() == 0
    assert torch.equal(sum_sq, again)
    for position in (0, 1, 999_999, 1_000_002):
        poisoned = [g.clone() for g in grads]
        poisoned[3][position] = float("inf")
        with ak.backend(backend):
            assert REGISTRY["check_and_norm"](poisoned)[1].item() == 1


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_unscale_of_more_tensors_than_one_launch_takes(offset):
    generator = torch.Generator("cuda").manual_seed(0)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    sizes = [1 + i % 700 for i in range(4000)] + [5_000_011]
    grads = [
        torch.randn(n + offset, device="cuda", generator=generator).to(dtypes[i % 4])[offset:]
        for i, n in enumerate(sizes)
    ]
    expected = [g.clone() for g in grads]
    found, expected_found = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    inverse = torch.tensor(1 / 1024, device="cuda")
    ak.backend("cuda")(REGISTRY["unscale_"])(grads, found, inverse)
    ak.backend("reference")(REGISTRY["unscale_"])(expected, expected_found, inverse)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert found.item() == expected_found.item() == 0
    grads[-1][-1] = float("nan")
    ak.backend("cuda")(REGISTRY["unscale_"])(grads, found, inverse)
    assert found.item() == 1


@pytest.mark.parametrize("position", [0, 255, 256, 999])
def test_update_scale_of_more_flags_than_one_launch_takes(position):
    flags = [torch.zeros((), device="cuda") for _ in range(1000)]
    scale = torch.tensor(1024.0, device="cuda")
    growth, hysteresis = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in (5, 1))
    call = (2.0, 0.5, 2000, 0.0, float("inf"), 1)
    ak.backend("cuda")(REGISTRY["update_scale_"])(scale, growth, hysteresis, flags, *call)
    assert (scale.item(), growth.item()) == (1024.0, 6)
    flags[position].fill_(1)
    ak.backend("cuda")(REGISTRY["update_scale_"])(scale, growth, hysteresis, flags, *call)
    assert (scale.item(), growth.item()) == (512.0, 0)
