"""Hand-written CUDA and Triton kernels for mixed-precision training, as torch ops with a thin Python layer.

The names by job:

- training loop: GradScaler, graph_step, clip_grad_norm_, get_total_norm, recommended_dtype; amp
- optimizers: optim; fp32_state_dict, refresh_shadows
- models: convert, revert, override_matmul; nn
- products: linear, mlp, matmul, addmm, baddbmm, grouped_mm, syrk, newton_schulz
- losses: cross_entropy, linear_cross_entropy, linear_log_probs
- other layers: layer_norm, rms_norm, gelu, silu, swiglu, rotary, embedding, route, cast_
- runs and other tools: checkpoint, distributed, numerics, integrations
- choice of kernels: backend, BackendUnavailable, batch_invariant, set_enabled, is_enabled; ops

Importing works without compiled libraries and touches no device; ``python -m amp_kernels info`` shows what was built.
"""

from . import _requirements  # noqa: I001, F401 (first: it refuses a torch that is too old)
from . import _raw, _updates, amp, checkpoint, distributed, integrations, nn, numerics, ops, optim  # noqa: F401 (they define ops)
from ._dispatch import load as _load
from ._dispatch import nodes as _nodes
from ._dispatch.batch_invariant import batch_invariant
from ._dispatch.policy import BackendUnavailable, backend
from ._dispatch.switch import is_enabled, set_enabled
from ._dispatch.switch import read_environment as _read_environment
from ._removed import attributes_of as _attributes_of
from ._version import __version__
from .amp import GradScaler, clip_grad_norm_, get_total_norm, graph_step, recommended_dtype
from .nn import convert, override_matmul, revert
from .ops.activation import gelu, silu, swiglu
from .ops.baddbmm import addmm, baddbmm
from .ops.cast import cast_
from .ops.cross_entropy import cross_entropy
from .ops.embedding import embedding
from .ops.grouped_mm import grouped_mm
from .ops.linear import linear
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.linear_log_probs import linear_log_probs
from .ops.matmul import matmul
from .ops.mlp import mlp
from .ops.newton_schulz import newton_schulz
from .ops.norm import layer_norm, rms_norm
from .ops.rotary import rotary
from .ops.routing import route
from .ops.syrk import syrk
from .optim import fp32_state_dict, refresh_shadows

__getattr__ = _attributes_of(__name__)
_load.load()  # after the schemas: C++ only adds implementations
_nodes.load_module()
_read_environment()

__all__ = [
    "BackendUnavailable",
    "GradScaler",
    "__version__",
    "addmm",
    "amp",
    "backend",
    "baddbmm",
    "batch_invariant",
    "cast_",
    "checkpoint",
    "clip_grad_norm_",
    "convert",
    "cross_entropy",
    "distributed",
    "embedding",
    "fp32_state_dict",
    "gelu",
    "get_total_norm",
    "graph_step",
    "grouped_mm",
    "integrations",
    "is_enabled",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "matmul",
    "mlp",
    "newton_schulz",
    "nn",
    "numerics",
    "ops",
    "optim",
    "override_matmul",
    "recommended_dtype",
    "refresh_shadows",
    "revert",
    "rms_norm",
    "rotary",
    "route",
    "set_enabled",
    "silu",
    "swiglu",
    "syrk",
]
