"""A whole FP16 training step as one CUDA graph, including loss scaling, skipping, clipping and the learning rate.

python examples/cuda_graph.py      (without CUDA the same step runs eagerly)
"""

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
STEPS = 200

teacher = nn.Linear(32, 10).to(device)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
ak.convert(model.to(device))
optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
scaler = ak.GradScaler(device)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)


def train(x, y):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        loss = ak.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return loss


step = ak.graph_step(train, model=model, optimizer=optimizer, scaler=scaler)
print("one launch a step" if device == "cuda" else "no CUDA here: the step runs eagerly")
losses = []
for _ in range(STEPS):
    x = torch.randn(128, 32, device=device)
    loss = step(x, teacher(x).argmax(1))  # returns the same tensor every time
    losses.append(loss.clone())
    schedule.step()  # writes the learning-rate tensor that the graph reads
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
