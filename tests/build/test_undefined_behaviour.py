"""Raw ops on a CPU library that stops at undefined behaviour (sanitized.py)."""

from __future__ import annotations

import itertools

import pytest
import torch

from . import sanitized


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sanitized")
    sanitized.build(folder)
    return folder


def every_sample() -> None:
    """All samples of the registry, and products of matrices without elements, whose strides mean nothing."""
    from amp_kernels._dispatch.library import REGISTRY
    from amp_kernels.cli.check import available_backends

    from ..helpers.backends import use
    from ..ops.raw import gemm, gemm_accumulate_

    for op in REGISTRY.values():
        if "cpu" in available_backends(op, "cpu"):
            for args, kwargs in op.samples("cpu"):
                with use("cpu"):
                    op(*args, **kwargs)
    for m, n, k, step in itertools.product((0, 1, 3), (0, 1, 3), (0, 1, 3), (1, 3)):
        a = torch.ones(9, 9).half()[: step * m : step, : step * k : step]
        b = torch.ones(9, 9).half()[: step * k : step, : step * n : step]
        assert torch.equal(gemm(a, b).float(), torch.full((m, n), float(k)))
        gemm_accumulate_(torch.zeros(m, n), a, b)


@pytest.mark.exhaustive
def test_every_sample(package):
    result = sanitized.run(package, "-c", "from tests.build import test_undefined_behaviour as t; t.every_sample()")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.exhaustive
def test_drawn_calls(package):
    result = sanitized.run(package, "-m", "tests.reliability.fuzz_raw", "--seed", "0", "--cases", "300")
    assert result.returncode == 0, result.stdout + result.stderr
