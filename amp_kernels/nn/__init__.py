"""Drop-in replacements for torch.nn modules over the ops, and ``convert``, which puts them into a model.

Examples:
    A transformer block adds its input to the residual stream, normalises the sum and applies a feed-forward block:

    >>> class Block(torch.nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.norm = ak.nn.RMSNorm(width)
    ...         self.mlp = ak.nn.MLP(width, 4 * width, activation="silu")
    ...
    ...     def forward(self, branch, stream):
    ...         normed, stream = self.norm(branch, residual=stream)
    ...         return self.mlp(normed), stream
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     branch, stream = Block(64)(torch.randn(2, 64), torch.randn(2, 64))
    >>> branch.dtype, stream.dtype
    (torch.bfloat16, torch.float32)
"""

from .._removed import attributes_of as _attributes_of
from . import functional
from .convert import convert, revert
from .cross_entropy import CrossEntropyLoss
from .embedding import Embedding
from .grouped_linear import GroupedLinear
from .linear import Linear
from .linear_cross_entropy import LinearCrossEntropyLoss
from .main_grad import accumulate_fp32
from .mlp import MLP
from .norm import LayerNorm, RMSNorm
from .override_matmul import override_matmul
from .residual_blocks import register_block
from .to_half import to_half
from .token_log_probs import token_log_probs

__getattr__ = _attributes_of(__name__)

__all__ = [
    "MLP",
    "CrossEntropyLoss",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "accumulate_fp32",
    "convert",
    "functional",
    "override_matmul",
    "register_block",
    "revert",
    "to_half",
    "token_log_probs",
]
