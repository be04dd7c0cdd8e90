"""The ops: one file holds one op's contract (schema, reference, autograd, public function). Importing this package defines all."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
