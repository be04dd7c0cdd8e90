"""A model in bfloat16 with split FP32 masters (the optimizer keeps the low 16 bits) and a moving average of the weights.

python examples/split_masters.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def make(dtype):
    model = nn.Sequential(
        nn.Linear(16, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)
    )
    return ak.convert(model.to(device, dtype))


teacher, model = make(torch.float32), make(torch.bfloat16)
options = {"master_weights": "split", "state_dtype": torch.bfloat16, "ema_decay": 0.98, "max_grad_norm": 1.0}
optimizer = ak.optim.AdamW(model.parameters(), lr=1e-3, **options)


def mean_loss(model, x):
    with torch.no_grad():
        y = teacher(x)
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


unseen = torch.randn(2000, 16, device=device)
before = mean_loss(model, unseen).item()
for _ in range(200):
    optimizer.zero_grad()
    mean_loss(model, torch.randn(256, 16, device=device)).backward()
    optimizer.step()

weight = model[0].weight
held = {name: value.nbytes / weight.numel() for name, value in optimizer.state[weight].items() if value.ndim}
print("bytes per weight:", ", ".join(f"{name} {size:g}" for name, size in {"parameter": 2, **held}.items()))

with tempfile.TemporaryDirectory() as folder:  # three files: a checkpoint, the FP32 model, and its average
    path = Path(folder)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "checkpoint.pt")
    torch.save(ak.fp32_state_dict(model, optimizer), path / "fp32.pt")
    torch.save(ak.fp32_state_dict(model, optimizer, ema=True), path / "average.pt")

    exported = make(torch.float32)
    print(f"loss of the bfloat16 model {mean_loss(model, unseen):.4f}")
    for name in ("fp32", "average"):
        exported.load_state_dict(torch.load(path / f"{name}.pt"))
        after = mean_loss(exported, unseen).item()
        print(f"loss of {name}.pt {after:.4f}")
print(f"loss {before:.4f} -> {after:.4f}")
