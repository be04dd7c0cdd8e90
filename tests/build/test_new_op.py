"""No central list is edited: a file in ops/ and one in _triton/ make ops that the policy, Triton, flop counters, the command line
and the registry's tests know. Shown on a copy of the package with such a family of two ops."""

from pathlib import Path

import pytest

from ..helpers.processes import python
from .package_copy import copy_package

FAMILY = """
import torch

from .._dispatch.library import define


def _product(a, b):
    return (a.float() @ b.float()).to(a.dtype)


def _negate(x):
    x.neg_()


def samples(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        yield (torch.ones(2, 3, device=device, dtype=dtype), torch.ones(3, 5, device=device, dtype=dtype)), {}


op = define(
    "toy_product(Tensor a, Tensor b) -> Tensor",
    _product,
    samples=samples,
    tensor_cores=True,
    flop_count=lambda a, b, **kwargs: 2 * a[0] * a[1] * b[1],
)
define("toy_negate_(Tensor(a!) x) -> ()", _negate, samples=lambda device: ((args[:1], {}) for args, _ in samples(device)))
"""

TRITON = """
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, c, K, N):
    row, column = tl.program_id(0), tl.program_id(1)
    total = 0.0
    for k in range(K):
        total += tl.load(a + row * K + k).to(tl.float32) * tl.load(b + k * N + column).to(tl.float32)
    tl.store(c + row * N + column, total.to(c.dtype.element_ty))


def toy_product(a, b):
    c = a.new_empty(a.shape[0], b.shape[1])
    kernel[c.shape](a, b, c, a.shape[1], b.shape[1])
    return c
"""

EVERYWHERE = """
from dataclasses import replace
import torch
from torch.utils.flop_counter import FlopCounterMode
import amp_kernels as ak
from amp_kernels._dispatch import policy
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli import info
from amp_kernels.cli.check import available_backends, check_backend

op, in_place = REGISTRY["toy_product"], REGISTRY["toy_negate_"]
assert op.family == in_place.family == "toy"
assert available_backends(op, "cpu") == ["triton"]
assert available_backends(in_place, "cpu") == []
assert check_backend(op, "triton", "cpu") == 3

x = torch.ones(2, 3)
with FlopCounterMode(display=False) as counter:
    op(x, x.t())
assert counter.get_total_flops() == 2 * 2 * 3 * 2
for one, backend in ((op, "triton"), (in_place, "cuda")):  # tensor cores are for 8.0 and newer
    built = replace(one.built, cuda=True, cuda_archs=("7.5", "8.0", "10.0"), triton=True)
    assert policy.choose(one.name, "cuda", (10, 0), built).backend == backend
info.run()
"""


@pytest.fixture
def package(tmp_path):
    """A folder with a package that has the family."""
    copy_package(tmp_path)
    (tmp_path / "amp_kernels" / "ops" / "toy.py").write_text(FAMILY)
    (tmp_path / "amp_kernels" / "_triton" / "toy.py").write_text(TRITON)
    return tmp_path


def run(package, *command):
    return python(*command, cwd=package, PYTHONPATH=str(package), TRITON_INTERPRET="1").stdout


def test_two_files_make_a_family_that_everything_knows(package):
    words = [line.split()[:3] for line in run(package, "-c", EVERYWHERE).splitlines()]
    assert ["toy_negate_", "reference", "cpu:"] in words
    assert ["toy_product", "triton", "reference"] in words


def test_the_registry_tests_run_over_it(package):
    tests = str(Path(__file__).parents[1] / "registration" / "test_opcheck.py")
    # The package is imported as a plugin, so that the tests take this one.
    said = run(package, "-m", "pytest", "-vv", "-p", "amp_kernels", "-p", "no:cacheprovider", "-k", "toy", tests)
    for name in ("opcheck", "opcheck_on_the_emulator", "meta_tensors", "aot_eager_gives_the_eager_result"):
        for op in ("toy_product", "toy_negate_"):
            sampled = "-0" if name == "opcheck_on_the_emulator" else ""  # the first of each six samples
            assert f"test_{name}[{op}{sampled}] PASSED" in said
