"""One thread: models this small gain nothing from two, and on a busy machine threads that wait for each other cost seconds."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads):
    threads(1)
