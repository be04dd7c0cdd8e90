"""Gradient accumulation in FP32 for a model in bfloat16: 64 micro-batches sum to the gradient of the whole batch.

python examples/gradient_accumulation.py
"""

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device, torch.bfloat16)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8)).to(device, torch.bfloat16)
ak.convert(model)
optimizer = ak.optim.AdamW(model.parameters(), lr=2e-3, master_weights="split", max_grad_norm=1.0)


def batch(count):
    x = torch.randn(count, 32, device=device, dtype=torch.bfloat16)
    return x, teacher(x).detach()


def accumulate(x, y, parts):
    """Accumulate the gradients of the mean loss over all rows, with one backward per part; return that loss."""
    total = torch.zeros((), device=device)
    for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = nn.functional.mse_loss(model(part_x).float(), part_y.float()) / parts
        loss.backward()
        total += loss.detach()
    return total


def gradient(x, y, parts):
    model.zero_grad()
    accumulate(x, y, parts)
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


x, y = batch(1024)
whole, in_bf16 = gradient(x, y, 1), gradient(x, y, 64)
ak.nn.accumulate_fp32(model)  # now .grad is FP32, and the GEMM of backward accumulates into it
in_fp32 = gradient(x, y, 64)
for name, parts in (("bfloat16", in_bf16), ("FP32", in_fp32)):
    print(f"64 micro-batches summed in {name}: gradient off by {(parts - whole).norm() / whole.norm():.2%}")

losses = []
for _ in range(60):
    optimizer.zero_grad()
    losses.append(accumulate(*batch(1024), parts=8))
    optimizer.step()
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
