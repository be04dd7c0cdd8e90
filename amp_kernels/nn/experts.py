"""The experts of a mixture as transformers' model files keep them, Mixtral's and those like it: weights of all experts in two parameters.

Their own forward loops over the experts and asks the device which ones have tokens, or runs torch's grouped product, which leaves rows
uninitialised. Here the tokens are sorted by expert and all experts run as two grouped products, the activation within the first one.
The host waits for nothing, and sums over a token's experts have one order, forward and backward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch.library import PLAIN
from .._sharding.dtensor import is_dtensor
from ..ops.grouped_mm import grouped_linear
from . import activation
from ._derived import base_of, own_forward, shows
from ._probe import same, standing_in, values
from ._wrapped import own_class
from .fused import is_untouched

WEIGHTS = ("gate_up_proj", "down_proj")


class _Sorted(torch.autograd.Function):
    """Rows of tokens in the order of their experts. Backward is :class:`_Summed`: it gathers, where indexing would add by atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Summed.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


class _Summed(torch.autograd.Function):
    """The sum over each token's experts of their rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.top_k = top_k
        return y[inverse].view(y.shape[0] // top_k, top_k, y.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Sorted.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


@shows("amp_kernels.grouped_mm")
def forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    gate_up, down = self.gate_up_proj, self.down_proj
    plain = type(gate_up) in PLAIN and type(down) in PLAIN
    if not plain or not is_untouched(self.act_fn):
        return own_forward(self, hidden_states, top_k_index, top_k_weights)
    top_k = top_k_index.shape[-1]
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    # An id beyond the experts belongs to another rank: its rows come last, behind the last end, and are zero.
    every = torch.arange(gate_up.shape[0], device=order.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, every, right=True, out_int32=True)
    x = _Sorted.apply(hidden_states, order, inverse, top_k)
    y = grouped_linear(grouped_linear(x, gate_up, offs, activation="swiglu"), down, offs)
    y = y * top_k_weights.reshape(-1)[order].unsqueeze(1)
    return _Summed.apply(y, order, inverse, top_k).to(hidden_states.dtype)


def recognised(module: torch.nn.Module) -> bool:
    """True if ``module`` has such weights and its class computes the same as :func:`forward`, tested with small ones."""
    parameters = module._parameters
    if set(parameters) != set(WEIGHTS) or set(module._modules) != {"act_fn"} or module._buffers:
        return False
    gate_up, down = (parameters[name] for name in WEIGHTS)
    for parameter in (gate_up, down):
        if not (type(parameter) is torch.nn.Parameter or is_dtensor(parameter)) or parameter.dtype not in FLOATS:
            return False
    if gate_up.ndim != 3 or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return False
    act_fn = module._modules["act_fn"]
    if activation.recognised(act_fn) != "silu" or not is_untouched(act_fn) or "forward" in vars(module):
        return False
    small = {"gate_up_proj": values(3, 8, 5, seed=0.3), "down_proj": values(3, 5, 4, seed=0.7)}
    probe, kind = standing_in(module, _parameters=small), own_class(module)
    probe.num_experts = 3
    own = inspect.unwrap(kind.forward)  # the loop, whatever implementation the model's configuration names
    routes = torch.tensor([[2, 0], [0, 1], [2, 3], [1, 0]]), values(4, 2, seed=1.7)
    return same(lambda x: own(probe, x, *routes), lambda x: forward(probe, x, *routes), values(4, 5), 1e-9)


def is_converted(module: torch.nn.Module) -> bool:
    kind = own_class(module)
    return base_of(kind) is not None and kind.forward is forward
