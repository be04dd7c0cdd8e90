"""Every op that has a Triton kernel, on its own samples in the interpreter against the reference; run by test_interpreted.py."""

import pytest

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli.check import available_backends, check_backend

NAMES = [name for name, op in REGISTRY.items() if "triton" in available_backends(op, "cpu")]


def test_ops_have_kernels():
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_samples(name):
    assert check_backend(REGISTRY[name], "triton", "cpu") > 0
