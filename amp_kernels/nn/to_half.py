"""``to_half``: a model with 16-bit parameters whose norms stay in float32."""

from __future__ import annotations

from typing import TypeVar

import torch

from .._checks.lists import HALF_DTYPES, names
from .._checks.modules import check_module
from .norm import LayerNorm, RMSNorm

Model = TypeVar("Model", bound=torch.nn.Module)

#: Norms whose kernels take 16-bit activations beside float32 parameters. torch's own LayerNorm and GroupNorm do not on a GPU.
MIXED_NORMS = (torch.nn.modules.batchnorm._BatchNorm, LayerNorm, RMSNorm)


def to_half(model: Model, dtype: torch.dtype = torch.float16, *, keep_norms: bool = True) -> Model:
    """Cast parameters and buffers of ``model`` to 16 bits, in place, except those of its norms.

    What Apex calls O2 with ``keep_batchnorm_fp32``: a norm's statistics and its few parameters stay float32, and its result
    has the dtype of its input. An optimizer of this package keeps the masters (``master_weights``); the inputs of the model
    are the caller's to cast.

    Args:
        model: any module; call :func:`convert` first, so that LayerNorm and RMSNorm are those of this package.
        dtype: float16 or bfloat16.
        keep_norms: leave BatchNorm, SyncBatchNorm and this package's LayerNorm and RMSNorm as they are. The parameters of
            GroupNorm, InstanceNorm and the norms of model files (LlamaRMSNorm) become 16 bits wide, because not all of these take
            such a mix and some return float32 then. torch's GroupNorm and InstanceNorm still compute statistics in float32.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or ``dtype`` is another one. Nothing has been changed then.

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
