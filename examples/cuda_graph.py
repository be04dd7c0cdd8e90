"""A whole FP16 training step as one CUDA graph: loss scaling, skipping, clipping and the learning rate are inside.

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
lr = torch.tensor(3e-3, device=device)  # a tensor: every replay reads what stands in it
optimizer = ak.optim.AdamW(model.parameters(), lr=lr)
scaler = ak.GradScaler(device)

# A graph reads and writes the same memory every time: batches are copied into these, the loss is copied out.
x, y = torch.randn(128, 32, device=device), torch.zeros(128, dtype=torch.int64, device=device)
last_loss = torch.zeros((), device=device)


def train_step():
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        loss = ak.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    last_loss.copy_(loss.detach())


def capture(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # the first step allocates the optimizer's state
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


run = capture(train_step) if device == "cuda" else train_step
print("one launch a step" if device == "cuda" else "no CUDA here: the step runs eagerly")
losses = []
for i in range(STEPS):
    y.copy_(teacher(x.normal_()).argmax(1))
    lr.fill_(3e-3 * (1 - i / STEPS))
    run()
    losses.append(last_loss.clone())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
