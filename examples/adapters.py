"""A server: LoRA adapters of three clients over a frozen model. One sends NaN, one leaves and another one gets its slot.

python examples/adapters.py
"""

import torch
from torch import nn

import amp_kernels as ak


class LoRA(nn.Module):
    """A frozen layer with adapters as PEFT has them, one for each slot: ``lora_A`` random, ``lora_B`` zeros."""

    def __init__(self, base: nn.Linear, slots: int, rank: int = 4):
        super().__init__()
        self.base, self.slot = base.requires_grad_(False), 0
        self.lora_A = nn.ModuleList(nn.Linear(base.in_features, rank, bias=False) for _ in range(slots))
        self.lora_B = nn.ModuleList(nn.Linear(rank, base.out_features, bias=False) for _ in range(slots))

    def forward(self, x):
        return self.base(x) + self.lora_B[self.slot](self.lora_A[self.slot](x))


def enter(slot: int):
    """The client that gets a slot finds nothing of the one before: new weights, no gradients, no state."""
    for a, b in ((layer.lora_A[slot], layer.lora_B[slot]) for layer in loras):
        a.reset_parameters(), nn.init.zeros_(b.weight), a.zero_grad(), b.zero_grad()
    optimizer.reset_unit(f"slot {slot}")


def forward_backward(slot: int, x: torch.Tensor, y: torch.Tensor):
    loras[0].slot = loras[1].slot = slot
    loss = (model(x) - y).square().mean()
    loss.backward()
    losses[slot].append(loss.item())


def optim_step(slot: int, lr: float, grad_clip_norm: float):
    """Step this slot alone, by the numbers of the request, where a norm of 0.0 is none. Gradients of others wait."""
    optimizer.param_groups[slot].update(lr=lr, max_grad_norm=grad_clip_norm or None)
    optimizer.step(units=[f"slot {slot}"])


torch.manual_seed(0)
loras = LoRA(nn.Linear(16, 64), slots=3), LoRA(nn.Linear(64, 16), slots=3)
model = nn.Sequential(loras[0], nn.Tanh(), loras[1]).to("cuda" if torch.cuda.is_available() else "cpu")
groups = [{"params": [p for n, p in model.named_parameters() if f".{i}.w" in n], "unit": f"slot {i}"} for i in range(3)]
optimizer = ak.optim.AdamW(groups, independent_groups=True, skip_nonfinite=True, zero_grads=True)
losses = [[], [], []]
for i in range(300):
    if i < 3 or i == 152:  # slot 2 gets another client
        enter(i % 3)
    x = torch.randn(64, 16, device=groups[0]["params"][0].device)
    forward_backward(i % 3, x.log() if i % 60 == 1 else x, x.roll(1 + i % 3 + i // 150, 1))
    if i > 0:  # the step of the client before, while this one's gradients are there
        optim_step((i - 1) % 3, lr=3e-2, grad_clip_norm=(1.0, 0.5, 0.0)[(i - 1) % 3])
print(f"steps left out: {optimizer.group_results.skips.tolist()}")
print(f"loss {losses[0][0]:.2f} -> {losses[0][-1]:.2f}")
