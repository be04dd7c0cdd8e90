"""adamw_: the update alone, in every layout of weights and moments, against torch's fused AdamW and installed peers."""

from collections.abc import Iterator

import torch

from .. import layouts, lists, ours, peers
from ..harness import Call, Case, Scope


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for layout in layouts.LAYOUTS:
            yield case(name, shapes, layout, scope.device)


def case(name: str, shapes: list[lists.Shape], layout: layouts.Layout, device: torch.device, **options) -> Case:
    count = lists.numel(shapes)
    return Case(
        op="adamw_",
        shape=name,
        dtype=layout.name,
        bytes=layout.update_bytes * count,
        flops=15 * count,
        inputs=lambda generator: layouts.draw(layout, shapes, generator),
        providers={
            "torch": lambda inputs: _torch(layouts.TorchAdamW(layout, inputs)),
            **ours.providers("adamw_", device, lambda inputs: _step(layouts.OurAdamW(layout, inputs))),
            **(peers.adamw(layout) if device.type == "cuda" else {}),
        },
        reference=lambda inputs: layouts.reference(layout, inputs, None),
        check_calls=layouts.STEPS,
        backends=ours.backends("adamw_", device),
        **options,
    )


def _torch(adamw: layouts.TorchAdamW) -> Call:
    def call():
        adamw.optimizer.step()
        adamw.cast()
        return adamw.results

    return call


def _step(adamw: layouts.OurAdamW) -> Call:
    def call():
        adamw.optimizer.step()
        return adamw.results

    return call
