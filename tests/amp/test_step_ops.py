"""Which ops a step and an update run: what tests/gpu counts as kernels on a GPU, seen by the dispatcher on the CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_kernels.amp import GradScaler
from amp_kernels.optim import AdamW

VIEWS = {"reshape", "view", "select", "detach", "alias", "_to_copy", "unbind"}


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in VIEWS and "record_function" not in str(func):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_is_one_read_one_update_and_a_handful_of_scalars():
    params = [torch.nn.Parameter(torch.ones(1 + i)) for i in range(161)]
    optimizer, scaler = AdamW(params), GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.ones_like(param)
        with Ops() as ops:
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    assert ops.names == ["check_and_norm", "adamw_", "update_scale_", "sign", "add_", "add_", "mul_"]
