"""Runs the interpreted_*.py, and tests of ops that take every backend, in one process of their own: Triton chooses between compiler and
interpreter at import, and a process takes several seconds before its first test. One file alone:
``TRITON_INTERPRET=1 python -m pytest tests/triton/interpreted_X.py``."""

import re
from pathlib import Path

import pytest

from ..helpers.processes import python

HERE = Path(__file__).parent
FILES = [*sorted(map(str, HERE.glob("interpreted_*.py"))), str(HERE.parent / "ops" / "test_update_scale.py")]


def passed(*options: str) -> int:
    assert FILES
    said = python(
        "-m", "pytest", "-p", "no:cacheprovider", "-k", "triton", *options, *FILES, TRITON_INTERPRET="1"
    ).stdout
    assert not re.search(r"\d skipped", said), said
    return int(re.search(r"(\d+) passed", said)[1])


@pytest.mark.slow
def test_one_in_twelve():
    assert passed("--sample", "12") > 45


@pytest.mark.exhaustive
def test_interpreted():
    assert passed() > 600
