"""Additions to torch's data and tensor parallelism: reduction of FP32 gradients, and a vocabulary-parallel loss.

Sharding, communication and checkpoints are torch's. Kernels see local tensors, never DTensors.

Examples:
    >>> sorted(ak.distributed.__all__)
    ['GradReducer', 'vocab_parallel_cross_entropy']
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .grad_reducer import GradReducer

__all__ = ["GradReducer", "vocab_parallel_cross_entropy"]
