"""The whole step of Muon over a model's parameters: Muon for the matrices, AdamW for all else. torch takes two optimizers, ours and
dion's are one. Learning rates are adjusted to AdamW's ("match_rms_adamw"), which all three have."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import amp_kernels as ak

from ..harness.case import Call, Case, Prepare, Tensors, WithFacts
from ..harness.memory import held_bytes
from . import layouts, lists
from .layouts import ADAMW, LR, MAX_NORM, WEIGHT_DECAY, Inputs
from .peers import skipped
from .providers import compared
from .update import exact_muon

LARGEST = 50_000  # rows of an embedding are more
MUON = {"lr": LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
# Weights of unit size, of which two steps move 4e-3. dion's coefficients differ from Jordan's, which moves its weights by a fifth
# of that; the bound is between that and the step that is missing.
BOUND = 1.6e-3


def is_matrix(shape: lists.Shape) -> bool:
    return len(shape) == 2 and max(shape) < LARGEST


@dataclass
class Groups:
    """The parameters of Muon and those of AdamW."""

    matrices: Tensors
    others: Tensors

    @classmethod
    def of(cls, inputs: Inputs) -> "Groups":
        for param, grad in zip(inputs.params, inputs.grads, strict=True):
            param.requires_grad_()
            param.grad = grad
        flags = [is_matrix(tuple(param.shape)) for param in inputs.params]
        pairs = list(zip(inputs.params, flags, strict=True))
        return cls([p for p, matrix in pairs if matrix], [p for p, matrix in pairs if not matrix])


def torchs(groups: Groups) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(groups.matrices, **MUON), torch.optim.AdamW(groups.others, fused=True, **ADAMW)]


def ours(groups: Groups) -> list[torch.optim.Optimizer]:
    adamw = {"params": groups.others, "algorithm": "adamw", **ADAMW}
    return [ak.optim.Muon([{"params": groups.matrices}, adamw], **MUON)]


def dions(groups: Groups, lr: float = LR) -> list[torch.optim.Optimizer]:
    """With Jordan's iteration in place of Polar Express."""
    made = importlib.import_module("dion").Muon
    betas = dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True))
    adamw = {"params": groups.others, "algorithm": "adamw", "epsilon": ADAMW["eps"], "lr": lr, **betas}
    options = {"lr": lr, "weight_decay": WEIGHT_DECAY, "nesterov": True, "adjust_lr": "rms_norm"}
    return [made([{"params": groups.matrices}, adamw], use_polar_express=False, **options)]


def case(name: str, shapes: list[lists.Shape], device: torch.device) -> Case:
    count = lists.numel(shapes)
    matrices = [shape for shape in shapes if is_matrix(shape)]
    last = {"dion": _prepared(dions, None)} if skipped("dion", device) is None else {}
    return compared(
        "muon_",
        device,
        _prepared(ours, _our_step),
        {"torch": _prepared(torchs, _torch_step)},
        last,
        op="step",
        shape=f"{name}, Muon",
        dtype="fp32",
        bytes=32 * count - 4 * lists.numel(matrices),  # a momentum is read and written, not two; one iterate out and in
        flops=sum(15 * min(s) ** 2 * max(s) + 5 * min(s) ** 3 for s in matrices),
        inputs=lambda generator: _draw(shapes, generator),
        reference=_reference,
        check_calls=layouts.STEPS,
        host_time=True,
    )


def _draw(shapes: list[lists.Shape], generator: torch.Generator) -> Inputs:
    drawn = [[torch.randn(s, generator=generator, device=generator.device) for s in shapes] for _ in range(2)]
    return Inputs(*drawn)


def _reference(inputs: Inputs) -> dict:
    clip = layouts.clip_factor(inputs.grads, MAX_NORM)
    grads = [grad.double() * clip for grad in inputs.grads]
    plain = layouts.reference(layouts.LAYOUTS[0], Inputs(inputs.params, grads), None)["params"][0]
    exact = [
        exact_muon(p.double(), [g] * layouts.STEPS, ratio=0.2 * max(p.shape) ** 0.5) if is_matrix(tuple(p.shape)) else q
        for p, g, q in zip(inputs.params, grads, plain, strict=True)
    ]
    return {"params": (exact, BOUND)}


def _prepared(make: Callable[[Groups], list], step_of: Callable | None) -> Prepare:
    def prepare(inputs: Inputs) -> Call:
        optimizers = make(Groups.of(inputs))
        step = step_of(inputs.params, optimizers) if step_of else optimizers[0].step
        pipeline = "all" if step_of else "update; no check, norm or clip"

        def call():
            step()
            return {"params": [param.detach() for param in inputs.params]}

        def facts() -> dict:
            count = sum(param.numel() for param in inputs.params)
            return {"params": count, "state_bytes": held_bytes(inputs.params, *optimizers), "pipeline": pipeline}

        return WithFacts(call, facts)

    return prepare


def _torch_step(params: Tensors, optimizers: list) -> Callable[[], None]:
    scaler = layouts.scaler(torch.amp.GradScaler, params)

    def step():
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return step


def _our_step(params: Tensors, optimizers: list) -> Callable[[], None]:
    scaler = layouts.scaler(ak.GradScaler, params)

    def step():
        scaler.step(optimizers[0], max_norm=MAX_NORM)
        scaler.update()

    return step
