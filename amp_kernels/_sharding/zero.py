"""ZeroRedundancyOptimizer, which steps another optimizer over this rank's part of the parameters."""

from __future__ import annotations

import sys

from torch.optim import Optimizer


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that does the steps of ``optimizer``; itself if that is no ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return (
        optimizer.optim if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else optimizer
    )
