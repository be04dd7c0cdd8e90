"""cross_entropy: loss and gradient of a language model's logits; linear_cross_entropy: with the last layer, whose logits are
never held. Under autocast, against torch eager, compiled and fused, Liger and QuACK.

linear_log_probs: the same layer with fp32 logits, without and with entropies, against ``linear_cross_entropy(reduction="none")``, whose
logits have 16 bits. It is to take at most 1.10 of its time each way on a CPU, 1.20 with entropies. On a GPU also against torch's product
with fp32 results and, where they are installed, the heads of verl, Liger and TRL.

On one thread of a shared AMD EPYC (2026-11-29, bf16, 512 x 1,024 x 32,000, four rounds in turns, processor time; median of the rounds'
ratios, and ratio of the least times): forward 1.04 and 1.08, with entropies 1.01 and 1.06; forward + backward 1.02 and 1.04, with
entropies 1.00 and 1.02. Of 48 rows, log-probabilities were 4.3e-7 off in bf16 and 5.0e-7 in fp16 (root mean square; 7.8e-7 and 8.9e-7 with
4,096 features), no ratio was outside of [0.999, 1.001], and the gradients were as far from float64 as those of 16-bit logits.

A prediction for an H200, of 16,384 x 4,096 x 152,064 in 16 bits; nothing of it was measured. A product is 20.4 TFLOP, 30.9 ms at the 660
TF/s that the card sustains; forward has 1, forward + backward 4. A logit is written and read by so many bytes of traffic, which 4.1 TB/s
move, for 2.49e9 logits:

| | bytes of a logit | GB | ms | with the products, ms |
|---|---|---|---|---|
| forward, 16 bits | 2 w, 2 r | 10.0 | 2.4 | 33.3 |
| forward, fp32 | 4 w, 4 r | 19.9 | 4.9 | 35.8 (1.07) |
| forward + backward, 16 bits | 4 and 2 w, 2 r, 2 w, 2 x 2 r | 34.9 | 8.5 | 132.1 |
| forward + backward, fp32 | 8 and 4 w, 4 r, 2 w, 2 x 2 r | 54.8 | 13.4 | 137.0 (1.04) |

State: the input 0.13 GB, the 16-bit weight and 12 bytes a row with entropies, 8 without. At most beyond it and the gradients: a chunk of
4,096 rows, 2.5 GB of fp32 logits and 1.2 GB of their 16-bit gradient.

Statistics from the product's epilogue would leave no traffic in the forward: 4.9 ms of 35.8 less. The backward could make the gradient
from the tile of logits that it computes, with statistics it has: 2 w, 2 x 2 r remain, 14.9 GB and 3.6 ms, 9.8 of 137.0 less. They are not
built: both ratios above are within 1.08 and 1.05, the goals, without them, and for equal bits the row kernel, which alone reads logits of
other widths and with class weights, would have to add up in the order of the product's tiles, which tuning changes.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compiled, differentiable, timed_call

ERROR = {"bf16": 2.0**-7, "fp32": 2.0**-16}
LINEAR_CUDA = [(16384, 768, 50257), (4096, 4096, 128256), (8192, 4096, 128256)]  # tokens, features, classes


def cross_entropy(scope: Scope) -> Iterator[Case]:
    shapes = scope.pick([(8192, 50257), (8192, 50304), (8192, 128256)], [(256, 50257)], [(16, 1001)])  # tokens, classes
    for shape in shapes:
        for dtype in scope.dtypes("bf16", "fp32"):
            on_gpu = scope.device.type == "cuda"
            compiles = on_gpu and dtype == "bf16" and shape == shapes[0]
            yield rows_case(*shape, dtype, scope.device, compiles)


def rows_case(rows: int, classes: int, dtype: str, device: torch.device, compiles: bool) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        logits = torch.randn(rows, classes, generator=generator, device=device, dtype=DTYPES[dtype])
        return [logits, torch.randint(classes, (rows,), generator=generator, device=device), None]

    functions = compiled({"torch": F.cross_entropy} | peers.functions("cross_entropy", device), compiles)
    return differentiable(
        "cross_entropy_rows_",
        device,
        ak.cross_entropy,
        functions,
        bound=ERROR[dtype],
        autocast=True,
        op="cross_entropy",
        shape=f"{rows}x{classes} forward + backward",
        dtype=dtype,
        bytes=2 * DTYPES[dtype].itemsize * rows * classes,
        flops=20 * rows * classes,
        inputs=inputs,
        families=("cross-entropy, forward + backward",),
    )


def linear_cross_entropy(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(LINEAR_CUDA, [(256, 64, 50257)], [(32, 16, 501)]):
        yield head_case(*shape, scope.device, compiles=shape == LINEAR_CUDA[0])


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def head_case(rows: int, features: int, classes: int, device: torch.device, compiles: bool) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        x = torch.randn(rows, features, generator=generator, device=device, dtype=torch.bfloat16)
        weight = torch.randn(classes, features, generator=generator, device=device).mul_(features**-0.5)
        return [x, weight, torch.randint(classes, (rows,), generator=generator, device=device), None]

    functions = {"torch": _eager} | peers.functions("linear_cross_entropy", device)
    functions |= peers.torch_linear_cross_entropy() if device.type == "cuda" else {}
    functions = compiled(functions, compiles)
    return differentiable(
        "gemm",
        device,
        ak.linear_cross_entropy,
        functions,
        leaves=2,
        bound=2.0**-5,  # logits and their gradient are rounded to bf16
        autocast=True,
        op="linear_cross_entropy",
        shape=f"{rows} x {features}-{classes} forward + backward",
        dtype="bf16",
        bytes=2 * 3 * rows * features + 8 * classes * features,
        flops=6 * rows * features * classes,
        inputs=inputs,
        families=("linear cross-entropy, forward + backward",),
    )


def linear_log_probs(scope: Scope) -> Iterator[Case]:
    shape = scope.pick((16384, 4096, 152064), (512, 1024, 32000), (32, 16, 501))
    for backward in (False, True):
        yield log_probs_case(*shape, backward, scope.device)


def _with_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_probs, entropies = ak.linear_log_probs(x, weight, target, entropy=True)
    return log_probs + 0 * entropies


def log_probs_case(rows: int, features: int, classes: int, backward: bool, device: torch.device, **case) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        x = torch.randn(rows, features, generator=generator, device=device).bfloat16()
        weight = torch.randn(classes, features, generator=generator, device=device).mul_(features**-0.5).bfloat16()
        target = torch.randint(classes, (rows,), generator=generator, device=device)
        return [x, weight, target, torch.randn(rows, generator=generator, device=device)]

    def of_16_bits(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -ak.linear_cross_entropy(x, weight, target, reduction="none")

    functions = {"linear_cross_entropy": of_16_bits} | peers.functions("linear_log_probs", device)
    functions |= {"torch:fp32 logits": peers.torch_log_probs} if device.type == "cuda" else {}
    return differentiable(
        "gemm",
        device,
        ak.linear_log_probs,
        functions,
        last={"amp_kernels:entropy": lambda tensors: timed_call(_with_entropy, tensors, 2, backward)},
        leaves=2,
        bound=2.0**-5,  # of the 16-bit logits
        backward=backward,
        reference=ak.linear_log_probs,
        op="linear_log_probs",
        shape=f"{rows} x {features}-{classes} forward{' + backward' * backward}",
        dtype="bf16",
        bytes=(2 + 6 * backward) * features * (rows + classes),
        flops=(2 + 6 * backward) * rows * features * classes,
        inputs=inputs,
        families=(f"log-probabilities of tokens, forward{' + backward' * backward}",),
        memory=8 * 6 * rows * classes,  # of the reference
        **case,
    )


CASES = (cross_entropy, linear_cross_entropy, linear_log_probs)
