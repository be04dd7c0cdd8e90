"""Histories of optimizers: whatever happens between steps and changes nothing leaves the bits of a twin to which it did not happen,
and both follow torch's optimizer, or the published one, in float64."""

from __future__ import annotations

import copy
import pickle
import tempfile

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels.ops._shadows import fresh_shadow
from amp_kernels.optim._options import UNIT_KEYS

from ..optim.optimizers import NAMES, OPTIONS, REFERENCES, U, checkpoint, copies, make, params_of, reference
from ..optim.test_arithmetic import update_error
from .fuzz import FLOATS, HALVES, Draw, main
from .loop import assert_same, flat

SHAPES = [(33,), (7, 11), (), (0, 3), (2, 3, 4), (1, 1), (5, 1), (64, 96), (4099,)]  # (64, 96) has moments in 8 bits
LR = 2.0**-9


class Side:
    """An optimizer of this package and its parameters, by number."""

    def __init__(self, name: str, params: list, options: dict):
        self.name, self.options, self.params = name, options, params
        self.optimizer = make(name, params, LR, **options)
        self.scaler = ak.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
        self.params = params_of(self.optimizer)
        for group in self.optimizer.param_groups if self.optimizer.independent_groups else ():
            group["unit"] = "all"

    def renewed(self) -> akopt.AdamW:
        """An optimizer of the same options over the same groups, as a program makes it that resumes."""
        kept = "params", "algorithm", "unit"
        groups = [{key: group[key] for key in kept if key in group} for group in self.optimizer.param_groups]
        return getattr(akopt, self.name)(groups, lr=1.0, **self.options)

    def step(self, grads: list, scaled: bool = False, released: bool = False) -> None:
        grads = [grad if grad is None else grad.to(param.dtype) for param, grad in zip(self.params, grads, strict=True)]
        if released and any(grad is not None for grad in grads):
            with akopt.release_gradients(self.optimizer):
                self.optimizer.zero_grad()
                pairs = [pair for pair in zip(self.params, grads, strict=True) if pair[1] is not None]
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
                self.optimizer.step()
            return
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        if scaled:
            self.scaler.scale(torch.ones(()))
            self.scaler.step(self.optimizer)
            self.scaler.update(1.0)
        elif any(grad is not None for grad in grads):
            self.optimizer.step()

    def state(self) -> dict:
        state = dict(flat({"params": [p.detach() for p in self.params], **self.optimizer.state_dict()}))
        own = ("differentiable", "unit", "statistics", *UNIT_KEYS)  # torch adds the first to a copy
        return {key: value for key, value in state.items() if not key.endswith(own)}

    def masters(self) -> list:
        states = self.optimizer.state_dict()["state"]
        return [states.get(i, {}).get("master", p.detach()) for i, p in enumerate(self.params)]


# ---- what changes nothing: functions of the side that it happens to


def skipped(draw: Draw, side: Side) -> None:
    # A skipped first step makes a state, and an average starts where its state is made.
    grads = [torch.ones(p.shape) if side.optimizer.state.get(p) else None for p in side.params]
    whole = [grad for grad in grads if grad is not None and grad.numel()]
    if whole:
        draw.choice(whole).view(-1)[-1] = draw.choice([torch.inf, torch.nan, -torch.inf])
        side.step(grads, scaled=True)
    side.optimizer.zero_grad()


def reloaded(draw: Draw, side: Side) -> None:
    states = [checkpoint, lambda o: o.state_dict(), lambda o: copy.deepcopy(o.state_dict())]
    state, fresh = draw.choice(states)(side.optimizer), draw.choice([side.renewed(), side.optimizer])
    fresh.load_state_dict(state)
    side.optimizer = fresh


def filed(draw: Draw, side: Side) -> None:
    parts = {"model": torch.nn.ParameterList(side.params), "optimizer": side.optimizer}
    with tempfile.TemporaryDirectory() as folder:
        ak.checkpoint.save(f"{folder}/1.pt", **parts)
        side.optimizer = parts["optimizer"] = draw.choice([side.renewed, lambda: side.optimizer])()
        with torch.no_grad():
            draw.choice(side.params).zero_()
        ak.checkpoint.load(f"{folder}/1.pt", **parts)


def offloaded(draw: Draw, side: Side) -> None:
    side.optimizer.offload_state()
    draw.choice([lambda: None, side.optimizer.state_dict])()
    side.optimizer.reload_state()


def exchanged(draw: Draw, side: Side) -> None:
    if side.optimizer.independent_groups:
        saved = copy.deepcopy(side.optimizer.unit_state_dict("all"))
        draw.choice([side.optimizer.reset_unit, str])("all")
        side.optimizer.load_unit_state_dict("all", saved)


def copied(draw: Draw, side: Side) -> None:
    pair = side.params, side.optimizer
    side.params, side.optimizer = draw.choice([copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])(pair)


def moved(draw: Draw, side: Side) -> None:
    param = draw.choice(side.params)
    param.data = param.data.clone()


def thawed(draw: Draw, side: Side) -> None:
    param = draw.choice(side.params)
    param.requires_grad_(False)
    side.optimizer.zero_grad(set_to_none=draw.flag())
    param.requires_grad_(True)


def watched(draw: Draw, side: Side) -> None:
    repr(side.optimizer), side.optimizer.state_dict()
    ak.fp32_state_dict(torch.nn.ParameterList(side.params), side.optimizer)
    side.scaler.scale(torch.ones(()))


def mistaken(draw: Draw, side: Side) -> None:
    optimizer, state = side.optimizer, side.optimizer.state_dict()
    param = draw.choice(side.params)
    calls = [
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2)), param]}),
        lambda: optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2}),
        lambda: optimizer.load_state_dict({"state": {}}),
    ]
    entries = [(i, key) for i, kept in state["state"].items() for key, v in kept.items() if key != "step"]
    if entries:
        i, key = draw.choice(entries)
        wrong = {**state["state"], i: {**state["state"][i], key: torch.ones(3, 5, 7)}}
        calls += [lambda: optimizer.load_state_dict({**state, "state": wrong})] * 3
    call = draw.choice(calls)
    with pytest.raises((ValueError, TypeError)):
        call()


NEUTRAL = [skipped, skipped, reloaded, reloaded, filed, offloaded, exchanged, copied, moved, thawed, watched, mistaken]


# ---- what counts: the same for all


def exact_layout(layout: dict, dtypes: set) -> bool:
    """True if float32 masters and moments are kept, so that a run in float64 differs by roundings alone."""
    masters = dtypes == {torch.float32} or layout.get("master_weights", "fp32") in ("fp32", "split")
    return masters and layout.get("state_dtype", torch.float32) == torch.float32


def gradients(draw: Draw, scales: list, share: float) -> list:
    """Sizes of an element's gradients hardly change, so what optimizers make of them differs by rounding, not by chaos."""
    return [(draw.normal(*s.shape) + 0.3) * s if draw.flag(share) else None for s in scales]


def case(draw: Draw) -> None:
    name = draw.choice(NAMES)
    options, layout = draw.choice(OPTIONS[name]), {}
    for key, values in {
        "master_weights": ["fp32", "split", "split24", "none", "none_rne"],
        "state_dtype": [torch.float32, torch.float32, torch.bfloat16, "8bit"],
        "shadow_dtype": [None, *HALVES],
        "ema_decay": [None, 0.9],
        "seed": [0, 2**40 + 1],
    }.items():
        if draw.flag():
            layout[key] = draw.choice(values)
    dtypes = draw.choice([[torch.float32], [torch.bfloat16], [torch.float16], FLOATS])
    draw.note(name, options, layout, dtypes)

    def weights() -> list:
        shapes = draw.choices(SHAPES, k=draw.randrange(1, 5))
        draw.note("parameters", shapes)
        return [torch.nn.Parameter(draw.normal(*shape, dtype=draw.choice(dtypes))) for shape in shapes]

    def scales(params: list) -> list:
        return [torch.randint(-6, 7, p.shape, generator=draw.generator).float().exp2() for p in params]

    params = weights()
    more = draw.choice([{}, {}, {"state_device": "cpu"}, {"independent_groups": True}])
    draw.note(more)
    ours = [Side(name, copies(params), {**options, **layout, **own}) for own in (more, {})]
    noisy, plain = ours
    exact = reference(name, copies(params, torch.float64), LR, **options) if exact_layout(layout, {*dtypes}) else None
    sizes = scales(params)
    steps, largest, loaded, written = 0, 1.0, False, False
    for _ in range(draw.randrange(3, 16)):
        kind = draw.choice(["step"] * 4 + ["partial", "zeros", "group", "lr", "write", *NEUTRAL * 2])
        # Up to a step, masters and averages of a load may follow weights that come after it, and those that were shown before a write
        # may be taken for not loaded.
        if (kind == "write" and loaded) or (kind in (reloaded, exchanged) and written):
            kind = "step"
        written = kind == "write" or (written and kind not in ("step", "zeros"))
        loaded = kind in (reloaded, filed, exchanged) or (loaded and kind not in ("step", "zeros"))
        draw.note(getattr(kind, "__name__", kind))
        if callable(kind):
            kind(draw, noisy)
        elif kind in ("step", "partial", "zeros"):
            grads = gradients(draw, sizes, 0.5 if kind == "partial" else 1.0)
            grads = [g * 0 for g in grads] if kind == "zeros" else grads
            some = any(g is not None for g in grads)
            noisy.step(
                grads,
                scaled=draw.flag() and some,
                released=draw.flag(0.3) and some and "independent_groups" not in more,
            )
            plain.step(grads)
            steps += 1
            if exact is not None:
                for p, q, grad in zip(params_of(exact), plain.params, grads, strict=True):
                    p.grad = grad if grad is None else grad.to(q.dtype).double()
                exact.step()
                if name == "LAMB" and kind == "partial":
                    exact = None  # its count of steps is the group's
        elif kind == "group":
            added = weights()
            group = {"params": added, "lr": LR / 2}
            for side in ours:
                theirs = copies(added)
                own = {"algorithm": "adamw"} if name == "Muon" else {}
                own |= {"unit": "all"} if side.optimizer.independent_groups else {}
                side.optimizer.add_param_group({**group, **own, "params": theirs})
                side.params += theirs
            sizes += scales(added)
            if exact is not None and name != "Muon":
                exact.add_param_group({**group, "params": copies(added, torch.float64)})
            else:
                exact = None
        elif kind == "lr":
            i, key = draw.randrange(len(noisy.optimizer.param_groups)), draw.choice(["lr", "weight_decay"])
            value = draw.choice([LR / 4, LR, 0.0])
            exact = None if name == "Muon" else exact  # its groups for AdamW are copies
            for optimizer in (noisy.optimizer, plain.optimizer, exact):
                if optimizer is not None:
                    optimizer.param_groups[i][key] = value
        else:
            i = draw.randrange(len(params_of(plain.optimizer)))
            values, by_data = draw.normal(*plain.params[i].shape), draw.flag()
            for side in ours:
                with torch.no_grad():
                    (side.params[i].data if by_data else side.params[i]).copy_(values)
                if by_data:
                    side.optimizer.reload_model_params()
            assert torch.equal(plain.params[i].detach(), values.to(plain.params[i].dtype))
            masters, _ = [side.masters() for side in (plain, noisy)]  # looking adopts the write
            if exact is not None:
                with torch.no_grad():
                    for p, master in zip(params_of(exact), masters, strict=True):
                        p.copy_(master)
        largest = max([largest, *(p.detach().abs().max().item() for p in plain.params if p.numel())])
    assert_same(noisy.state(), plain.state())
    for side in ours:
        for param in side.params:
            shadow = fresh_shadow(param, layout.get("shadow_dtype")) if param.dtype == torch.float32 else None
            assert shadow is None or torch.equal(shadow, param.detach().to(shadow.dtype)), "shadow"
    if exact is not None:
        bound = 2 * (steps + 1) * U * (3 * largest + update_error(name, options, LR))
        for p, master in zip(params_of(exact), plain.masters(), strict=True):
            errors = (p.detach() - master).abs().flatten().sort().values
            if name in ("Lion", "Adam"):  # where a gradient and what it is added to cancel, the direction is in doubt
                errors = errors[: -1 - len(errors) // 1000]
            assert not len(errors) or errors[-1] <= bound, (
                f"{errors[-1]} from {REFERENCES[name].__name__}, bound {bound}"
            )


if __name__ == "__main__":
    main(case)
