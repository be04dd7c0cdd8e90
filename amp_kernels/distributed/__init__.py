"""What several ranks need to train as one: pieces of sharded tensors, and agreement on norms and skipped steps.

Sharding, communication and checkpoints are torch's. Kernels see local tensors, never DTensors.

Examples:
    >>> sorted(ak.distributed.__all__)
    ['GradReducer', 'vocab_parallel_cross_entropy']
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .grad_reducer import GradReducer

__all__ = ["GradReducer", "vocab_parallel_cross_entropy"]
