"""Numerics one can see: how values are spread over a 16-bit format, and which module made the first NaN."""

from ..ops.exponent_histogram import exponent_histogram

__all__ = ["exponent_histogram"]
