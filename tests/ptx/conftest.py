"""Tests here come in two kinds: test_*.py run as usual; executed_*.py run in a process in which the fake CUDA runtime is preloaded,
which test_ptx.py starts."""

import zlib

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--ptx-seeds",
        type=int,
        metavar="N",
        help="schedules 0 to N-1 for each case of the PTX interpreter; without it, one of the first four",
    )


@pytest.fixture
def seeds(request):
    """The numbers of the schedules to run a case under (interpreter/schedule.py)."""
    count = request.config.getoption("--ptx-seeds", default=None)
    return range(count) if count else [zlib.crc32(request.node.name.encode()) % 4]
