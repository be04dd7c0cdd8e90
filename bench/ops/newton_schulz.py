"""newton_schulz: Muon's iteration over all matrices of a model, against torch's loop over them.

torch's is the function of torch.optim.Muon, in bf16. The flops are those of the plain form, 20 n^2 m + 10 n^3 for five
steps, so that a faster form shows as a higher rate.
"""

from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak
from amp_kernels.ops.newton_schulz import KELLER_JORDAN

from ..harness.case import Case, Scope, Tensors
from .providers import differentiable

GPT2 = {(2304, 768): 12, (768, 768): 12, (3072, 768): 12, (768, 3072): 12}  # shapes, and how many of each
LLAMA_1B = {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16}
CUDA = {"GPT-2 124M": GPT2, "Llama-3.2-1B": LLAMA_1B}
CPU = {"a block of GPT-2": dict.fromkeys(GPT2, 1)}
TINY = {"small matrices": {(24, 24): 2, (40, 16): 1}}


def newton_schulz(scope: Scope) -> Iterator[Case]:
    for name, shapes in scope.pick(list(CUDA.items()), list(CPU.items()), list(TINY.items())):
        yield _case(name, shapes, scope.device)


def torchs_iteration() -> Callable[[torch.Tensor], torch.Tensor]:
    """The iteration of torch.optim.Muon, for one matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return lambda x: _zeropower_via_newtonschulz(x, KELLER_JORDAN, 5, 1e-7).to(x.dtype)


def exact(x: torch.Tensor) -> torch.Tensor:
    """The iteration in the dtype of ``x``."""
    x = x / x.norm()
    a, b, c = KELLER_JORDAN
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _case(name: str, shapes: dict[tuple[int, int], int], device: torch.device) -> Case:
    sizes = [shape for shape, count in shapes.items() for _ in range(count)]

    def inputs(generator: torch.Generator) -> Tensors:
        return [*(torch.randn(size, generator=generator, device=device).bfloat16() for size in sizes), None]

    def together(iteration: Callable) -> Callable:
        return lambda *matrices: torch.cat([y.flatten() for y in iteration(list(matrices))])

    iteration = torchs_iteration()
    flops = sum(10 * min(s) ** 2 * (2 * max(s) + min(s)) for s in sizes)
    return differentiable(
        "syrk",
        device,
        together(ak.newton_schulz),
        {"torch": together(lambda matrices: [iteration(x) for x in matrices])},
        leaves=0,
        backward=False,
        reference=together(lambda matrices: [exact(x) for x in matrices]),
        bound=0.2,  # of two iterations in 16 bits
        op="newton_schulz",
        shape=name,
        dtype="bf16",
        bytes=sum(4 * m * n for m, n in sizes),
        flops=flops,
        inputs=inputs,
    )


CASES = (newton_schulz,)
