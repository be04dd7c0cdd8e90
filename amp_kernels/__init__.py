"""Hand-written CUDA and Triton kernels for mixed-precision training, as torch ops under a thin Python layer.

Importing never fails for want of a compiled library and touches no device; ``python -m amp_kernels info`` tells what is there.
"""

from . import _load, amp, nn, ops, optim
from ._policy import BackendUnavailable, backend
from ._version import __version__
from .amp import GradScaler, clip_grad_norm_, get_total_norm, recommended_dtype
from .nn import convert
from .ops.linear import linear
from .ops.matmul import matmul

_load.load()  # after the schemas of ops/: C++ only adds implementations

__all__ = [
    "BackendUnavailable",
    "GradScaler",
    "__version__",
    "amp",
    "backend",
    "clip_grad_norm_",
    "convert",
    "get_total_norm",
    "linear",
    "matmul",
    "nn",
    "ops",
    "optim",
    "recommended_dtype",
]
