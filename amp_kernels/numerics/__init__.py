"""Tools for the numerics of a training run: gradient histograms, the module that produced the first NaN, monitoring, and
comparison of 16-bit formats with FP32.

Examples:
    >>> model = torch.nn.Linear(2, 1)
    >>> with ak.numerics.find_nonfinite(model):
    ...     model(torch.ones(1, 2)).sum().backward()
"""

from .._raw.exponent_histogram import exponent_histogram
from .comparison import Outcome, Parity, Run, parity
from .histogram import GradientHistogram
from .monitor import StepMonitor
from .nonfinite import NonFiniteError, find_nonfinite

__all__ = [
    "GradientHistogram",
    "NonFiniteError",
    "Outcome",
    "Parity",
    "Run",
    "StepMonitor",
    "exponent_histogram",
    "find_nonfinite",
    "parity",
]
