"""routing: the rows of tokens to their experts and their weighted sums back, forward and backward, against torch's index_select and
index_add, whose order of additions changes from run to run.

Shapes are those of Mixtral, OLMoE and Qwen3. Bytes are those that the four kernels must read and write: 4 + 5 k rows for a token.
"""

from collections.abc import Iterator

import torch

import amp_kernels as ak
from amp_kernels.ops.routing import combine_rows, spread_rows

from ..harness.case import DTYPES, Case, Scope, Tensors
from .providers import differentiable

CUDA = [(8192, 2, 4096, 8), (4096, 8, 2048, 64), (8192, 8, 2048, 128)]  # tokens, choices, columns, experts


def routing(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, [(2048, 2, 1024, 8), (1024, 8, 512, 64)], [(48, 2, 32, 4)]):
        yield _case(*shape, "bf16", scope.device)


def _indexed(x, weights, places):
    """The same by an index of tokens in the order of the rows."""
    rows = places.flatten().long()
    token = torch.empty_like(rows).scatter_(
        0, rows, torch.arange(len(x), device=x.device).repeat_interleave(places.shape[1])
    )
    factors = torch.zeros_like(weights).flatten().index_copy(0, rows, weights.flatten())
    return torch.zeros_like(x).index_add(0, token, (x.index_select(0, token) * factors[:, None]).to(x.dtype))


def _case(tokens: int, top_k: int, columns: int, experts: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        x, grad = (torch.randn(tokens, columns, generator=generator, device=device).to(DTYPES[dtype]) for _ in range(2))
        scores = torch.rand(tokens, experts, generator=generator, device=device)
        weights, chosen = scores.softmax(-1).topk(top_k)
        return [x, weights, ak.route(chosen, experts)[1], grad]

    return differentiable(
        "combine_rows",
        device,
        lambda x, weights, places: combine_rows(spread_rows(x, places), places, weights, x.dtype),
        {"torch": _indexed},
        leaves=2,
        bound=0.05,  # torch adds in bf16
        op="routing",
        shape=f"{tokens} x {top_k} choices of {columns} columns, {experts} experts",
        dtype=dtype,
        bytes=DTYPES[dtype].itemsize * tokens * columns * (4 + 5 * top_k),
        flops=6 * tokens * top_k * columns,
        inputs=inputs,
    )


CASES = (routing,)
