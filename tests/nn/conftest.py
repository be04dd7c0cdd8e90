"""Shared by the tests of modules."""

import pytest

import amp_kernels as ak
from amp_kernels.ops import _linear


@pytest.fixture
def fused(op_calls):
    """Number of norms that made an addition since the last call."""

    def count():
        found = sum(len(args) > 3 and args[3] is not None for args, _ in op_calls.pop("norm_forward", []))
        op_calls.clear()
        return found

    return count


@pytest.fixture
def hopper(monkeypatch):
    """Everything runs on the emulated kernels of a GPU that reads gradients of pieces in place."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", "9.0")
    with ak.backend("emulate"):
        yield


@pytest.fixture
def read(monkeypatch):
    """Number of backwards since the last call that read gradients in place."""
    calls, own = [], _linear._gradients_of_pieces
    monkeypatch.setattr(_linear, "_gradients_of_pieces", lambda *args: calls.append(args) or own(*args))

    def count():
        found = len(calls)
        calls.clear()
        return found

    return count
