"""The training steps of GPT-2 that are priced: as torch.amp runs them, the same after a conversion, and with the residual stream
written for this package's norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import amp_kernels as ak
from amp_kernels.ops._shadows import refresh_shadow

from ..training.gpt import CONTEXT, GPT2, GPT2Config


def step(
    config: GPT2Config,
    layers: int,
    converted: bool,
    shadowed: bool = True,
    fused: bool = False,
) -> Callable[[], Callable]:
    """The function that `trace` builds: a step of the model with so many layers. The converted one has its loss from
    ``ak.linear_cross_entropy``, if ``shadowed`` its weights in 16 bits from the optimizer's shadows, and if ``fused`` an
    edited forward that runs the ops of ``fuse_residuals``. Its update is not in the trace: two passes over flat lists, priced
    by their bytes."""

    def build():
        with _disable_current_modes(), torch.device("meta"):
            model = GPT2(config, layers)
            if converted:
                model = ak.convert(model)
                model.fused_loss, model.fused_norms = True, fused
        for module in model.modules():  # now with values that nobody holds
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
        tokens, targets = (torch.empty(config.batch, CONTEXT, dtype=torch.int64) for _ in range(2))
        params = list(model.parameters())
        optimizer = None if converted else torch.optim.AdamW(params, fused=True)
        if converted and shadowed:
            model.shadows = shadows(params)  # which die with whom holds them: in training, the optimizer

        def run(under_autocast: Callable) -> None:
            for p in params:
                p.grad = None
            under_autocast(lambda: model(tokens, targets)).backward()
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
                optimizer.step()

        return run

    return build


def shadows(params: list[nn.Parameter]) -> list[torch.Tensor]:
    """The bf16 copies that products read in place of casting, pieces of one buffer, as the optimizer's step leaves them."""
    sizes = [p.numel() for p in params]
    pieces = torch.empty(sum(sizes), dtype=torch.bfloat16).split(sizes)
    views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
    for p, view in zip(params, views, strict=True):
        refresh_shadow(p, view)
    return views


def parameters(config: GPT2Config) -> int:
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in GPT2(config, n).parameters()) for n in (1, 2))
    return one + (config.layers - 1) * (two - one)
