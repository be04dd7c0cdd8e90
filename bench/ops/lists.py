"""Parameter lists of real models, as shapes, and random tensors of these."""

import math
from collections.abc import Callable, Iterable

import torch

from ..harness.case import Scope

Shape = tuple[int, ...]


def llama_1b() -> list[Shape]:
    """Llama-3.2-1B: 146 tensors, 1.24 G parameters, nearly all in large matrices."""
    width, hidden, layers, vocabulary, kv = 2048, 8192, 16, 128256, 512
    layer = [(width,), (width, width), (kv, width), (kv, width), (width, width)]
    layer += [(width,), (hidden, width), (hidden, width), (width, hidden)]
    return [(vocabulary, width), *layer * layers, (width,)]


def resnet_50() -> list[Shape]:
    """ResNet-50: 161 tensors, 25.6 M parameters, most tensors tiny: launches and host time decide."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, size in ((planes, 1), (planes, 3), (4 * planes, 1)):
                shapes += [(out, channels, size, size), (out,), (out,)]
                channels = out
            if block == 0:
                inputs = 64 if planes == 64 else 2 * planes
                shapes += [(4 * planes, inputs, 1, 1), (4 * planes,), (4 * planes,)]
    return [*shapes, (1000, 2048), (1000,)]


def tiny() -> list[Shape]:
    """A two-layer transformer of width 128: 27 tensors, 0.4 M parameters, for the CPU."""
    layer = [(128,), (128,), (384, 128), (384,), (128, 128), (128,)]
    layer += [(128,), (128,), (512, 128), (512,), (128, 512), (128,)]
    return [(256, 128), *layer * 2, (128,), (128,)]


def many(count: int = 10_000, size: int = 64) -> list[Shape]:
    """Many small tensors: launches and host time decide."""
    return [(size,)] * count


LISTS: dict[str, Callable[[], list[Shape]]] = {
    "tiny": tiny,
    "resnet-50": resnet_50,
    "llama-1b": llama_1b,
    "10000 x 64": many,
    "100 x 64": lambda: many(100),
}
# Bytes a parameter while an optimizer step is checked and timed: inputs and the float64 reference of the check, then
# weights, gradients and state of up to five providers side by side.
BYTES_PER_PARAM = 110


def numel(shapes: list[Shape]) -> int:
    return sum(map(math.prod, shapes))


def chosen(scope: Scope, tensors: bool = False) -> dict[str, list[Shape]]:
    """The lists worth timing there, with `tensors` also the one of many small tensors, by name.

    A list that does not fit into the scope's memory has its tensors halved until it does; its name says so
    ("llama-1b / 4"), so that its rows never stand for those of the whole.
    """
    if scope.device.type == "cuda":
        names = ["resnet-50", "llama-1b"] + ["10000 x 64"] * tensors
    else:
        names = ["tiny"] + ["resnet-50"] * (not scope.quick) + ["100 x 64" if scope.quick else "10000 x 64"] * tensors
    return dict(_reduced(name, LISTS[name](), scope.memory) for name in names)


def _reduced(name: str, shapes: list[Shape], memory: float) -> tuple[str, list[Shape]]:
    factor = 1
    while BYTES_PER_PARAM * numel(small := [(-(-s[0] // factor), *s[1:]) for s in shapes]) > memory and factor < 2**20:
        factor *= 2
    return (name if factor == 1 else f"{name} / {factor}"), small


def draw(shapes: Iterable[Shape], dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """Normal numbers, generated directly in ``dtype`` on the generator's device: a float32 copy of a large list may not fit."""
    return [torch.randn(shape, generator=generator, device=generator.device, dtype=dtype) for shape in shapes]
