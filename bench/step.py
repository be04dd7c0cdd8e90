"""The whole optimizer step, host time included: check, norm, clip, update, 16-bit weights, new loss scale.

torch's side is what AMP training runs today: GradScaler.unscale_, clip_grad_norm_, fused AdamW, GradScaler.update and
the cast of the weights. Ours is scaler.step(optimizer, max_norm=...) and scaler.update(). The loss scale is 1 and
never grows, so that each repetition meets gradients of the same size.
"""

from collections.abc import Iterator

import torch

from . import layouts, lists, ours
from .harness import Call, Case

MAX_NORM = 1.0
NEVER = 10**9  # growth interval


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for name in lists.for_device(device.type, quick):
        shapes = lists.LISTS[name]()
        count = lists.numel(shapes)
        for layout in layouts.LAYOUTS:
            yield Case(
                op="step",
                shape=name,
                dtype=layout.name,
                bytes=(layout.update_bytes + layout.param.itemsize)
                * count,  # the gradients are read once more for the norm
                flops=17 * count,
                inputs=lambda generator, layout=layout, shapes=shapes: layouts.draw(layout, shapes, generator),
                providers={
                    "torch": lambda inputs, layout=layout: _torch(layouts.TorchAdamW(layout, inputs)),
                    **ours.providers(
                        "adamw_", device, lambda inputs, layout=layout: _ours(layouts.OurAdamW(layout, inputs))
                    ),
                },
                reference=lambda inputs, layout=layout: layouts.reference(layout, inputs, MAX_NORM),
                check_calls=layouts.STEPS,
                host_time=True,
                backends=ours.backends("adamw_", device),
            )


def _torch(adamw: layouts.TorchAdamW) -> Call:
    scaler = torch.amp.GradScaler(adamw.params[0].device.type, init_scale=1.0, growth_interval=NEVER)
    scaler.scale(torch.ones((), device=adamw.params[0].device))  # creates the scale

    def call():
        scaler.unscale_(adamw.optimizer)
        torch.nn.utils.clip_grad_norm_(adamw.params, MAX_NORM)
        scaler.step(adamw.optimizer)
        scaler.update()
        adamw.cast()
        return adamw.results()

    return call


def _ours(adamw: layouts.OurAdamW) -> Call:
    import amp_kernels as ak

    scaler = ak.GradScaler(adamw.params[0].device.type, init_scale=1.0, growth_interval=NEVER)
    scaler.scale(torch.ones((), device=adamw.params[0].device))

    def call():
        scaler.step(adamw.optimizer, max_norm=MAX_NORM)
        scaler.update()
        return adamw.results()

    return call
