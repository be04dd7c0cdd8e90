"""Hugging Face's accelerate with a converted model and an amp_kernels optimizer: prepare, accumulate, clip.

python examples/accelerate_loop.py      or      accelerate launch examples/accelerate_loop.py      (needs: pip install accelerate)
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amp_kernels as ak

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)  # chooses the device
set_seed(0)

points = torch.rand(16000, 2)
data = DataLoader(TensorDataset(points, (4 * points).long().sum(1) % 2), batch_size=128, shuffle=True)  # a checkerboard
layers = nn.Linear(2, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)
model = ak.convert(nn.Sequential(*layers))  # before prepare
optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
criterion = ak.nn.CrossEntropyLoss()
model, optimizer, data = accelerator.prepare(model, optimizer, data)

losses = []
for epoch in range(5):
    for x, y in data:
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
first, last = (accelerator.reduce(torch.stack(part).mean(), "mean") for part in (losses[:10], losses[-10:]))
accelerator.print(f"loss {first:.3f} -> {last:.3f}")
