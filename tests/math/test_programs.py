"""Programs over formulas of csrc: the exponential of the CPU's losses is right to 1.3 u, flushes nothing and keeps NaN; the vector forms
of fp16's conversions give the bits of csrc/base/half.h."""

import os

import pytest

from ..helpers.processes import run


@pytest.mark.parametrize("name", ["exp_of_logit", "half_spans"])
def test_program(tmp_path, name):
    flags = "-std=c++20", "-O1", "-ffp-contract=off", "-Icsrc"
    run(os.environ.get("CXX", "c++"), *flags, f"tests/math/{name}.cpp", "-o", tmp_path / name)
    run(tmp_path / name)
