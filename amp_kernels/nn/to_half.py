"""``to_half``: cast a model to 16-bit parameters and keep its norms in float32."""

from __future__ import annotations

from typing import TypeVar

import torch

from .._checks.lists import HALF_DTYPES, names
from .._checks.modules import check_module
from .norm import LayerNorm, RMSNorm

Model = TypeVar("Model", bound=torch.nn.Module)

#: Norms whose kernels accept 16-bit activations with float32 parameters. torch's LayerNorm and GroupNorm do not on a GPU.
MIXED_NORMS = (torch.nn.modules.batchnorm._BatchNorm, LayerNorm, RMSNorm)


def to_half(model: Model, dtype: torch.dtype = torch.float16, *, keep_norms: bool = True) -> Model:
    """Cast parameters and buffers of ``model`` to 16 bits, in place, except those of its norms.

    This is Apex's O2 with ``keep_batchnorm_fp32``: a norm's statistics and parameters stay float32, and its result has the
    dtype of its input. An optimizer of this package keeps the masters (``master_weights``). The caller casts the inputs of the
    model.

    Args:
        model: any module; call :func:`convert` first, so that LayerNorm and RMSNorm are those of this package.
        dtype: float16 or bfloat16.
        keep_norms: keep BatchNorm, SyncBatchNorm and this package's LayerNorm and RMSNorm in float32. The parameters of
            GroupNorm, InstanceNorm and model-specific norms (LlamaRMSNorm) are cast to 16 bits, because some of these do not
            accept mixed dtypes and some return float32 for them. torch's GroupNorm and InstanceNorm still compute statistics
            in float32.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or ``dtype`` is another one. The model is unchanged.

    Examples:
        >>> model = ak.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
        >>> [str(p.dtype) for p in ak.nn.to_half(model).parameters()]
        ['torch.float16', 'torch.float16', 'torch.float32', 'torch.float32']
    """
    check_module("to_half", model)
    if dtype not in HALF_DTYPES:
        raise TypeError(f"to_half: dtype is {dtype}; accepted: {names(HALF_DTYPES)}")
    for module in model.modules():
        if not (keep_norms and isinstance(module, MIXED_NORMS)):
            module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, recurse=False)
    return model
