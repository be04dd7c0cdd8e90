"""Hand-written CUDA and Triton kernels for mixed-precision training, as torch ops under a thin Python layer.

Importing never fails for want of a compiled library and touches no device; ``python -m amp_kernels info`` tells what is there.
"""

from . import _load, ops
from ._policy import BackendUnavailable, backend
from ._version import __version__

_load.load()  # after the schemas of ops/: C++ only adds implementations

__all__ = ["BackendUnavailable", "__version__", "backend", "ops"]
