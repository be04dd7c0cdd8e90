"""adamw_: the update alone, in every layout of weights and moments, against torch's fused AdamW and installed peers."""

from collections.abc import Iterator

from .. import layouts, lists, ours, peers
from ..harness import Call, Case, Scope


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        count = lists.numel(shapes)
        for layout in layouts.LAYOUTS:
            yield Case(
                op="adamw_",
                shape=name,
                dtype=layout.name,
                bytes=layout.update_bytes * count,
                flops=15 * count,
                inputs=lambda generator, layout=layout, shapes=shapes: layouts.draw(layout, shapes, generator),
                providers={
                    "torch": lambda inputs, layout=layout: _torch(layouts.TorchAdamW(layout, inputs)),
                    **ours.providers(
                        "adamw_", scope.device, lambda inputs, layout=layout: _step(layouts.OurAdamW(layout, inputs))
                    ),
                    **(peers.adamw(layout) if scope.device.type == "cuda" else {}),
                },
                reference=lambda inputs, layout=layout: layouts.reference(layout, inputs, None),
                check_calls=layouts.STEPS,
                backends=ours.backends("adamw_", scope.device),
            )


def _torch(adamw: layouts.TorchAdamW) -> Call:
    def call():
        adamw.optimizer.step()
        adamw.cast()
        return adamw.results()

    return call


def _step(adamw: layouts.OurAdamW) -> Call:
    def call():
        adamw.optimizer.step()
        return adamw.results()

    return call
