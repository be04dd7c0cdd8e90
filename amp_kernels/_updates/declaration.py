"""The declaration of an update op."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Declaration:
    """Name, moments, options and flags of an update op.

    ``moments`` are in the order in which the op takes them, those of ``optional``, which a block may lack, last; ``options``
    are in the order in which they are packed, ``lr`` first and ``weight_decay`` last, with the values of samples and tests.
    ``unsigned`` are the moments that are never negative, whose 8-bit codes have no sign.
    """

    name: str
    moments: tuple[str, ...]
    options: dict[str, float]
    flags: int
    optional: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()
