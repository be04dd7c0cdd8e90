"""The raw ops: one file holds an op's schema, its torch reference and its samples. They have no autograd formula; the public
functions of ``ops`` are written over them. Importing this package defines all."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
