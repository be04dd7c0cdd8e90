"""The tests of optimizers and scaler once more, with every op on the emulator: states, tables, lists and skips as users make
them, through the host code of the CUDA ops; and those of ops, which run there anyway, under other schedules."""

import re

import pytest

from ..helpers.processes import python

SHORT = "not thousand_steps and not rank"  # those take minutes on the emulator, or processes of their own


def passed(*options, seed=0) -> int:
    said = python("-m", "pytest", "-p", "no:cacheprovider", *options, AMP_KERNELS_EMULATE_SEED=str(seed)).stdout
    return int(re.search(r"(\d+) passed", said)[1])


SUITES = ["--backend", "emulate", "-k", SHORT, "-m", "not gpu and not own_backend", "tests/optim", "tests/amp"]


@pytest.mark.slow
def test_one_in_a_hundred_of_optimizers_and_scaler_on_the_emulator():
    assert passed("--sample", "100", *SUITES) > 10


@pytest.mark.exhaustive
def test_optimizers_and_scaler_on_the_emulator():
    assert passed(*SUITES) > 1300


@pytest.mark.slow
def test_one_in_thirty_of_the_ops_under_another_schedule():
    assert passed("--sample", "30", "-k", "emulate", "tests/ops", seed=1) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ops_under_other_schedules(seed):
    assert passed("-k", "emulate", "tests/ops", seed=seed) > 1000
