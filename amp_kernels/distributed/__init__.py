"""Additions to torch's data and tensor parallelism: reduction of FP32 gradients, a vocabulary-parallel loss, and
sums over ranks whose bits do not depend on their number.

Sharding, communication and checkpoints are torch's. Kernels see local tensors, never DTensors.

Examples:
    >>> sorted(ak.distributed.__all__)
    ['GradReducer', 'tree_all_reduce', 'tree_sum', 'vocab_parallel_cross_entropy']
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .grad_reducer import GradReducer
from .tree import tree_all_reduce, tree_sum

__all__ = ["GradReducer", "tree_all_reduce", "tree_sum", "vocab_parallel_cross_entropy"]
