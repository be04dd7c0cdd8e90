"""Lines of progress where pytest is silent for long: it names a case when the case has ended."""

import os
import threading
import time

import pytest


class Progress:
    """Prints a line every so many seconds: the cases that have run, and the one that has taken longest so far."""

    def __init__(self, seconds: float):
        self.seconds, self.begin, self.out = seconds, time.monotonic(), os.dup(1)  # pytest captures 1 while a test runs
        self.started, self.done, self.total, self.ended = {}, 0, "?", threading.Event()

    def pytest_sessionstart(self):
        threading.Thread(target=self._tell, daemon=True).start()

    def pytest_sessionfinish(self):
        self.ended.set()

    def pytest_collection_finish(self, session):
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.total = len(ids)

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self.started.pop(nodeid, None)
        self.done += 1

    def line(self) -> str:
        now = time.monotonic()
        longest = min([*self.started.items()], key=lambda item: item[1], default=None)
        running = f"; for {now - longest[1]:.0f} s: {longest[0]}" if longest else ""
        return f"[{now - self.begin:.0f} s] {self.done} of {self.total} cases{running}"

    def _tell(self):
        while not self.ended.wait(self.seconds):
            os.write(self.out, f"\n{self.line()}\n".encode())
