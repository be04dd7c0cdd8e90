"""A training step of ResNet-50 in FP32, TF32, BF16 and FP16, with torch and with amp_kernels: time and images a second.

python -m bench.resnet                                              # 128 images of 224 x 224, channels_last, on CUDA
python -m bench.resnet --device cpu --batch 2 --size 32 --steps 1   # that it runs

The step is forward, cross entropy, backward, clipping to norm 1 and SGD with momentum, with loss scaling in FP16. Convolutions and batch
norms are torch's for all; amp_kernels replaces the last layer, the loss, the check of the gradients, clipping and the optimizer.
Providers take turns, as in bench.gpt2.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

import amp_kernels as ak

from . import options as common
from .gpt2 import seconds
from .harness import environment, sources
from .training.trainers import TRAINERS

LR, MOMENTUM, CLASSES = 0.1, 0.9, 1000
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # He et al., Deep Residual Learning, arXiv:1512.03385, table 1


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            *convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )  # fmt: skip
        self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if inputs != outputs else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.branch(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Sequential:
    blocks, inputs = [], 64
    for width, count in STAGES:
        for i in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if i == 0 and width > 64 else 1))
            inputs = 4 * width
    stem = (*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def sgd(library):
    return lambda model, lr: [library.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)]


def build(provider: str, dtype: str, images: torch.Tensor, classes: torch.Tensor):
    """The step of a provider, which returns its loss."""
    device, torch_dtype = images.device, DTYPES[dtype]
    torch.manual_seed(0)
    model = nn.ModuleList([resnet50().to(device, memory_format=torch.channels_last), nn.CrossEntropyLoss()])
    optimizers = sgd(ak.optim if provider == "amp_kernels" else torch.optim)
    trainer = TRAINERS[provider](model, device, LR, dtype == "fp16", 2000, optimizers=optimizers)

    def step() -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        with torch.autocast(device.type, dtype=torch_dtype, enabled=torch_dtype != torch.float32):
            network, criterion = trainer.model
            loss = criterion(network(images), classes)
        trainer.update(loss)
        return loss.detach()

    return step


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.resnet", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", help=f"comma-separated (default: {','.join(DTYPES)})")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: CUDA if there is one)")
    parser.add_argument("--batch", type=common.positive, default=128, help="images a step (default: 128)")
    parser.add_argument("--size", type=common.positive, default=224, help="rows and columns of an image (default: 224)")
    parser.add_argument("--steps", type=common.positive, default=10, help="of each provider in a turn (default: 10)")
    parser.add_argument("--rounds", type=common.positive, default=5, help="turns (default: 5)")
    parser.add_argument("--out", type=Path, help="folder that gets resnet.jsonl")
    options = parser.parse_args(argv)
    options.device = common.device(parser, options.device)
    options.dtype = common.names(parser, "--dtype", options.dtype, DTYPES)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = options.device
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(options.batch, 3, options.size, options.size, generator=generator)
    images = images.to(device, memory_format=torch.channels_last)
    classes = torch.randint(CLASSES, (options.batch,), generator=generator).to(device)
    machine, steps, rows = environment.describe(device), {}, []
    for dtype in options.dtype:
        # FP32 has one provider: outside autocast amp_kernels leaves the arithmetic to torch.
        for provider in ("torch", *["amp_kernels"] * (DTYPES[dtype] != torch.float32)):
            steps[dtype, provider] = step = build(provider, dtype, images, classes)
            rows.append({"model": "resnet-50", "batch": options.batch, "dtype": dtype, "provider": provider})
            rows[-1]["losses"] = [step().item() for _ in range(3)]
    times: dict[tuple[str, str], list[float]] = {name: [] for name in steps}
    clocks: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, options.steps, device))
            clocks[name] = environment.clocks(device)  # now: the GPU slows down when it idles
    for row, name in zip(rows, steps, strict=True):
        row |= {"ms": 1e3 * statistics.median(times[name]), **clocks[name]}
        row["images_per_s"] = 1e3 * options.batch / row["ms"]
        row |= {key: machine[key] for key in ("device", "commit", "date", "versions")}
        print(
            f"{row['dtype']} {row['provider']:12} {row['ms']:8.1f} ms a step, {row['images_per_s']:8.0f} images/s",
            flush=True,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        sources.record(options.out, machine["commit"])
        (options.out / "resnet.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
