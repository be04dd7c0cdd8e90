"""Options shared by all tests: ``--require-gpu`` turns a missing GPU and every skip of a ``gpu`` test into a failure,
``--backend emulate`` runs them on another backend, ``--exhaustive`` adds the cases that a change to their own files calls
for, but not every run, and ``--no-skips`` turns every skip into a failure. ``--one-in 2`` takes half of the cases of each test, an eighth
if it is slow, and at least one; ``--sample 3`` takes one test in three, for a second run of the same tests in other surroundings. Both
draw (draw.py)."""

import importlib.util
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# Before torch is imported. Idle OpenMP threads that spin take the cores from the processes that tests start beside this one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Behind the installed package: tools/
sys.path.append(str(Path(__file__).parents[1]))

from .draw import drawn, drawn_of_each_test
from .progress import Progress

# The engine of autograd counts the devices once, in the first backward. Without a GPU there are none, unless a test has made a fake
# CUDA tensor before: then it starts threads, and tests that fork could not run a backward.
torch.ones((), requires_grad=True).backward()


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail instead of skipping tests that need a GPU")
    parser.addoption("--backend", help="run every op on this backend, unless a test chooses another")
    parser.addoption("--exhaustive", action="store_true", help="also run the cases marked exhaustive")
    parser.addoption("--no-skips", action="store_true", help="fail what would be skipped")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run one test in N")
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run one case in N of each test")
    parser.addoption("--progress-every", type=float, metavar="SECONDS", help="print a line of progress this often")
    parser.addoption(
        "--progress-file", help="write the id of the running test here, so that a hang can be named from outside"
    )


def pytest_configure(config):
    every = config.getoption("--progress-every")
    if every and not hasattr(config, "workerinput"):  # a worker of xdist is silent
        config.pluginmanager.register(Progress(every))


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--exhaustive"):
        left = [item for item in items if "exhaustive" in item.keywords]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if "exhaustive" not in item.keywords]
    sample, share = config.getoption("--sample"), config.getoption("--one-in")
    if sample > 1 or share > 1:
        kept = set(drawn(items, -(-len(items) // sample))) & drawn_of_each_test(items, share)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # Workers are given whole files, in this order: the long ones must not come last.
    items.sort(key=lambda item: "slow" not in item.keywords)
    no_gpu, no_nvcc = not torch.cuda.is_available() and not config.getoption("--require-gpu"), not shutil.which("nvcc")
    for item in items:
        if "gpu" in item.keywords and no_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU (make gpu)"))
        if "nvcc" in item.keywords and no_nvcc:
            item.add_marker(pytest.mark.skip(reason="needs nvcc (make sass)"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    progress = item.config.getoption("--progress-file")
    if progress:
        Path(progress).write_text(item.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    if item.config.getoption("--no-skips"):
        report.outcome, report.longrepr = "failed", f"skipped although nothing may be: {report.longrepr}"
    elif item.config.getoption("--require-gpu") and "gpu" in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped although a GPU is required: {report.longrepr}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """A module may skip itself as a whole."""
    report = (yield).get_result()
    if report.skipped and collector.config.getoption("--no-skips"):
        report.outcome, report.longrepr = "failed", f"skipped although nothing may be: {report.longrepr}"


@pytest.fixture(autouse=True)
def _backend(monkeypatch, request):
    """A backend chosen in the developer's shell must not decide what the tests see; ``--backend`` does."""
    backend = request.config.getoption("--backend")
    if backend and "own_backend" not in request.keywords:
        monkeypatch.setenv("AMP_KERNELS_BACKEND", backend)
    elif "AMP_KERNELS_BACKEND" in os.environ:
        monkeypatch.delenv("AMP_KERNELS_BACKEND")


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch):
    """Nor must what `tune` measured on this GPU. A process that plays a GPU loads the package later itself."""
    if profile := sys.modules.get("amp_kernels._dispatch.profile"):
        monkeypatch.setattr(profile, "of_device", lambda index: profile.Profile({}))


@pytest.fixture
def threads():
    """``threads(n)`` sets torch's number of threads for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def same_bits_for(threads):
    """``same_bits_for((1, 2), run)``: the results of ``run()``, tensors or lists of them, with so many threads. The first are returned."""

    def check(counts, run):
        results = [(threads(count), run())[1] for count in counts]
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
        return results[0]

    return check


@pytest.fixture
def python_walks(monkeypatch):
    """The loops over tensors as where the module ``_nodes`` is not loaded."""
    from amp_kernels._dispatch import walks

    specification = importlib.util.module_from_spec(walks.__spec__)
    walks.__spec__.loader.exec_module(specification)
    for name in ("same_objects", "same_versions", "note_versions", "bump_versions"):
        monkeypatch.setattr(walks, name, getattr(specification, name))


class _OpCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "amp_kernels":
            self.calls[name].append((args, kwargs or {}))
        return func(*args, **kwargs or {})


@pytest.fixture
def op_calls():
    """By name of the package's op, its calls in this test as torch's dispatcher sees them: arguments, keyword arguments."""
    with _OpCalls() as mode:
        yield mode.calls
