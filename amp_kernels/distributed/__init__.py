"""What several ranks need to train as one: pieces of sharded tensors, and agreement on norms and skipped steps.

Sharding, communication and checkpoints are torch's. Kernels see local tensors, never DTensors.
"""
