import pytest
import torch

from amp_kernels.amp import _readback


@pytest.fixture
def slow_device(monkeypatch):
    """Copies to the host arrive when the test says so, as a GPU's would."""

    class Event:
        done = False

        def query(self):
            return self.done

        def synchronize(self):
            for event in events:
                event.done = True

    events = []
    real = _readback.AsyncReader.push

    def push(self, value, note=None):
        real(self, value, note)
        host, _, note = self._pending.pop()
        events.append(Event())
        self._pending.append((torch.tensor(host), events[-1], note))

    monkeypatch.setattr(_readback.AsyncReader, "push", push)
    return events
