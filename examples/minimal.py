"""The minimal loop: three lines of amp_kernels turn a torch training loop into mixed precision.

python examples/minimal.py
"""

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = ak.recommended_dtype(device)  # bfloat16, or float16 on GPUs without bfloat16
torch.manual_seed(0)


def spirals(count):
    """Points on two interleaved spirals, and the spiral of each point."""
    arm = torch.randint(2, (count,), device=device)
    angle = 9 * torch.rand(count, device=device).sqrt()
    turned = angle + torch.pi * arm
    return torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 9, arm


model = nn.Sequential(
    nn.Linear(2, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)
)
criterion = nn.CrossEntropyLoss()

model = ak.convert(model.to(device))  # the same modules, parameters and state_dict, with our kernels
optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
scaler = ak.GradScaler(device, enabled=dtype == torch.float16)  # bfloat16 needs no scaler

losses = []
for step in range(300):
    points, arm = spirals(256)
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = criterion(model(points), arm)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)  # unscales, checks, clips and updates without a host sync
    scaler.update()
    losses.append(loss.detach())
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss:.3f}")

with torch.no_grad(), torch.autocast(device, dtype):
    points, arm = spirals(2000)
    print(f"{(model(points).argmax(1) == arm).float().mean():.1%} of new points are classified correctly")
print(f"loss {losses[0]:.3f} -> {torch.stack(losses[-20:]).mean():.3f}")
