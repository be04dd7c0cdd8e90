"""Samples of the ops that have no backends: small, seeded calls that cover dtypes and options, as the others bring them along for
``info --check``. ``samples(op, device)`` yields ``(args, kwargs)`` of any op."""

import torch

from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels._checks.lists import FLOATS, HALF_DTYPES
from amp_kernels._dispatch.samples import Normal
from amp_kernels.ops.embedding import INDEX_DTYPES


def norm(device):
    normal = Normal(device, grad=True)
    for i, dtype in enumerate(FLOATS):
        weight, bias = normal(6, dtype=dtype), normal(6, dtype=dtype)
        yield (normal(2, 4, 6, dtype=dtype), [6], weight, bias), {"eps": 1e-5, "centred": True}
        x, residual = normal(3, 5, 4, dtype=dtype), normal(3, 5, 4, dtype=dtype)
        yield (x, [5, 4], normal(5, 4, dtype=dtype), None, residual), {"eps": 1e-6, "centred": i % 2 == 0}
    for dtype in (torch.float16, torch.bfloat16):
        x = normal(4, 8, dtype=dtype)
        weight, residual = normal(8, dtype=torch.float32), normal(4, 8, dtype=torch.float32)
        yield (x, [8], weight), {"eps": 1e-5, "centred": False}
        yield (x, [8], weight, None, residual), {"eps": 1e-5, "centred": True, "compute_dtype": dtype}


def mlp(device):
    normal = Normal(device, grad=True)

    def problem(activation, dtype, grad=True):
        rows = 12 if activation in GATED else 6
        shapes = ((2, 4, 5), (rows, 5), (rows,), (3, 6), (3,))
        return tuple(normal(*shape, dtype=dtype, grad=grad) for shape in shapes)

    for dtype in FLOATS:
        for activation in ("gelu", "swiglu"):
            yield problem(activation, dtype), {"activation": activation, "recompute": dtype.itemsize == 2}
    for dtype, activation in zip(HALF_DTYPES, ("swiglu", "relu"), strict=True):
        x, w1, b1, w2, _ = problem(activation, torch.float32)
        options = {"activation": activation, "compute_dtype": dtype}
        yield (x, w1, None, w2), options
        shadows = w1.detach().to(dtype), w2.detach().to(dtype)
        yield (x[0, 0], w1, b1, w2, None, *shadows), {**options, "batch_invariant": 1}
        yield problem(activation, dtype, grad=False), {"activation": activation}


def baddbmm(device):
    normal = Normal(device, grad=True)

    for dtype in FLOATS:
        a, b = normal(2, 3, 5, dtype=dtype), normal(2, 5, 4, dtype=dtype)
        yield (normal(2, 3, 4, dtype=dtype), a, b), {"beta": 0.5, "alpha": -2.0}
        yield (normal(4, dtype=dtype, grad=False), a[0].detach(), b[0].detach()), {}
    for dtype in HALF_DTYPES:
        a, b = normal(2, 3, 5, dtype=torch.float32), normal(2, 5, 4, dtype=torch.float32)
        yield (normal(3, 1, dtype=torch.float32), a, b), {"compute_dtype": dtype, "batch_invariant": 1}
        yield (torch.full((4,), torch.nan, device=device), a, b), {"compute_dtype": dtype, "beta": 0.0}


def activation(device):
    generator = torch.Generator().manual_seed(0)
    for activation, dtype in zip(("gelu", "gelu_tanh", "silu", "swiglu"), FLOATS, strict=True):
        x = torch.randn(3, 6, generator=generator).to(device, dtype)
        yield (x.requires_grad_(),), {"activation": activation}


def linear(device):
    normal = Normal(device, grad=True)

    for i, dtype in enumerate(FLOATS):
        yield (normal(4, 5, dtype=dtype), normal(3, 5, dtype=dtype)), {}
        for activation in (list(ACTIVATIONS)[i + 1], "swiglu"):
            yield (
                (normal(2, 4, 5, dtype=dtype), normal(6, 5, dtype=dtype), normal(6, dtype=dtype)),
                {"activation": activation},
            )
    for dtype in HALF_DTYPES:
        x, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((4, 5), (3, 5), (3,)))
        yield (x, weight, bias), {"activation": "gelu", "compute_dtype": dtype}
        yield (x, weight, None, weight.detach().to(dtype)), {"activation": "silu", "compute_dtype": dtype}
        yield (normal(5, dtype=dtype, grad=False), weight), {"compute_dtype": dtype}
        yield (
            (normal(4, 5, dtype=dtype, grad=False), normal(3, 5, dtype=dtype, grad=False)),
            {"activation": "relu", "batch_invariant": 1},
        )


def linear_split(device):
    normal = Normal(device, grad=True)
    for dtype in FLOATS:
        yield (normal(2, 4, 5, dtype=dtype), normal(6, 5, dtype=dtype), normal(6, dtype=dtype)), {"split": [1, 3, 2]}
    for dtype in HALF_DTYPES:
        x, weight = normal(70, 8, dtype=torch.float32), normal(128, 8, dtype=torch.float32)
        yield (x, weight), {"split": [64, 64], "compute_dtype": dtype}
        yield (x.to(dtype), weight.to(dtype)), {"split": [0, 128], "batch_invariant": 1}


def matmul(device):
    normal = Normal(device, grad=True)

    for dtype in FLOATS:
        yield (normal(3, 5, dtype=dtype, grad=False), normal(5, 4, dtype=dtype, grad=False)), {}
        yield (normal(2, 3, 5, dtype=dtype), normal(5, 4, dtype=dtype)), {}
    for dtype in HALF_DTYPES:
        yield (normal(5, dtype=dtype, grad=False), normal(5, dtype=dtype, grad=False)), {"out_dtype": torch.float32}
        yield (normal(2, 1, 3, 5, dtype=dtype), normal(4, 5, 2, dtype=dtype)), {"out_dtype": torch.float32}
        yield (normal(3, 5, dtype=torch.float32), normal(2, 5, 4, dtype=dtype, grad=False)), {"compute_dtype": dtype}


def grouped_mm(device):
    normal = Normal(device, grad=True)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
    for i, dtype in enumerate(FLOATS):
        a, b = normal(7, 5, dtype=dtype), normal(3, 5, 4, dtype=dtype)
        yield (a, b, offs), {}
        for activation in (list(ACTIVATIONS)[i + 1], "swiglu"):
            yield (a, b, offs, normal(3, 4, dtype=dtype)), {"activation": activation}
        yield (normal(4, 7, dtype=dtype), a, offs), {}
        yield (normal(3, 2, 5, dtype=dtype), normal(5, 7, dtype=dtype), offs), {}
        yield (normal(3, 2, 5, dtype=dtype), b, None, normal(4, dtype=dtype)), {"activation": "silu"}
    for dtype in HALF_DTYPES:
        a, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((7, 5), (3, 4, 5), (4,)))
        yield (a, weight, offs, bias), {"activation": "gelu", "transposed": True, "compute_dtype": dtype}
        shadow = weight.detach().to(dtype)
        yield (a, weight, offs, None, shadow), {"transposed": True, "compute_dtype": dtype}
        yield (weight.detach()[:, :2], a.detach().t(), offs[:3]), {"out_dtype": dtype, "compute_dtype": dtype}
    places = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32, device=device)
    a, b, weights = normal(3, 5), normal(3, 5, 4), normal(3, 2)
    routes = {"gather": places, "scatter": places, "weights": weights}
    for dtype in HALF_DTYPES:
        yield (a, b, offs), {**routes, "activation": "silu", "compute_dtype": dtype}
        rows = normal(6, 5, dtype=dtype, grad=False)
        yield (rows, b.detach().to(dtype), offs), {"scatter": places, "out_dtype": torch.float32}


def rotary(device):
    normal = Normal(device)
    for i, dtype in enumerate(FLOATS):
        q, k = normal(2, 3, 4, 6, dtype=dtype, grad=True), normal(2, 1, 4, 6, dtype=dtype, grad=True)
        cos, sin = normal(4, 6, dtype=dtype), normal(4, 6, dtype=dtype)
        yield (q, k, cos, sin), {"interleaved": i % 2 == 0}
        weights = normal(6, dtype=dtype, grad=True), normal(6, dtype=dtype, grad=True)
        cos, sin = normal(2, 4, 4, dtype=dtype), normal(2, 4, 4, dtype=dtype)
        yield (q, k, cos, sin, *weights), {"eps": 1e-3, "interleaved": i % 2 == 1}
    for dtype in (torch.float16, torch.bfloat16):
        q, k = (normal(2, 4, 3, 8, dtype=dtype, grad=True).transpose(1, 2).detach().requires_grad_() for _ in range(2))
        yield (q, k, normal(1, 4, 8), normal(1, 4, 8)), {}
        yield (q, k, normal(1, 4, 8), normal(1, 4, 8)), {"compute_dtype": torch.float32}


def embedding(device):
    generator = torch.Generator().manual_seed(0)
    for i, dtype in enumerate(FLOATS):
        weight = torch.randn(7, 5, generator=generator).to(device, dtype).requires_grad_()
        indices = torch.randint(7, (3, 6), generator=generator).to(device, INDEX_DTYPES[(i + 1) % 2])
        yield (weight, indices), {}
        yield (weight, indices[0], 2, i % 2 == 0), {}
    yield (weight.detach(), indices[0, 0]), {}
    yield (torch.ones(2, 3, device=device, requires_grad=True), indices[:0]), {}


def cross_entropy(device):
    normal = Normal(device, grad=True)

    def classes(*shape):
        target = torch.randint(5, shape, generator=normal.generator).to(device)
        target.view(-1)[1:2] = -100
        return target

    yield (normal(4, 5, dtype=torch.bfloat16), normal(4, 5, dtype=torch.float32, grad=False).softmax(1)), {}
    for dtype in FLOATS:
        yield (normal(4, 5, dtype=dtype), classes(4)), {}
        weight = normal(5, dtype=dtype, grad=False).abs()
        yield (normal(4, 5, dtype=dtype), classes(4), weight), {"label_smoothing": 0.1, "z_loss": 0.01}
        yield (normal(2, 5, 3, dtype=dtype), classes(2, 3)), {"reduction": "none"}
        soft = normal(4, 5, dtype=dtype, grad=False).softmax(1)
        yield (normal(4, 5, dtype=dtype), soft, weight), {"reduction": "sum", "label_smoothing": 0.1}
        yield (normal(4, 5, dtype=dtype, grad=False), classes(4)), {"out_dtype": torch.float32}


SAMPLES = {
    each.__name__: each
    for each in (
        norm,
        mlp,
        baddbmm,
        activation,
        linear,
        linear_split,
        matmul,
        grouped_mm,
        rotary,
        embedding,
        cross_entropy,
    )
}


def samples(op, device):
    return (op.samples or SAMPLES[op.name])(device)
