"""A copy of the package that a test may add to."""

from pathlib import Path

import amp_kernels

PACKAGE = Path(amp_kernels.__file__).parent


def copy_package(folder: Path) -> None:
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".so", ".json"):
            copy = folder / "amp_kernels" / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
