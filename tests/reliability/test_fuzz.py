"""The fuzzers (fuzz.py). Every run takes the same seeds, and a part of those of each fuzzer. ``make test-all`` takes others for
FUZZ_SECONDS each, from a first one that DRAW chooses."""

import os

import pytest

from . import fuzz, fuzz_histories, fuzz_interrupts, fuzz_ops, fuzz_raw

PARTS = 4
PART = pytest.mark.parametrize("part", range(PARTS))


def check(fuzzer, part, seeds):
    count = seeds // PARTS
    for seed in fuzz.seeds(part * count, count, None):
        fuzz.check(fuzzer.case, seed)


@PART
def test_public_ops(part):
    check(fuzz_ops, part, seeds=800)


@PART
def test_raw_ops(part):
    check(fuzz_raw, part, seeds=1600)


@PART
def test_histories(part):
    check(fuzz_histories, part, seeds=60)


@PART
def test_interrupts(part):
    check(fuzz_interrupts, part, seeds=32)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("fuzzer", [fuzz_ops, fuzz_raw, fuzz_histories, fuzz_interrupts])
def test_other_seeds(fuzzer):
    first = 10**6 * (1 + int(os.environ.get("DRAW", 0)))
    for seed in fuzz.seeds(first, None, float(os.environ.get("FUZZ_SECONDS", 300))):
        fuzz.check(fuzzer.case, seed)
