"""Public ops over any shapes, dtypes, places in memory, values and modes, forward and backward.

Results are as close to float64 as torch's own, or closer, and within the bounds of ``tests.helpers.bounds`` where it has one. Numbers
that are not finite stand where torch has them. Arguments that do not fit are refused by name."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable

import torch

import amp_kernels as ak

from ..helpers.bits import assert_same_bits
from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.poison import poisoned_allocations
from .drawn_ops import OPS, Inputs, Op
from .fuzz import BAD, FLOATS, HALVES, Draw, main

REFUSALS = ValueError, TypeError, RuntimeError, IndexError
OF_ROWS = "layer_norm", "rms_norm", "cross_entropy", "embedding", "rotary", "gelu", "silu", "swiglu"


def results(
    function: Callable, tensors: dict, options: dict, needed: set, grads: Callable, compute: torch.dtype | None
) -> dict:
    """Outputs and the gradients of the tensors that are ``needed``, by name; ``grads`` gives those of the outputs."""
    leaves = {
        n: t.detach().requires_grad_(n in needed) if isinstance(t, torch.Tensor) else t for n, t in tensors.items()
    }
    with torch.autocast("cpu", compute or torch.bfloat16, enabled=compute is not None):
        outputs = function(**leaves, **options)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    found = {f"result {i}": y.detach() for i, y in enumerate(outputs)}
    pairs = [(y, g) for y, g in zip(outputs, grads(outputs), strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
        found |= {f"gradient of {n}": leaves[n].grad for n in sorted(needed) if leaves[n].grad is not None}
    return found


def kinds(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.isnan(), 3, torch.where(t.isinf(), t.sign().nan_to_num(), 0))


def assert_near(what: str, ours: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor, fine: float) -> None:
    """``ours`` is not much further from ``exact`` than torch's result, and not finite where one of the others is not."""
    assert ours.shape == exact.shape, f"{what}: shape {list(ours.shape)}, torch's {list(exact.shape)}"
    if not exact.numel():
        return
    odd = (kinds(ours) != kinds(stock)) & (kinds(ours) != kinds(exact.to(ours.dtype)))
    if "gradient" in what:  # the order of a formula decides between infinite and NaN
        odd &= ours.isfinite() | stock.isfinite()
    assert not odd.any(), f"{what}: {ours[odd][0]} where torch has {stock[odd][0]} and float64 {exact[odd][0]}"
    finite = ours.isfinite() & exact.isfinite()
    wide, torchs, right = (t.double().where(finite, 0.0).flatten() for t in (ours, stock, exact))
    slack = torch.where(stock.isfinite().flatten(), torchs - right, 0.0).abs()
    error, u = (wide - right).abs(), UNIT_ROUNDOFF[ours.dtype]
    floor = fine * (1 + right.abs().max())
    bound = 4 * slack.max() + 2 * u * right.abs() + floor + TINY[ours.dtype]
    worst = int((error - bound).argmax())
    at = f"{what}: element {worst} is {wide[worst]:.9g}, float64 {right[worst]:.9g}, torch {torchs[worst]:.9g}"
    assert (error <= bound).all(), at
    few = 1 + error.numel() ** -0.5  # of few elements nothing cancels
    assert error.norm() <= 3 * slack.norm() + few * u * right.norm() + floor * error.numel() ** 0.5, f"as a whole, {at}"


def spoiled(d: Inputs, t: torch.Tensor) -> object:
    """A tensor, or something else, that does not fit as a rule."""
    kind = d.choice(["dtype", "dtype", "sizes", "sizes", "dims", "meta", "other"])
    if kind == "dtype":
        return t.to(d.choice([torch.int64, torch.bool, torch.float64, torch.complex64, *FLOATS]))
    if kind == "sizes" and t.ndim:
        return (
            t.index_select(d.randrange(-t.ndim, 0), torch.zeros(d.choice([0, 1, 2, 6]), dtype=torch.int64))
            if t.numel()
            else t[None]
        )
    if kind == "dims":
        return d.choice([t[None], t.flatten(), t.sum(), t[..., None]])
    return t.to("meta") if kind == "meta" else d.choice([None, 1.5, "x", [1.0]])


def case(draw: Draw) -> None:
    d = Inputs(draw.getrandbits(60))
    d.notes, d.dtype = draw.notes, d.choice([*FLOATS, *FLOATS, torch.float64])
    name = d.choice(sorted(OPS))
    op, compute = OPS[name], d.choice([None, None, *HALVES])
    tensors, options = op.draw(d)
    given = {n: t for n, t in tensors.items() if t is not None}
    poison, spoil = d.flag(0.2), d.flag(0.25)
    # torch's function multiplies ignored rows by 0.
    poison = poison and (name, d.dtype) != ("cross_entropy", torch.float64)
    if poison and (whole := [n for n in given if given[n].numel()]):
        n = d.choice(whole)
        given[n] = given[n].clone().contiguous()
        # float64, of which a spoiled tensor may be, is torch's, at infinity too.
        numbers = BAD[:1] if spoil or d.dtype == torch.float64 else BAD
        given[n].view(-1)[d.randrange(given[n].numel())] = d.choice(numbers)
    if spoil:
        n = d.choice(list(given))
        given[n] = spoiled(d, given[n])
    needed = {n for n, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point() and d.flag()}
    d.note(name, {n: described(t) for n, t in given.items()}, {n: described(o) for n, o in options.items()})
    d.note("autocast", compute, "gradients of", sorted(needed), "bad value" * poison, "spoiled" * spoil)
    before, drawn = copy.deepcopy(given), []

    def grads(outputs: list) -> list:
        drawn.extend(d.placed(d.normal(*y.shape, dtype=y.dtype)) for y in outputs[len(drawn) :])
        return [g.to(y) for g, y in zip(drawn, outputs, strict=True)]

    on_emulator = (
        name in OF_ROWS and d.flag(0.3) and not any(isinstance(t, torch.Tensor) and t.is_meta for t in given.values())
    )
    d.note("on the emulator" * on_emulator)
    try:
        with ak.backend("emulate") if on_emulator else contextlib.nullcontext(), poisoned_allocations():
            ours = results(op.ours, given, options, needed, grads, compute)
    except REFUSALS as refusal:
        names = {*given, *options, *inspect.signature(op.ours).parameters}
        if not spoil:
            raise
        if not any(re.search(rf"\b{n}\b", str(refusal)) for n in names):
            assert_torchs_own(refusal, op, given, options, needed, grads, compute)
        return
    finally:
        assert_same_inputs(given, before)
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in given.values()):
        return
    stock = torchs(op, given, options, needed, grads, compute)
    exact = results(op.theirs, widened(given, torch.float64), widened(options, torch.float64), needed, grads, None)
    assert ours.keys() == exact.keys(), f"{[*ours]}, torch has {[*exact]}"
    for what, value in ours.items():
        fine = 2.0**-46 if value.dtype == torch.float64 else 2.0**-20
        if spoil or (poison and not stock[what].isfinite().all()):  # torch mixes no dtypes, or is no measure
            fine = max(fine, 4 * UNIT_ROUNDOFF[torch.bfloat16])
        if name == "linear_cross_entropy":  # logits and their gradients are rounded to the working dtype
            fine = max(fine, 4 * UNIT_ROUNDOFF[compute or d.dtype])
        if "gradient" in what:  # of results as they are stored
            fine = max(fine, 4 * UNIT_ROUNDOFF[ours["result 0"].dtype])
        assert_near(what, value, stock[what], exact[what], fine)
    if op.bound and not (poison or spoil) and ours["result 0"].dtype in HALVES:
        within = op.bound(ours["result 0"].dtype, **given, **options)
        if within:
            assert_within(ours["result 0"], *within)


def torchs(op: Op, given: dict, options: dict, needed: set, grads: Callable, compute: torch.dtype | None) -> dict:
    """In the same dtypes; where torch does not mix them, in float32."""
    try:
        return results(op.theirs, given, options, needed, grads, compute)
    except REFUSALS:
        return results(op.theirs, widened(given, torch.float32), widened(options, torch.float32), needed, grads, None)


def assert_torchs_own(refusal: Exception, op: Op, *call: object) -> None:
    """torch's operations serve some arguments, and their refusals are passed on."""
    try:
        results(op.theirs, *call)
    except Exception as error:
        if str(error) == str(refusal):
            return
    raise AssertionError(f"names no argument: {refusal}") from refusal


def widened(values: dict, dtype: torch.dtype) -> dict:
    return {n: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in values.items()}


def assert_same_inputs(now: dict, before: dict) -> None:
    for n, t in before.items():
        if isinstance(t, torch.Tensor) and not t.is_meta and t.layout == torch.strided and not t.is_complex():
            assert_same_bits(now[n], t, f"{n} was written to")


def described(value: object) -> object:
    return f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride())}" if hasattr(value, "stride") else value


if __name__ == "__main__":
    main(case)
