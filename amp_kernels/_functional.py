"""torch's functions, bound at import. A program may put this package's in their places (``F.layer_norm = ak.layer_norm``); the
formulas here must still get torch's, or they would call themselves."""

from torch import addmm, baddbmm, bmm, matmul, mm
from torch import embedding as embedding_op
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear, pad, relu, rms_norm, silu

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "cross_entropy",
    "embedding",
    "embedding_op",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "mm",
    "pad",
    "relu",
    "rms_norm",
    "silu",
]
