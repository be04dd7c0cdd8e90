"""pytest -p tests.gpu.fresh_context -n 8: a broken CUDA context costs the test that broke it, and not all that follow in its process.

The worker ends after that test, which pytest-xdist reports as a crash in it, and starts another one in its place.
"""

import os

import pytest

_failed = False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    global _failed
    report = (yield).get_result()
    _failed = _failed or report.failed


@pytest.hookimpl(trylast=True)  # after xdist, which sends the reports of the test
def pytest_runtest_logfinish(nodeid, location):
    global _failed
    failed, _failed = _failed, False
    if failed and "PYTEST_XDIST_WORKER" in os.environ and not _context_works():
        os._exit(1)


def _context_works() -> bool:
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
