"""One thread: what is trained here is tiny, and a forked process cannot use the threads of its parent."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(threads):
    threads(1)
