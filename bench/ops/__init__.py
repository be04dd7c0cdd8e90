"""One file an op: `cases(scope)` yields what to time. Found by name; no list names them."""

import pkgutil


def modules() -> dict[str, str]:
    """Module of each benchmark by its name: the files of this folder, and the whole step."""
    found = {info.name: f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__)}
    return {**found, "step": f"{__name__.rpartition('.')[0]}.step"}
