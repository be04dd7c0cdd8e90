"""A small residual CNN in torchvision's style: channels-last, SGD with momentum, warm-up and cosine schedule.

python examples/cnn.py
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import amp_kernels as ak

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = ak.recommended_dtype(device)
torch.manual_seed(0)
STEPS, SIZE, CLASSES = 60, 24, 8


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


def gratings(count):
    """Noisy stripes; the class is their direction."""
    label = torch.randint(CLASSES, (count,), device=device)
    angle, phase = torch.pi * label / CLASSES, 6.28 * torch.rand(count, device=device)
    line = torch.arange(SIZE, device=device)
    wave = torch.outer(angle.cos(), line)[:, :, None] + torch.outer(angle.sin(), line)[:, None]
    image = (wave + phase[:, None, None]).sin()[:, None] + torch.randn(count, 3, SIZE, SIZE, device=device)
    return image.contiguous(memory_format=torch.channels_last), label


head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
model = nn.Sequential(Block(3, 16), Block(16, 32), head).to(device, memory_format=torch.channels_last)
ak.convert(model)  # converts the last layer; the convolutions stay torch's
optimizer = ak.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
scaler = ak.GradScaler(device, enabled=dtype == torch.float16)
scheduler = ak.amp.SkipAwareScheduler(OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1), scaler)

losses = []
for _ in range(STEPS):
    images, labels = gratings(64)
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = ak.cross_entropy(model(images), labels, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.detach())
print(f"loss {losses[0]:.3f} -> {torch.stack(losses[-5:]).mean():.3f}")
