"""The experts of a mixture as transformers' model files keep them, Mixtral's and those like it: weights of all experts in two parameters.

Their own forward loops over the experts and asks the device which ones have tokens, or runs torch's grouped product, which leaves rows
uninitialised. Here the tokens are sorted by expert and all experts run as two grouped products, the activation within the first one.
The host waits for nothing, and sums over a token's experts have one order, forward and backward.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch.library import PLAIN
from .._sharding.dtensor import is_dtensor
from ..ops.grouped_mm import grouped_linear
from ..ops.routing import route
from . import activation
from ._derived import base_of, own_forward, shows
from ._probe import same, standing_in, values
from ._wrapped import is_untouched, own_class

WEIGHTS = ("gate_up_proj", "down_proj")


@shows("amp_kernels.grouped_mm")
def forward(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    gate_up, down = self.gate_up_proj, self.down_proj
    plain = type(gate_up) in PLAIN and type(down) in PLAIN
    if not plain or not is_untouched(self.act_fn):
        return own_forward(self, hidden_states, top_k_index, top_k_weights)
    # An id beyond the experts belongs to another rank: its rows are zero.
    offs, places = route(top_k_index, gate_up.shape[0])
    hidden = grouped_linear(hidden_states, gate_up, offs, activation="swiglu", gather=places)
    dtype = hidden_states.dtype
    return grouped_linear(hidden, down, offs, scatter=places, weights=top_k_weights, out_dtype=dtype)


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
