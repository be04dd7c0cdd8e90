"""Callbacks for the trainers of others, which log what mixed precision does. A module of it imports its package when it is first used:
``hf`` needs transformers, ``lightning`` needs lightning.

- ``ak.integrations.hf.Callback().attach(trainer)`` for the Trainer of Hugging Face,
- ``lightning.Trainer(callbacks=[..., ak.integrations.lightning.Callback()])``.

Both log ``loss_scale`` and ``skipped_steps`` (with a scaler), ``grad_norm``, ``steps_per_second`` and ``peak_memory_gib`` (of the CUDA
allocator, or of the process where there is no GPU).

Examples:
    >>> ak.integrations.__all__
    ['hf', 'lightning']
"""

import importlib
from types import ModuleType

__all__ = ["hf", "lightning"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; accepted: {', '.join(__all__)}")
