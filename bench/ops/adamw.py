"""AdamW in every layout of weights and moments, against torch's fused AdamW and installed peers: the update alone (adamw_), and
the whole optimizer step, host time included (step): check, norm, clip, update, 16-bit weights, new loss scale.

torch's side of a step is what AMP training runs today: GradScaler.unscale_, clip_grad_norm_, fused AdamW, GradScaler.update
and the cast of the weights; where the weights and moments are 16-bit, also its clip and update with everything in
bf16 and no master. Ours is scaler.step(optimizer, max_norm=...) and scaler.update(). Other libraries do less than the
whole: `pipeline` in their rows says what. The loss scale is 1 and never grows, so that each repetition meets gradients
of the same size.

A step's `bytes` are the least that the layout has to move (34 to 14.1 a parameter); `moved_bytes` what this
provider's passes move; `state_bytes` what stays in memory between steps: weights, masters, 16-bit copies, moments.
"""

from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak

from ..harness.case import Call, Case, Scope, WithFacts
from ..harness.memory import held_bytes
from . import layouts, lists, muon_step, peer_optimizers
from .layouts import MAX_NORM, Inputs, Layout
from .providers import compared

MANY = ("fp32 + bf16 shadow", "bf16 + split master")  # layouts of the list of many small tensors


def adamw(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for layout in layouts.LAYOUTS:
            yield update_case(name, shapes, layout, scope.device)


def update_case(name: str, shapes: list[lists.Shape], layout: Layout, device: torch.device, **options) -> Case:
    return _case(
        "adamw_",
        name,
        shapes,
        layout,
        device,
        own=lambda inputs: _update(layouts.OurAdamW(layout, inputs)),
        providers={"torch": lambda inputs: _update(layouts.TorchAdamW(layout, inputs))},
        last=peer_optimizers.adamw(layout, device) if device.type == "cuda" else {},
        moved=layout.update_bytes,
        flops=15,
        max_norm=None,
        **options,
    )


def step(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope, tensors=True).items():
        many = " x " in name
        for layout in layouts.LAYOUTS:
            if not many or layout.name in MANY:
                yield step_case(name, shapes, layout, scope.device, sets=1 if many else None)
        if not many and any(map(muon_step.is_matrix, shapes)):
            yield muon_step.case(name, shapes, scope.device)


def step_case(
    name: str,
    shapes: list[lists.Shape],
    layout: Layout,
    device: torch.device,
    with_peers: bool | None = None,
    compiles: bool = False,
    by_rows: bool = False,
    **options,
) -> Case:
    """`with_peers`: by default on a GPU; `compiles`: also torch's step compiled; `by_rows`: torch's norm by rows, which stays
    right for a large tensor on a CPU. `sets`: many small tensors leave the time to the
    host, and rotating among sets of them takes minutes."""
    others = {}
    if layout.half and "state_dtype" in layout.options:
        others["torch:all bf16"] = lambda inputs: _torch_half(layout, inputs)
    if compiles:
        others["torch.compile"] = lambda inputs: _torch_compiled(layout, inputs)
    if device.type == "cuda" if with_peers is None else with_peers:
        others |= peer_optimizers.adamw(layout, device, whole_step=True)
    return _case(
        "step",
        name,
        shapes,
        layout,
        device,
        own=lambda inputs: _ours(layout, inputs),
        providers={"torch": lambda inputs: _torch(layout, inputs, by_rows)},
        last=others,
        moved=layout.step_bytes,
        flops=17,
        max_norm=MAX_NORM,
        host_time=True,
        **options,
    )


def _case(op, name, shapes, layout: Layout, device, *, own, providers, last, moved, flops, max_norm, **options) -> Case:
    count = lists.numel(shapes)
    return compared(
        "adamw_",
        device,
        own,
        providers,
        last,
        op=op,
        shape=name,
        dtype=layout.name,
        bytes=round(moved * count),
        flops=flops * count,
        inputs=lambda generator: layouts.draw(layout, shapes, generator),
        reference=lambda inputs: layouts.reference(layout, inputs, max_norm),
        check_calls=layouts.STEPS,
        **options,
    )


def _update(adamw: layouts.AdamW) -> Call:
    def call():
        adamw.optimizer.step()
        adamw.cast()
        return adamw.results

    return call


def _torch(layout: Layout, inputs: Inputs, by_rows: bool = False) -> Call:
    adamw = layouts.TorchAdamW(layout, inputs)
    scaler = layouts.scaler(torch.amp.GradScaler, adamw.params)

    def step():
        scaler.unscale_(adamw.optimizer)
        if by_rows:
            _clip_by_rows(adamw.params)
        else:
            torch.nn.utils.clip_grad_norm_(adamw.params, MAX_NORM)
        scaler.step(adamw.optimizer)
        scaler.update()
        adamw.cast()

    casts = ", cast" if adamw.copies else ""
    norm = "norm by rows" if by_rows else "norm"
    return _with_facts(adamw, step, f"unscale + check, {norm}, clip, fused update{casts}, scale")


def _clip_by_rows(params: list[torch.Tensor]) -> None:
    """As clip_grad_norm_, but the norm is that of the rows' norms. torch's norm of a large tensor on a CPU is one long FP32 sum, of
    64 M elements 1 % off."""
    grads = [param.grad for param in params]
    norm = torch.cat([torch.linalg.vector_norm(grad, dim=-1).flatten() for grad in grads]).norm()
    torch._foreach_mul_(grads, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


def _torch_compiled(layout: Layout, inputs: Inputs) -> Call:
    """torch.compile takes the multi-tensor optimizer; the check of GradScaler waits for the device, which no compiled step can."""
    adamw = layouts.TorchAdamW(layout, inputs, foreach=True, capturable=inputs.params[0].is_cuda)

    @torch.compile
    def step():
        torch.nn.utils.clip_grad_norm_(adamw.params, MAX_NORM)
        adamw.optimizer.step()
        adamw.cast()

    return _with_facts(adamw, step, "norm, clip, update; no check")


def _torch_half(layout: Layout, inputs: Inputs) -> Call:
    adamw = layouts.TorchHalfAdamW(layout, inputs)

    def step():
        torch.nn.utils.clip_grad_norm_(adamw.params, MAX_NORM)
        adamw.optimizer.step()

    return _with_facts(adamw, step, "norm, clip, fused update; no check, no master")


def _ours(layout: Layout, inputs: Inputs) -> Call:
    adamw = layouts.OurAdamW(layout, inputs)
    scaler = layouts.scaler(ak.GradScaler, adamw.params)

    def step():
        scaler.step(adamw.optimizer, max_norm=MAX_NORM)
        scaler.update()

    copies = " + 16-bit weights" if layout.half or layout.shadow else ""
    return _with_facts(adamw, step, f"check + norm, clip + update{copies}, scale")


def _with_facts(adamw, step: Callable[[], None], pipeline: str) -> Call:
    def call():
        step()
        return adamw.results

    def facts() -> dict:
        count = sum(param.numel() for param in adamw.params)
        held = held_bytes(adamw.params, adamw.copies, adamw.optimizer)
        return {"params": count, "state_bytes": held, "moved_bytes": adamw.step_bytes * count, "pipeline": pipeline}

    return WithFacts(call, facts)


CASES = (adamw, step)
