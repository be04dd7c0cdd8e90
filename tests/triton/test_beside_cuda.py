"""docs/triton.md holds what its program prints, and what the program reads is what Triton compiles."""

from pathlib import Path

import pytest
import torch
import triton

from amp_kernels._triton import cast

from . import beside_cuda

PAGE = Path(__file__).parents[2] / "docs" / "triton.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    if f"Triton {triton.__version__}," not in page:
        pytest.skip("the page is of another version of Triton")
    assert beside_cuda.table() in page, "python -m tests.triton.beside_cuda"


def test_bytes_in_flight_are_those_of_all_programs_that_share_an_sm():
    """16 elements of fp32 a thread, 128 threads a program, six programs an SM by the launch."""
    tensors = [torch.zeros(8, dtype=torch.bfloat16)], [torch.zeros(8)]
    case = beside_cuda.Case("", lambda: cast.cast_(*tensors), "cast_kernel", "", programs=6)
    threads, kb = beside_cuda.in_flight(case)
    assert threads.endswith(" x 768")
    assert kb == 64 * 128 * 6 / 1024
    assert beside_cuda.in_flight(case._replace(programs=3))[1] == kb / 2
    assert beside_cuda.budget(case) == "64"  # 64 bytes, 4 blocks of 256


def test_instructions_are_those_of_one_row():
    """A norm of 768 columns is one straight program: twice the rows are no more, masked columns are executed all the same."""
    (case,) = (case for case in beside_cuda.CASES if case.name == "layer_norm, 768 columns")
    count = beside_cuda.executed(case)
    _, machine = beside_cuda.compiled(case)
    assert 10 < count <= len(machine.code) * 64 / 768
    assert beside_cuda.executed(case._replace(columns=384)) == pytest.approx(2 * count, rel=0.1)
