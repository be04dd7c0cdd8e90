"""One pool of ranks for all tests here."""

import pytest

from ..helpers.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()
