"""A mixture of experts: tokens sorted by expert on the device, all experts in two grouped products, groups of any size.

python examples/moe.py
"""

import torch
from torch import nn

import amp_kernels as ak


class Mixture(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.up = ak.nn.GroupedLinear(experts, width, 2 * hidden, bias=True, activation="swiglu")
        self.down = ak.nn.GroupedLinear(experts, hidden, width, bias=True)

    def forward(self, x):
        weights, chosen = torch.softmax(self.router(x), -1, dtype=torch.float32).topk(self.top_k)
        offs, places = ak.route(chosen, self.router.out_features)  # the host never sees them
        hidden = self.up(x, offs, gather=places)
        return x + self.down(hidden, offs, scatter=places, weights=weights).to(x.dtype)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(32, 32), nn.Flatten(1), Mixture(64, 32, 8, 2), nn.Linear(64, 32))
model = ak.convert(model).to(device)
optimizer = ak.optim.AdamW(model.parameters(), lr=4e-3)

losses = []
with ak.nn.accumulate_fp32(model):
    for _ in range(150):
        pair = torch.randint(32, (256, 2), device=device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(pair).float(), pair.sum(1) % 32)  # addition modulo 32
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
