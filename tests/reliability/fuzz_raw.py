"""Raw ops, and the public ones as torch's dispatcher sees them, with arguments that nobody passes: the result is the reference's, or
the call is refused and has changed nothing.

A case is a sample of an op with up to three arguments spoiled. ``tests/build/sanitized.py`` runs it on a sanitized library."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY, Op, Sample
from amp_kernels._updates.op import RULES
from amp_kernels.cli.check import TOLERANCE

from ..ops import composites
from .fuzz import BAD, Draw, main

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
NUMBERS = [0, 1, -1, 2, 0.5, -0.25, 3, 7, 2**31, 2**40, -(2**63), 1e300, *BAD]
OFTEN = ["unscale_", "update_scale_", "embedding_accumulate_"] * 2  # of which few samples have a flag or an option
REFUSALS = ValueError, TypeError, RuntimeError


@functools.cache
def samples(name: str) -> list[Sample]:
    return list(composites.samples(REGISTRY[name], "cpu"))


def drawn(draw: Draw, op: Op) -> dict:
    """A sample's arguments by name, spoiled."""
    args, kwargs = draw.choice(samples(op.name))
    names = [argument.name for argument in op.schema.arguments]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    draw.note(op.name, {name: described(value) for name, value in call.items()})
    call = {name: map_tensors(value, lambda t: t.detach().clone()) for name, value in call.items()}
    for name in draw.choices(list(call), k=draw.choice([0, 1, 1, 1, 2, 3])):
        optional = next(a for a in op.schema.arguments if a.name == name).has_default_value()
        call[name] = None if optional and draw.flag(0.1) else spoiled(draw, call[name])
        if "activation" in names:  # at infinity they have limits, where the reference, torch's, has NaN
            call[name] = map_tensors(
                call[name], lambda t: t.nan_to_num(math.nan, math.nan, math.nan) if t.dtype in TOLERANCE else t
            )
        if name in ("step", "steps"):  # counted by optimizers, and part of the key of random bits
            call[name] = map_tensors(call[name], lambda t: t.nan_to_num(0.0, 0.0, 0.0) if t.dtype in TOLERANCE else t)
        draw.note(" ", name, "=", described(call[name]))
    return call


def spoiled(draw: Draw, value: object) -> object:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            return value
        if draw.flag(0.2):
            return draw.placed(value)
        return draw.choice([retyped, reshaped, resized, poisoned, elsewhere])(draw, value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        value, i = list(value), draw.randrange(len(value))
        kind = draw.choice(["one"] * 6 + ["shorter", "longer", "empty", "twice"])
        if kind == "one":
            one = spoiled(draw, value[i])
            return [*value[:i], one, *value[i + 1 :]]
        if kind == "longer" or len(value) == 1:
            return [*value, value[i].clone()]
        return {"shorter": value[:i] + value[i + 1 :], "empty": [], "twice": [*value[:-1], value[0]]}[kind]
    if isinstance(value, (list, tuple)):
        # Optimizers check their numbers. What steps make of infinite ones is not the same in every order of a formula.
        numbers = [n for n in NUMBERS if -(2**31) < n < 2**31] if value and isinstance(value[0], float) else None
        other = [float(draw.choice(numbers)) if numbers else spoiled(draw, each) for each in value]
        return draw.choice([[], [*value, *value], list(value[:-1]), other])
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        number = draw.choice(NUMBERS)
        return type(value)(number) if isinstance(value, float) or -(2**63) <= number < 2**63 else 0
    if isinstance(value, str):
        return draw.choice(["none", "gelu", "swiglu", "relu", "mean", "", "Gelu"])
    return draw.choice([value, 0, torch.zeros(3), *[torch.float32, torch.int32] * isinstance(value, torch.dtype)])


def retyped(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    return t.to(draw.choice(DTYPES))


def reshaped(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.uint8 and t.ndim == 1:  # of moments: twice as long its codes would be read as exponents
        return t[None]
    if t.ndim < 2:
        return t.repeat(2)
    forms = [t[None], t.flatten(), t.unsqueeze(-1), t.repeat(2, *[1] * t.ndim), t.transpose(0, -1)]
    return draw.choice(forms + ([t[0]] if len(t) else []))


def resized(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    if not t.ndim:
        return t.repeat(draw.randrange(3))
    dim, size = draw.randrange(t.ndim), draw.choice([0, 1, 3, 8, 17])
    index = torch.arange(size) % max(1, t.shape[dim])
    return t.index_select(dim, index) if t.shape[dim] else t.new_ones([*t.shape[:dim], size, *t.shape[dim + 1 :]])


def poisoned(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    if t.numel():
        at = draw.randrange(t.numel())
        numbers = (
            [*BAD, 0.0, -0.0, 1.0]  # 1: a flag
            if t.is_floating_point()
            else [0, 1, -1, -100, 5, 127, *[-(2**40), 2**40] * (t.dtype == torch.int64)]
        )
        t.view(-1)[at] = draw.choice(numbers)
    return t


def elsewhere(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    sparse = t.ndim and t.dtype != torch.float8_e4m3fn and draw.flag(0.2)
    return t.to_sparse() if sparse else t.to("meta")


def map_tensors(value: object, function) -> object:
    if isinstance(value, torch.Tensor):
        return function(value)
    return [map_tensors(each, function) for each in value] if isinstance(value, (list, tuple)) else value


def tensors(value: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(list(value.values()) if isinstance(value, dict) else value, found.append)
    return found


def described(value: object) -> object:
    text = map_tensors(value, lambda t: f"{str(t.dtype)[6:]}{list(t.shape)}" + f"@{t.device}" * t.is_meta)
    return text if not isinstance(text, list) or len(text) < 6 else f"{len(text)} x {text[0]}"


def called(function: Callable, op: Op, call: dict) -> object:
    positional = [a.name for a in op.schema.arguments if not a.kwarg_only and a.name in call]
    return function(*(call[name] for name in positional), **{n: v for n, v in call.items() if n not in positional})


def memory(t: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor's storage, beside the view too."""
    if t.is_meta or t.layout != torch.strided:
        return torch.zeros(0)
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def assert_unchanged(call: dict, before: dict, what: str) -> None:
    for name in before:
        for i, (now, then) in enumerate(zip(tensors(call[name]), tensors(before[name]), strict=True)):
            assert torch.equal(memory(now).view(torch.uint8), memory(then).view(torch.uint8)), f"{what}: {name}[{i}]"


def assert_agree(actual: object, expected: object, what: str, bits: bool = False) -> None:
    """``bits``: in every bit, NaNs apart."""
    for a, e in zip(tensors(actual), tensors(expected), strict=True):
        assert (a.dtype, a.shape, a.device) == (e.dtype, e.shape, e.device), what
        if not a.is_meta and a.numel():
            # Which number that is not finite comes of infinities depends on the order of a formula; fuzz_ops.py asks what users see.
            a, e = (t.where(e.isfinite() | t.isfinite(), math.nan) if e.dtype in TOLERANCE else t for t in (a, e))
            tolerance = 0 if bits else TOLERANCE.get(e.dtype, 0)
            scale = max(1.0, e.abs().nan_to_num(0.0).max().item()) if tolerance else 0.0
            torch.testing.assert_close(
                a, e, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
            )


@torch.no_grad()
def case(draw: Draw) -> None:
    op = REGISTRY[draw.choice(sorted(REGISTRY) + OFTEN)]
    before = drawn(draw, op)
    call, expected = copy.deepcopy(before), copy.deepcopy(before)
    try:
        result = called(op.overload, op, call)
    except IndexError as error:
        if not str(error).startswith(("index out of range in self", "Dimension out of range")):  # torch's own
            raise
    except REFUSALS as refusal:
        assert_unchanged(call, before, f"refused ({refusal}), but changed")
    else:
        assert_right(op, call, before, expected, result)


def assert_right(op: Op, call: dict, before: dict, expected: dict, result: object) -> None:
    mutated = {name for _, name in op.mutated}
    assert_unchanged(
        *({name: value for name, value in c.items() if name not in mutated} for c in (call, before)), "changed"
    )
    if (
        "layout" in call
        and not call["layout"].is_meta
        and len({(block, slot) for block, _, slot, *_ in call["layout"].tolist()}) < len(call["layout"])
    ):
        return  # two parameters have one step counter
    with ak.backend("reference"):
        wanted = called(op, op, expected)
    assert_agree(result, wanted, "result")
    for name in mutated & call.keys():
        # Steps have the bits of the reference, LAMB's too: the order of its norms, sums in float64, is far below the rate's rounding.
        assert_agree(map_tensors(call[name], memory), map_tensors(expected[name], memory), name, bits=op.name in RULES)


if __name__ == "__main__":
    main(case)
