"""Additions to torch's data and tensor parallelism: reduction of FP32 gradients, a vocabulary-parallel loss and log-probabilities, and
sums over ranks whose bits do not depend on their number.

Sharding, communication and checkpoints are torch's. Kernels see local tensors, never DTensors.

Examples:
    >>> sorted(ak.distributed.__all__)
    ['GradReducer', 'tree_all_reduce', 'tree_sum', 'vocab_parallel_cross_entropy', 'vocab_parallel_log_probs']
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .grad_reducer import GradReducer
from .log_probs import vocab_parallel_log_probs
from .tree import tree_all_reduce, tree_sum

__all__ = ["GradReducer", "tree_all_reduce", "tree_sum", "vocab_parallel_cross_entropy", "vocab_parallel_log_probs"]
