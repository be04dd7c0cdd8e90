"""A training whose state is compared with that of a twin which never saw a fault."""

import pytest
import torch

import amp_kernels as ak

from ..helpers.generators import normal
from .loop import flat

OPTIMIZERS = [
    pytest.param("AdamW", torch.float32, {"shadow_dtype": torch.bfloat16, "ema_decay": 0.9}, id="AdamW-float32"),
    pytest.param("AdamW", torch.bfloat16, {"master_weights": "split"}, id="AdamW-split"),
    pytest.param("SGD", torch.bfloat16, {"momentum": 0.9, "master_weights": "none", "seed": 3}, id="SGD-stochastic"),
    pytest.param("LAMB", torch.float16, {"zero_grads": True}, id="LAMB-float16"),
]
EACH = pytest.mark.parametrize(("name", "dtype", "options"), OPTIMIZERS)
FP32 = "AdamW", torch.float32, {}


class Twin:
    """A model without state of its own, an optimizer and a scaler. A batch is a seed."""

    def __init__(self, name="AdamW", dtype=torch.float32, options=None):
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 1)
        self.model, self.dtype = ak.convert(torch.nn.Sequential(*layers).to(dtype)), dtype
        self.optimizer = getattr(ak.optim, name)(self.model.parameters(), lr=2.0**-5, **options or {})
        self.scaler = ak.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)

    def loss(self, batch, value=None):
        x = normal(5, 4, dtype=self.dtype, seed=batch)
        if value is not None:
            x[2, 1] = value
        return self.model(x).float().square().mean()

    def backward(self, batch, value=None):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(batch, value)).backward()

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, batch, value=None):
        self.backward(batch, value)
        self.update()

    def state(self):
        return dict(flat({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}))


def without(name="AdamW", dtype=torch.float32, options=None, batches=(0, 1, 3, 4)):
    """The state of a twin that never saw what is between batches 1 and 3."""
    twin = Twin(name, dtype, options)
    for batch in batches:
        twin.step(batch)
    return twin.state()


def after(twin, batches=(3, 4)):
    for batch in batches:
        twin.step(batch)
    return twin.state()


def started(*arguments):
    twin = Twin(*arguments)
    twin.step(0)
    twin.step(1)
    return twin
