"""pytest -p tests.ptx.plugin: tests meet a GPU, which is the interpreter, from the first import of the package on.

python -m tests.ptx.run -m gpu tests/gpu/test_optimizers.py
"""

from pathlib import Path

import pytest

from tools.ptx.triton_driver import install

from ..draw import drawn_of_each_test
from .preloaded import machine, set_chip

install(machine())
set_chip(90, 2)

# Tests that the interpreter cannot run, or not in reasonable time: parts of the names of tests.
LEFT_OUT = (
    "more_than_two_to_the_31_elements",
    "test_norm_of_large_lists",  # 33 million elements
    "tests/gpu/test_step.py::test_results_per_tensor",  # a billion
    "test_ten_thousand_tensors",
    "test_threads_that_start_one_kernel",  # 600 products of 512 x 260 x 516; executed_launches.py has eight small ones
    "tests/gpu/test_gemm.py::test_every_plan",  # sizes that fill an H200; executed_gemm*.py have the small ones
    "tests/gpu/test_gemm.py::test_sums_over_micro_batches",  # 128 products
    "tests/gpu/test_gemm.py::test_fifty_reruns",  # 51, so that races show if they happen: here schedules are drawn, and order is checked
    "tests/gpu/test_gemm.py::test_a_row_does_not_depend",  # 42, of 4,096 rows
    "tests/gpu/test_collectives.py",  # NCCL's kernels have no PTX here; tests/distributed has the same steps on gloo
    "tests/gpu/test_bench.py",  # times, and the names of kernels that a profiler gives
)


def pytest_addoption(parser):
    parser.addoption("--each", type=int, metavar="N", help="run at most N cases of each test, apart from each other")
    parser.addoption(
        "--kernels-file", type=Path, metavar="PATH", help="write the names of the kernels that have run here"
    )


@pytest.hookimpl(trylast=True)  # -m and -k have their say first
def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if not any(name in item.nodeid for name in LEFT_OUT)]
    if most := config.getoption("--each"):
        chosen = drawn_of_each_test(kept, most=most)
        kept = [item for item in kept if item in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def launched_by(function) -> list[str]:
    """In place of the profiler, which listens to a driver."""
    before = len(machine().launched)
    function()
    return machine().launched[before:]


def pytest_collection_finish(session):
    from tests.gpu import launches

    launches.kernels = launched_by


def pytest_sessionfinish(session):
    file = session.config.getoption("--kernels-file")
    if file:
        file.write_text("\n".join(machine().ever_launched))
