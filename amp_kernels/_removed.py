"""Public names and options that earlier versions had, each with its replacement: one table, which the errors read."""

from collections.abc import Callable, Mapping
from typing import Any

# Full name of a public attribute -> its replacement
_SOFTMAX = "torch.softmax(x, dim, dtype=torch.float32)"
_LOG_SOFTMAX = "torch.log_softmax(x, dim, dtype=torch.float32)"
NAMES: dict[str, str] = {
    "amp_kernels.dropout_add": "torch.nn.functional.dropout(x, p) + residual",
    "amp_kernels.log_softmax": _LOG_SOFTMAX,
    "amp_kernels.nn.LogSoftmax": _LOG_SOFTMAX,
    "amp_kernels.nn.Softmax": _SOFTMAX,
    "amp_kernels.nn.functional.log_softmax": _LOG_SOFTMAX,
    "amp_kernels.nn.functional.softmax": _SOFTMAX,
    "amp_kernels.numerics.GradientHistogram.plot": "print(histogram), or counts() and a plotter",
    "amp_kernels.numerics.Run.watch": "amp_kernels.numerics.GradientHistogram(model) in the training function",
    "amp_kernels.softmax": _SOFTMAX,
}
# (function or class, option) -> its replacement
_DROPOUT = "torch.nn.functional.dropout(x, p) in front of the norm"
OPTIONS: dict[tuple[str, str], str] = {
    ("layer_norm", "dropout_p"): _DROPOUT,
    ("nn.functional.layer_norm", "dropout_p"): _DROPOUT,
    ("nn.functional.layer_norm", "residual"): "amp_kernels.layer_norm(x, ..., residual=)",
    ("nn.functional.rms_norm", "dropout_p"): _DROPOUT,
    ("nn.functional.rms_norm", "residual"): "amp_kernels.rms_norm(x, ..., residual=)",
    ("numerics.StepMonitor", "report"): "jsonl= and a plotter, or tensorboard=",
    ("rms_norm", "dropout_p"): _DROPOUT,
}


def attributes_of(owner: str) -> Callable[..., Any]:
    """The ``__getattr__`` of a public module or class: an ``AttributeError`` that names what replaces the attribute."""

    def missing(*named: Any) -> Any:  # of a class with the instance in front of the name
        name = named[-1]
        replacement = NAMES.get(f"{owner}.{name}")
        said = "" if replacement is None else f": it was removed in 0.2.0; use {replacement}"
        raise AttributeError(f"{owner!r} has no attribute {name!r}{said}", name=name)

    return missing


def refuse(function: str, given: Mapping[str, object]) -> None:
    """A ``TypeError`` for the first of the keyword arguments ``given`` that ``function`` does not have."""
    for name in given:
        replacement = OPTIONS.get((function, name))
        said = "" if replacement is None else f": it was removed in 0.2.0; use {replacement}"
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{said}")
