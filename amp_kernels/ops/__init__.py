"""The ops: one file holds one op's contract (schema, reference, autograd, public function). Importing this package defines all.

Examples:
    Each is a ``torch.ops.amp_kernels`` op with a schema, for code that wants the kernels themselves:

    >>> gradients = [torch.tensor([3.0, 4.0]), torch.tensor([12.0], dtype=torch.float16)]
    >>> sum_of_squares, overflow = torch.ops.amp_kernels.check_and_norm(gradients)
    >>> sum_of_squares, overflow
    (tensor(169.), tensor(0.))
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
