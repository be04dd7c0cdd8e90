"""layer_norm: see bench/norms.py."""

from collections.abc import Iterator

from .. import norms
from ..harness import Case, Scope


def cases(scope: Scope) -> Iterator[Case]:
    yield from norms.cases("layer_norm", scope)
