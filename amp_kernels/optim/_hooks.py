"""What torch puts around every optimizer's ``step``: hooks, and a mark for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def hooked_if_watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` in torch's wrapper where there is a hook or a profiler, else as it is: the mark takes 10 us of the host."""
    hooked = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watched = (
            torch.compiler.is_compiling()
            or torch.autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        return (hooked if watched else step)(self, *args, **kwargs)

    return call
