"""A parity check: train in FP32, BF16 and FP16 over several seeds; fail if the formats differ by more than the seeds do.

python examples/parity.py      or, in CI, with an exit code:      python -m amp_kernels parity examples/parity.py:train --seeds 3
"""

import torch
from torch import nn

import amp_kernels as ak


def rings(count, device):
    """Points in the plane, and the index of the ring (of four around the origin) of each. Rings overlap: the loss cannot reach 0."""
    ring = torch.randint(4, (count,), device=device)
    angle, width = torch.rand(2, count, device=device)
    points = torch.stack([(2 * torch.pi * angle).cos(), (2 * torch.pi * angle).sin()], 1)
    return points * (ring + 1.4 * width)[:, None], ring


def train(run, steps=150):
    """Build everything from ``run`` (device, format, scaler; the seed is set) and return the loss on new points."""
    layers = nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    model = ak.convert(nn.Sequential(*layers).to(run.device))
    optimizer = ak.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = ak.nn.CrossEntropyLoss()
    for _ in range(steps):
        points, ring = rings(256, run.device)
        optimizer.zero_grad()
        with run.autocast():
            loss = criterion(model(points), ring)
        run.scaler.scale(loss).backward()
        run.scaler.step(optimizer, max_norm=1.0)
        run.scaler.update()
    with torch.no_grad(), run.autocast():
        points, ring = rings(4000, run.device)
        return criterion(model(points), ring).item()


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained = train(ak.numerics.Run("fp32", 0, device), steps=0)
    found = ak.numerics.parity(train, device=device)
    print(found)  # per format: metric, spread, difference from FP32, steps per second, skipped steps
    print(f"every format has parity: {bool(found)}")
    trained = [outcome.metric for outcome in found.outcomes if outcome.precision == "bf16"]
    print(f"loss {untrained:.3f} -> {sum(trained) / len(trained):.3f}")
