"""pytest -p tests.gpu.outcomes --outcomes FILE: a JSON line for each test that ran on the GPU, with the op that it is named after."""

import json
import re
from pathlib import Path

import torch

from bench.harness import environment


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="append the outcome of each test")


def pytest_configure(config):
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):  # workers of xdist report to this process
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    def __init__(self, path: Path):
        self.path = path
        chip = environment.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.of_all = {"chip": chip, "commit": environment.commit()}

    def pytest_runtest_logreport(self, report):
        if report.skipped or not (report.when == "call" or report.failed):
            return
        from amp_kernels._dispatch.library import REGISTRY

        named = set(re.findall(r"\w+", report.nodeid.partition("[")[2])) & set(REGISTRY)
        row = {"op": min(named, default=None), "test": report.nodeid, "passed": report.passed, **self.of_all}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
