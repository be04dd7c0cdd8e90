"""A process that may not have more memory than it has: wherever a step fails, what follows is right."""

import re
import resource

import torch

import amp_kernels as ak

from ..helpers.generators import normal
from ..helpers.processes import python
from .loop import assert_same, flat


class Wide:
    """Every tensor that a step allocates is a mapping of its own: see ``MALLOC_MMAP_THRESHOLD_`` below."""

    def __init__(self):
        torch.manual_seed(0)
        layers = ak.nn.Linear(256, 512, activation="gelu"), ak.nn.LayerNorm(512), ak.nn.Linear(512, 256)
        self.model = torch.nn.Sequential(*layers).bfloat16()
        self.optimizer = ak.optim.AdamW(self.model.parameters(), lr=2.0**-5, master_weights="split")
        self.scaler = ak.GradScaler("cpu", init_scale=2.0**8)
        self.slope = self.scaler.scale(torch.ones(256, 256, dtype=torch.bfloat16))
        self.place = ""

    def step(self, batch):
        self.place = "forward"
        self.optimizer.zero_grad()
        x = normal(256, 256, seed=batch).bfloat16()
        result = self.model(x)
        self.place = "backward"
        result.backward(self.slope)
        self.place = "step"
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        return dict(flat([self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]))


def limited(headroom, function):
    """The error of the function while the process may have so many bytes more than now."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + headroom, before[1]))
    try:
        function()
    except (RuntimeError, MemoryError) as error:  # the second is Python's own
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return None


def failures(taken):
    """Failures of steps, from no memory to enough of it: (place, True if in an op of this package). ``taken``: steps before."""
    expected = Wide()
    for batch in [*range(taken), 8, 9]:
        expected.step(batch)
    found = set()
    for headroom in range(0, 1 << 30, 192 << 10):
        wide = Wide()
        for batch in range(taken):
            wide.step(batch)
        error = limited(headroom, lambda wide=wide: wide.step(7))
        if error is None:
            return found
        ours = isinstance(error, torch.OutOfMemoryError)
        assert ours or "API call failed" not in str(error), error
        pattern = r": out of memory \(" if ours else "" if isinstance(error, MemoryError) else "can't allocate memory"
        assert re.search(pattern, str(error)), error
        found.add((wide.place, ours))
        for batch in (8, 9):
            wide.step(batch)
        assert_same(wide.state(), expected.state())
    raise AssertionError("no step had enough")


def main():
    assert failures(taken=1) >= {("forward", True), ("backward", True)}
    assert ("step", False) in failures(taken=0)  # which makes the state: torch allocates it


def test_no_memory_anywhere():
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "0"}
    python("-c", "from tests.reliability.test_memory_limit import main; main()", **environment)
