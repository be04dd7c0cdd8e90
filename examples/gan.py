"""Two optimizers under one scaler: a GAN in FP16. An overflow skips only the affected optimizer's step.

python examples/gan.py
"""

import torch
from torch import nn
from torch.nn.functional import softplus

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, NOISE = 256, 8
angles = torch.arange(8, device=device) * torch.pi / 4
modes = torch.stack([angles.cos(), angles.sin()], 1)  # the data: eight spots on a circle


def mlp(inputs, outputs):
    layers = nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    return ak.convert(nn.Sequential(*layers).to(device))


generator, critic = mlp(NOISE, 2), mlp(2, 1)
generator_optimizer = ak.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
critic_optimizer = ak.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
scaler = ak.GradScaler(device, growth_interval=200)


def generate(count):
    return generator(torch.randn(count, NOISE, device=device))


@torch.no_grad()
def distance():
    """The mean distance of generated points from the nearest spot, and the number of spots with points nearby."""
    nearest = torch.cdist(generate(2000).float(), modes).min(1)
    return nearest.values.mean().item(), nearest.indices[nearest.values < 0.2].unique().numel()


before, _ = distance()
for _ in range(400):
    real = modes[torch.randint(8, (BATCH,), device=device)] + 0.03 * torch.randn(BATCH, 2, device=device)
    critic_optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        fake = generate(BATCH)
        critic_loss = (softplus(-critic(real)) + softplus(critic(fake.detach()))).mean()
    scaler.scale(critic_loss).backward()
    scaler.step(critic_optimizer)

    generator_optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        generator_loss = softplus(-critic(fake)).mean()
    scaler.scale(generator_loss).backward()
    scaler.step(generator_optimizer)
    scaler.update()  # once per iteration: backs off if either step overflowed
after, hit = distance()
print(f"scale {scaler.get_scale():.0f}, {int(scaler.skipped_steps)} steps skipped, {hit} of 8 spots found")
print(f"distance {before:.3f} -> {after:.3f}")
