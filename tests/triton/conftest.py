"""Without the package triton there is nothing to test here; the header of the run says so."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*.py"]


def pytest_report_header():
    return [] if HAS_TRITON else ["tests/triton is not collected: the package triton is not installed"]
