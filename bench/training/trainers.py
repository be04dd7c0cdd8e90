"""The two sides of the training benchmark: the same training step written for stock torch AMP and for amp_kernels.

The loop in trial.py knows neither. Both follow the usual recipe: FP32
parameters, autocast around the forward pass, dynamic loss scaling for FP16, gradients clipped to norm 1, AdamW.
"""

from collections.abc import Callable

import torch
from torch import nn

import amp_kernels as ak

from ..harness.memory import held_bytes

MAX_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
ADJUSTMENT = "match_rms_adamw"  # of Muon's learning rate
INIT_SCALE = 2.0**16


#: Makes the optimizers of a model, with a learning rate.
Optimizers = Callable[[nn.Module, float], list[torch.optim.Optimizer]]


def fused_adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)]


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of the blocks' linear layers, and all other parameters, which are AdamW's."""
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
    ids = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in ids]


def torch_muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices, others = split_for_muon(model)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn=ADJUSTMENT)
    return [muon, torch.optim.AdamW(others, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)]


def our_adamw(model: nn.Module, lr: float, **options) -> list[torch.optim.Optimizer]:
    return [ak.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, **options)]


def our_muon(model: nn.Module, lr: float, **options) -> list[torch.optim.Optimizer]:
    matrices, others = split_for_muon(model)
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw", "betas": BETAS}]
    return [ak.optim.Muon(groups, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn=ADJUSTMENT, **options)]


class TorchTrainer:
    """Stock torch: torch.amp.GradScaler, clip_grad_norm_ and torch's fused AdamW."""

    provider = "torch"
    grad_scaler, adamw = torch.amp.GradScaler, staticmethod(fused_adamw)

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        lr: float,
        scaled: bool,
        growth_interval: int,
        layout=None,
        optimizers: Optimizers | None = None,
    ):
        self.model = self.prepared(model)
        self.model = layout.place(self.model) if layout else self.model
        self.optimizers = (optimizers or self.adamw)(self.model, lr)
        self.optimizer = self.optimizers[0]
        options = {"init_scale": INIT_SCALE, "growth_interval": growth_interval, "enabled": scaled}
        self.scaler = self.grad_scaler(device.type, **options)

    def prepared(self, model: nn.Module) -> nn.Module:
        return model

    def update(self, loss: torch.Tensor) -> None:
        """Backward pass and parameter update of one step; no gradient is held over the next forward pass."""
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.model.zero_grad(set_to_none=True)

    def set_lr(self, lr: float) -> None:
        for group in [group for optimizer in self.optimizers for group in optimizer.param_groups]:
            group["lr"] = lr

    def scale(self) -> torch.Tensor | float:
        """The current loss scale, without waiting for the device: a 0-dim tensor, or 1.0 where nothing is scaled."""
        # get_scale() would make the host wait each step. The tensor exists from the first scaled loss on.
        return self.scaler._scale if self.scaler.is_enabled() else 1.0

    def updates(self) -> int:
        """Optimizer steps that were not skipped. Waits for the device."""
        first = next(iter(self.optimizer.state.values()), {})
        return int(first.get("step", 0))

    def held_bytes(self) -> int:
        """Bytes held between two steps: parameters, buffers and optimizer state, each storage once."""
        return held_bytes(list(self.model.parameters()), list(self.model.buffers()), *self.optimizers)

    def parts(self) -> dict:
        """The saved parts, as the arguments of `ak.checkpoint`."""
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}


class AmpKernelsTrainer(TorchTrainer):
    """The same with amp_kernels: converted modules, fused check + norm + clip + update, no host wait for the scale."""

    provider = "amp_kernels"
    grad_scaler, adamw = ak.GradScaler, staticmethod(our_adamw)

    def prepared(self, model: nn.Module) -> nn.Module:
        return ak.convert(model)

    def update(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


TRAINERS = {trainer.provider: trainer for trainer in (TorchTrainer, AmpKernelsTrainer)}
