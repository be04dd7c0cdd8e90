"""403 M parameters in 16 bits train in memory that has no room for their gradients: each is released within backward.

python examples/larger_than_memory.py

Expected on a CPU: loss 2.0049 -> 0.4483, in 25 seconds.
"""

import resource
from pathlib import Path

import torch
from torch import nn

import amp_kernels as ak

torch.set_num_threads(1)  # more threads have more memory


class Stack(nn.ModuleList):
    """Linear layers that start at zero, each beside its input."""

    def forward(self, x):
        for layer in self:
            x = x + layer(x)
        return x


def train(count, released, width=4096, steps=2):
    """The losses before each step of ``count`` layers, and after the last."""
    layers = [nn.utils.skip_init(nn.Linear, width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    model = ak.convert(Stack(layers))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    x, y = torch.randn(2, 8, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer = ak.optim.AdamW(model.parameters(), lr=2e-5, master_weights="split24", state_dtype="8bit")
    if released:
        ak.optim.release_gradients(optimizer)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).float().square().mean()
        losses.append(loss.item())
        loss.backward()  # released: each weight is updated here, and its gradient freed
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*losses, (model(x) - y).float().square().mean().item()]


print("the same losses where both fit:", train(2, released=False) == train(2, released=True))
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
used = 1024 * int(status["VmData"].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (used + 2400 * 2**20,) * 2)
try:
    print("the plain step fails: False", train(24, released=False))
except (RuntimeError, MemoryError) as error:
    print("the plain step fails:", str(error).splitlines()[0])
losses = train(24, released=True)
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
