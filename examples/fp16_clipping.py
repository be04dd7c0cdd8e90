"""FP16 with loss scaling and clipping on data with some corrupt batches; prints the scaler's statistics.

python examples/fp16_clipping.py
"""

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def batch(count):
    """A smooth function of two variables."""
    x = 2 * torch.rand(count, 2, device=device) - 1
    return x, (4 * x[:, :1]).sin() * (3 * x[:, 1:]).cos()


model = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
model = ak.convert(model.to(device))
optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
scaler = ak.GradScaler(device, growth_interval=50)  # doubles after 50 steps without overflow; torch's default is 2000


@torch.no_grad()
def clean_loss():
    x, y = batch(2000)
    with torch.autocast(device, torch.float16):
        return nn.functional.mse_loss(model(x), y).item()


before = clean_loss()
for step in range(400):
    x, y = batch(256)
    if step % 20 == 10:
        y *= 1000  # a corrupt batch, in the wrong unit
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=0.1)  # the device skips the step on overflow and clips large gradients
    scaler.update()
    if step % 100 == 99:  # formatting the tensors is the only host sync
        print(
            f"step {step + 1}: gradient norm {scaler.last_grad_norm:.3g}, scale {scaler.get_scale():.0f}, "
            f"{int(scaler.skipped_steps)} steps skipped"
        )
print(f"loss {before:.4f} -> {clean_loss():.4f}")
