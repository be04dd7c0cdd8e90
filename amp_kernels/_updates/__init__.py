"""The update ops, one for each optimizer: declaration, reference. Importing this package defines them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
