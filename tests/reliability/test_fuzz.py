"""The fuzzers (fuzz.py). Every run takes the same seeds of each. ``make test-all`` takes others for FUZZ_SECONDS each, from a first
one that DRAW chooses."""

import os

import pytest

from . import fuzz, fuzz_histories, fuzz_interrupts, fuzz_ops, fuzz_raw

#: Seeds of a run.
CASES = {fuzz_ops: 800, fuzz_raw: 1600, fuzz_histories: 60, fuzz_interrupts: 32}
PARTS = 4
EACH = pytest.mark.parametrize("fuzzer", CASES, ids=lambda fuzzer: fuzzer.__name__.rpartition(".")[2])


@EACH
@pytest.mark.parametrize("part", range(PARTS))
def test_fixed_seeds(fuzzer, part):
    count = CASES[fuzzer] // PARTS
    for seed in fuzz.seeds(part * count, count, None):
        fuzz.check(fuzzer.case, seed)


@pytest.mark.exhaustive
@pytest.mark.slow
@EACH
def test_other_seeds(fuzzer):
    first = 10**6 * (1 + int(os.environ.get("DRAW", 0)))
    for seed in fuzz.seeds(first, None, float(os.environ.get("FUZZ_SECONDS", 300))):
        fuzz.check(fuzzer.case, seed)
