"""``override_matmul``: torch's matrix multiplications on this package's GEMM, for code that cannot be edited."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._checks.lists import HALF_DTYPES
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import PLAIN
from ..ops._products import added_product, check_blocks, gemm, gemm_options

aten = torch.ops.aten


def _mm(a, b):
    blocks = k_blocks()
    check_blocks("override_matmul", blocks, K=a.shape[-1])
    return gemm(a, b, **gemm_options(a, batch_invariant=blocks))[0]


def _addmm(input, a, b, *, beta=1, alpha=1):
    blocks = k_blocks()
    check_blocks("override_matmul", blocks, K=a.shape[-1])
    return added_product(input, a, b, float(alpha), float(beta), blocks)


#: The replacement of each op, and the position of the first matrix operand.
_REPLACED = {
    aten.mm.default: (_mm, 0),
    aten.bmm.default: (_mm, 0),
    aten.addmm.default: (_addmm, 1),
    aten.baddbmm.default: (_addmm, 1),
}


class override_matmul(TorchDispatchMode):
    """Inside the block, torch's matrix multiplications of fp16 and bf16 tensors run on this package's GEMM.

    The mode replaces ``mm``, ``bmm``, ``addmm`` and ``baddbmm``, and so everything implemented with them: torch.matmul, ``@``,
    einsum, F.linear, torch.nn.Linear, unfused attention. As a TorchDispatchMode it acts below autograd and autocast:
    autocast casts as usual, and a backward called inside the block is covered as well. Sums are fp32 and rounded once,
    including the bias.

    The mode does not replace other dtypes, subclasses, forms with ``out=`` or an output dtype, in-place forms, devices that
    were not selected, or compiled code, which modes do not see. It applies to the calling thread; blocks nest. Every torch op
    inside the block costs some microseconds of host time, so prefer :func:`amp_kernels.convert` for a model that can be edited.

    Args:
        cuda: replace multiplications of CUDA tensors.
        cpu: replace multiplications of CPU tensors. For tests: on the CPU torch's own matmul is usually faster.

    Attributes:
        calls: number of replaced calls by the name of torch's op.

    Examples:
        >>> a = torch.ones(2, 2, dtype=torch.bfloat16)
        >>> with ak.override_matmul(cpu=True) as mode:
        ...     b = a @ a
        >>> mode.calls
        Counter({'mm': 1})
    """

    def __init__(self, *, cuda: bool = True, cpu: bool = False) -> None:
        super().__init__()
        self.devices = {name for name, wanted in (("cuda", cuda), ("cpu", cpu)) if wanted}
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        entry = _REPLACED.get(func)
        if entry is not None:
            replacement, first = entry
            if self._takes(*args[: first + 2]):
                self.calls[func.overloadpacket.__name__] += 1
                return replacement(*args, **kwargs)
        elif torch.is_inference_mode_enabled():  # in inference mode, F.linear, einsum etc. are not decomposed
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _takes(self, *tensors: torch.Tensor) -> bool:
        a = tensors[-2]
        return (
            a.dtype in HALF_DTYPES
            and a.device.type in self.devices
            and all(
                type(t) in PLAIN and t.dtype == a.dtype and t.device == a.device and t.layout is torch.strided
                for t in tensors
            )
        )
