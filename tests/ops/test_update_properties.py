"""The CPU kernels of the list ops against their Python references, over any list of tensors and any options.

All results are compared bit for bit, those of lamb_ too: both sum its norms in float64, whose order of summation is far
below the rounding of the rate. Only NaNs may differ in sign and payload. The elements around every tensor count as
results, so that a write beside one is seen.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._updates.op import RULES
from amp_kernels.testing.bits import assert_same_bits
from amp_kernels.testing.updates import KINDS, Update, flat

from .update_rules import BF16, F16, F32

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 33, 64, 255, 300]
SHAPES = [(n,) for n in SIZES] + [(), (3, 0), (7, 5), (1, 17), (16, 3), (2, 3, 5), (20, 15)]
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, 6e-8, -65504.0, 3e38]  # rounded to the tensor's dtype
OPTIONS = {"lr": [0.0, 1e-3, 0.3], "beta1": [0.0, 0.9], "beta2": [0.5, 0.999], "weight_decay": [0.0, 0.1]}
OPTIONS |= {"momentum": [0.0, 0.9], "dampening": [0.0, 0.25], "ema_decay": [0.0, 0.999]}
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def whole(t):
    """Everything in the storage of ``t``."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def placed(t, axes, offset):
    """``t`` with the dimensions ``axes`` in this order in memory, ``offset`` elements after the start of a storage
    that goes on after it."""
    storage = torch.full((t.numel() + offset + 3,), 7.0, dtype=t.dtype)
    shape = [t.shape[axis] for axis in axes]
    view = storage[offset : offset + t.numel()].view(shape).permute([axes.index(d) for d in range(t.dim())])
    return view.copy_(t)


def draw_places(data, tensors):
    axes = [data.draw(st.permutations(range(t.dim())), label="axes") for t in tensors]
    offsets = [data.draw(st.sampled_from([0, 0, 1, 3, 8]), label="offset") for _ in tensors]
    return axes, offsets


def draw_specials(data, tensors):
    """Overwrites up to four elements of a list of tensors."""
    full = [t for t in tensors if t.numel()]
    for _ in range(data.draw(st.integers(0, 4), label="specials") if full else 0):
        target = flat(data.draw(st.sampled_from(full), label="tensor"))
        value = torch.tensor(data.draw(st.sampled_from(SPECIAL), label="value"), dtype=target.dtype)
        target[data.draw(st.integers(0, target.numel() - 1), label="position")] = value


def draw_update(data, name) -> Update:
    blocks = data.draw(st.integers(1, 3), label="blocks")
    update = Update(
        name,
        data.draw(st.lists(st.sampled_from(KINDS), min_size=blocks, max_size=blocks), label="kinds"),
        seed=data.draw(st.integers(0, 99), label="seed"),
        shapes=data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6 // blocks), label="shapes"),
        moment_dtype=data.draw(st.sampled_from([F32, BF16]), label="moments"),
        first=data.draw(st.booleans(), label="first"),
    )
    absent = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks), label="without optional moments")
    for moment, buffers in zip(update.declared.moments, update.moments, strict=True):
        if moment in update.declared.optional:
            buffers[:] = [b[:0].clone() if a else b for a, b in zip(absent, buffers, strict=True)]
    count = len(update.params)
    dtypes = data.draw(st.lists(st.sampled_from([F16, BF16, F32]), min_size=count, max_size=count), label="grads")
    axes, offsets = draw_places(data, update.grads)
    own = draw_places(data, update.params)[1]
    update.params = [placed(p, a, o) for p, a, o in zip(update.params, axes, own, strict=True)]
    update.grads = [placed(g.to(d), a, o) for g, d, a, o in zip(update.grads, dtypes, axes, offsets, strict=True)]
    order = data.draw(st.permutations(range(count)), label="order")
    update.params = [update.params[i] for i in order]
    update.grads = [update.grads[i] for i in order]
    update.layout = update.layout[order]
    draw_specials(data, update.grads)
    return update


def draw_scalars(data) -> dict:
    one_of = {
        "grad_scale": [None, 1.0, 3.0, 65536.0, 2.0**-10],
        "found_inf": [None, 0.0, 0.0, 1.0, 2.0],
        "sum_sq": [None, 0.0, 4.0, 1e4, math.inf],
        "max_norm": [1.0, 50.0],
        "seed": [0, 2**63 - 1, 1 << 32 | 5],
    }
    return {name: data.draw(st.sampled_from(values), label=name) for name, values in one_of.items()}


def forget_nans(update: Update) -> None:
    """The remainder of a split weight that is NaN holds half of the payload."""
    for i, param in enumerate(update.params):
        kind, piece, block, _ = update.place(i)
        if kind.master == torch.int16:
            update.masters[block][piece][flat(param).isnan()] = 0


@pytest.mark.parametrize("name", RULES)
@PROPERTY
@given(data=st.data())
def test_updates(name, data):
    update = draw_update(data, name)
    declared, groups = update.declared, len(update.kinds)

    def each(label, values):
        return data.draw(st.lists(values, min_size=groups, max_size=groups), label=label)

    call = draw_scalars(data)
    bits = [1 << k for k in range(declared.flags.bit_length()) if declared.flags >> k & 1]
    call["flags"] = each("flags", st.sets(st.sampled_from(bits)).map(sum))
    for option in (*declared.options, "ema_decay"):
        call[option] = each(option, st.sampled_from(OPTIONS.get(option) or [declared.options[option]]))
    if data.draw(st.booleans(), label="lr tensors"):
        call["lrs"] = [2 * lr for lr in call["lr"]]
    if data.draw(st.booleans(), label="weight decay tensors"):
        call["weight_decays"] = [2 * decay for decay in call["weight_decay"]]

    before, expected = copy.deepcopy(update.tensors), copy.deepcopy(update)
    op = REGISTRY[name]
    update.step(ak.backend("cpu")(op), **call)
    expected.step(ak.backend("reference")(op), **call)
    forget_nans(update)
    forget_nans(expected)
    count = len(update.params)
    labels = ["params"] * count + ["grads"] * count + ["state"] * (len(before) - 2 * count)
    for label, got, wanted, old in zip(labels, update.tensors, expected.tensors, before, strict=True):
        assert_same_bits(whole(got), whole(wanted), label)
        if label == "grads" or (call["found_inf"] or 0.0) > 0:
            assert_same_bits(whole(got), whole(old), f"{label}, which must not change")


def draw_grads(data):
    count = data.draw(st.integers(1, 6), label="count")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    grads = []
    for _ in range(count):
        dtype = data.draw(st.sampled_from([F16, BF16, F32, torch.float64]), label="dtype")
        grads.append(torch.randn(data.draw(st.sampled_from(SHAPES), label="shape"), generator=generator).to(dtype))
    grads = [placed(g, a, o) for g, a, o in zip(grads, *draw_places(data, grads), strict=True)]
    draw_specials(data, grads)
    return grads


@PROPERTY
@given(data=st.data())
def test_unscale(data):
    grads = draw_grads(data)
    expected = copy.deepcopy(grads)
    inv = torch.tensor(data.draw(st.sampled_from([1.0, 1 / 3, 2.0**-16, 2.0**10]), label="inv"))
    flags = [torch.tensor(data.draw(st.sampled_from([0.0, 0.0, 1.0]), label="found"))]
    flags.append(flags[0].clone())
    op = REGISTRY["unscale_"]
    ak.backend("cpu")(op)(grads, flags[0], inv)
    ak.backend("reference")(op)(expected, flags[1], inv)
    for got, wanted in zip([*grads, flags[0]], [*expected, flags[1]], strict=True):
        assert_same_bits(whole(got), whole(wanted), "unscale_")


@PROPERTY
@given(data=st.data())
def test_check_and_norm(data):
    """Flags and largest magnitudes have the reference's bits; sums of squares may differ in the last places."""
    grads = draw_grads(data)
    before = copy.deepcopy(grads)
    scale = data.draw(st.sampled_from([None, 1.0, 3.0, 65536.0, 2.0**-10]), label="scale")
    scale = None if scale is None else torch.tensor(scale)
    norm_type = data.draw(st.sampled_from([2.0, math.inf]), label="norm_type")
    options = {"norm_type": norm_type, "per_tensor": data.draw(st.booleans(), label="per_tensor")}
    op = REGISTRY["check_and_norm"]
    norm, found = ak.backend("cpu")(op)(grads, scale, **options)
    wanted_norm, wanted_found = ak.backend("reference")(op)(grads, scale, **options)
    assert_same_bits(found.reshape(-1), wanted_found.reshape(-1), "found_inf")
    tolerance = 4 * 2.0**-24 if norm_type == 2.0 else 0.0
    torch.testing.assert_close(norm, wanted_norm, rtol=tolerance, atol=0.0, equal_nan=True)
    assert_same_bits(ak.backend("cpu")(op)(grads, scale, **options)[0].reshape(-1), norm.reshape(-1), "a second run")
    for got, old in zip(grads, before, strict=True):
        assert_same_bits(whole(got), whole(old), "grads, which must not change")
