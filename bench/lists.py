"""Parameter lists of real models, as shapes: what an optimizer step meets."""

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
    layer = [
        (128,),
        (128,),
        (384, 128),
        (384,),
        (128, 128),
        (128,),
        (128,),
        (128,),
        (512, 128),
        (512,),
        (128, 512),
        (128,),
    ]
    return [(256, 128), *layer * 2, (128,), (128,)]


LISTS = {"tiny": tiny, "resnet-50": resnet_50, "llama-1b": llama_1b}


def numel(shapes: list[Shape]) -> int:
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def for_device(device_type: str, quick: bool) -> list[str]:
    """Names of the lists worth timing there."""
    if device_type == "cuda":
        return ["resnet-50", "llama-1b"]
    return ["tiny"] if quick else ["tiny", "resnet-50"]
