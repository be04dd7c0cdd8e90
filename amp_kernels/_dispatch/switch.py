"""The switch that takes everything of this package out of a run: torch's arithmetic, in FP32."""

from __future__ import annotations

import contextlib
import os
import threading

from . import nodes, policy

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_nodes_refused = contextlib.ExitStack()
_switching = threading.Lock()


def set_enabled(enabled: bool) -> None:
    """Switch the package on or off, for the whole process: the first rung of the ladder when a run goes wrong.

    Off, every op runs in plain torch operations (the backend ``"reference"``), and computes in FP32 where autocast asks
    for 16 bits; a :class:`amp_kernels.GradScaler` built then is disabled. Two things stay: torch's own ops, for
    which autocast must be switched off (``torch.autocast(..., enabled=ak.is_enabled())``), and 16-bit parameters, whose
    sums and updates are FP32 while results have their dtype.

    Optimizers of this package compute torch's formulas then, but round as their kernels do (fused multiply-adds), so that
    weights can differ from those of :mod:`torch.optim` in their last bits. To rule the optimizer out, use torch's.

    Args:
        enabled: ``False`` switches off. ``AMP_KERNELS_DISABLE=1`` in the environment does it from the import on.

    Raises:
        TypeError: ``enabled`` is no bool.

    Examples:
        >>> layer, x = ak.nn.Linear(4, 2), torch.ones(1, 4)
        >>> ak.set_enabled(False)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     layer(x).dtype, ak.GradScaler("cpu").is_enabled()
        (torch.float32, False)
        >>> ak.set_enabled(True)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"set_enabled: enabled is {enabled!r}; accepted: True and False")
    with _switching:
        policy.disabled = not enabled
        _nodes_refused.close()
        if not enabled:
            _nodes_refused.enter_context(nodes.refused())


def is_enabled() -> bool:
    """True if the package is switched on (:func:`set_enabled`).

    Examples:
        >>> ak.is_enabled()
        True
    """
    return not policy.disabled


def read_environment() -> None:
    """Switch off if ``AMP_KERNELS_DISABLE`` says so.

    Raises:
        ValueError: its value is neither yes nor no.
    """
    value = os.environ.get("AMP_KERNELS_DISABLE", "")
    if value.lower() in _YES:
        set_enabled(False)
    elif value.lower() not in _NO:
        raise ValueError(f"AMP_KERNELS_DISABLE is {value!r}; accepted: {', '.join([*_YES, *_NO[1:]])}")
