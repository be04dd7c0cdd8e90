"""The host code of the ops (``csrc/*/glue*.cpp``) on the emulator: which address, stride, scratch and plan reaches a kernel.

Kernels have tests of their own; here every argument gets a value of its own, so that two that were exchanged show. New memory
is full of NaN on the emulator and unreadable until written. Results are those of the CPU kernels to the bit.
"""

import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.unscale import unscale_
from amp_kernels.ops._shadows import fresh_shadow
from amp_kernels.optim import _matrices

from ..helpers.emulator import launches
from ..ops.raw import activation_backward, gemm, gemm_accumulate_, gemm_dact
from .both import assert_same_on_both, bf16, f16, f32, integers, tensors

f64 = torch.float64


# ---- sums


def test_column_sums_refuse_what_they_cannot_read():
    with ak.backend("emulate"):
        for wrong, said in ((torch.zeros(3), r"got shape \(3\)"), (torch.zeros(2, 2, dtype=f64), "x must have dtype")):
            with pytest.raises(RuntimeError, match=said):
                REGISTRY["column_sums"](wrong)


# ---- lists of gradients


def grads_of(count, dtypes=(f32, f16, bf16, f64)):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(3 + i % 5, generator=generator).to(dtypes[i % len(dtypes)]) for i in range(count)]


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
@pytest.mark.parametrize("count", [3, 1600])
def test_a_list_of_more_gradients_than_one_launch_takes(count, norm_type, per_tensor):
    grads = grads_of(count)
    grads[1] = grads[1][:0]
    grads[-1] = grads[-1].clone().fill_(7e3)  # the tail counts
    scale = torch.tensor(3.0)
    with ak.backend("emulate"):
        norm, found = check_and_norm(grads, scale, norm_type=norm_type, per_tensor=per_tensor)
        assert len(launches()) >= (2 if count > 1536 else 1)
        if not per_tensor:  # few arguments for few gradients, that every driver takes
            assert (launches()[0].arguments <= 4096) == (count <= 187)
        _, found_in_tail = check_and_norm([*grads[:-1], torch.tensor([1.0, torch.nan])], per_tensor=per_tensor)
    parts = [grad.double() / 3.0 for grad in grads]
    if not per_tensor:
        parts = [torch.cat(parts)]
    expected = [p.square().sum() if norm_type == 2.0 else p.abs().max() if p.numel() else p.sum() for p in parts]
    torch.testing.assert_close(norm.flatten(), torch.stack(expected).float(), rtol=1e-6, atol=0)
    assert not found.any()
    assert found_in_tail.flatten()[-1] == found_in_tail.sum() == 1.0


def test_unscale_reads_factor_and_flag_from_their_own_places():
    assert_same_on_both(unscale_, grads_of(9), torch.tensor(0.0), torch.tensor(0.125))
    assert_same_on_both(unscale_, [torch.full((5,), 3e38), torch.ones(3)], torch.tensor(0.0), torch.tensor(2.0))
    assert launches()[-1].arguments <= 4096


# ---- activations


def test_sums_of_columns_cost_no_pass_of_their_own():
    z = integers(450, 40, dtype=bf16)
    with ak.backend("emulate"):
        activation_backward(z, z, activation="gelu", bias_grad=True)
    assert [launch.name for launch in launches()] == ["activation_backward", "gemm_column_sums"]


# ---- GEMM


def operands(m, n, k, batch=None, dtype=bf16):
    front = () if batch is None else (batch,)
    return integers(*front, m, k, dtype=dtype, seed=1), integers(*front, k, n, dtype=dtype, seed=2)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [None, 3])
def test_gemm_takes_operands_as_they_lie(layout, batch, capability):
    a, b = operands(40, 24, 72, batch)
    a = a.mT.contiguous().mT if layout[0] == "t" else a
    b = b.mT.contiguous().mT if layout[1] == "t" else b
    assert_same_on_both(lambda: [gemm(a, b), gemm(a[..., 8:], b[..., 8:, :16], out_dtype=f32)])
    gaps = integers(*a.shape[:-1], 144, seed=8)[..., ::2]  # contiguous in no dimension
    assert_same_on_both(lambda: [gemm(gaps, b), gemm(a, gaps[..., :24, :].mT)])
    if batch:
        assert_same_on_both(lambda: gemm(a[:1].expand(3, -1, -1), b))
        assert_same_on_both(lambda: gemm(a[::2], b[1:]))


@pytest.mark.parametrize("batch", [None, 2])
def test_every_side_operand_has_its_own_place(batch, capability):
    a, b = operands(24, 16, 40, batch)
    shape = (*a.shape[:-1], 16)
    columns, rows = integers(32, dtype=f32, seed=3)[::2], integers(24, 3, dtype=bf16, seed=4)[:, 1:2]
    residual = integers(*shape[:-2], 16, 24, dtype=f32, seed=5).mT
    for bias in (columns, rows):
        assert_same_on_both(lambda bias=bias: gemm(a, b, bias, residual, alpha=0.5, beta=-2.0, activation="relu"))
        assert_same_on_both(lambda bias=bias: gemm(a, b, bias, out_dtype=f32, activation="gelu_tanh"))
    assert_same_on_both(lambda: gemm(a, b, None, residual[..., :1].expand(shape), beta=0.25, out_dtype=f16))
    assert_same_on_both(lambda: gemm(a, b, columns, torch.full(shape, torch.nan), beta=0.0))
    assert_same_on_both(lambda: gemm(a, b, columns, activation="swiglu"))


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("batch", [None, 2])
def test_gemm_dact_and_its_column_sums(batch, activation, capability):
    a, b = operands(40, 24, 16, batch)
    preact = integers(*a.shape[:-1], 24, seed=6)
    for bias_grad in (False, True):
        assert_same_on_both(
            lambda flag=bias_grad: gemm_dact(a, b, preact, activation=activation, bias_grad=flag, out_dtype=f32)
        )
    assert_same_on_both(lambda: gemm_dact(a, b, preact.mT.contiguous().mT.float(), activation=activation))
    assert_same_on_both(lambda: gemm_dact(a[..., :0, :], b, preact[..., :0, :], activation=activation, bias_grad=True))


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("batch", [None, 2])
def test_accumulation_into_views(batch, beta, capability):
    a, b = operands(24, 16, 40, batch)
    c = integers(*a.shape[:-1], 16, dtype=f32, seed=7)
    if beta == 0.0:
        c.fill_(torch.nan)
    assert_same_on_both(lambda c: gemm_accumulate_(c, a, b, alpha=0.5, beta=beta), c)
    assert_same_on_both(lambda c: gemm_accumulate_(c.mT, b.mT, a.mT, beta=beta), c)


@pytest.mark.parametrize("k", [0, 5, 2048])
def test_any_k(k, capability):
    """None, less than a vector, and enough for sums that are split and meet in scratch memory."""
    a, b = operands(16, 24, k)
    bias = integers(24, dtype=f32)
    for _ in range(2):
        assert_same_on_both(lambda: gemm(a, b, bias, out_dtype=f32))
    for m, n in ((0, 24), (16, 0)):
        assert_same_on_both(lambda m=m, n=n: gemm(a[:m], b[:, :n], bias[:n], out_dtype=f32))
    assert_same_on_both(lambda c: gemm_accumulate_(c, a, b, beta=2.0), torch.ones(16, 24))


def test_a_row_is_the_same_alone_and_from_an_unaligned_place(capability):
    a, b = torch.randn(9, 104).bfloat16(), torch.randn(104, 40).bfloat16()
    shifted = torch.empty(9 * 104 + 1, dtype=bf16)[1:].view(9, 104).copy_(a)
    with ak.backend("emulate"):
        many = gemm(a, b, batch_invariant=True)
        for rows in (a[3:4], shifted, shifted[3:4]):
            few = gemm(rows, b, batch_invariant=True)
            assert launches()[-1].name == ("gemm_sm90" if capability == "9.0" else "gemm_sm80")
            assert torch.equal(few, many if len(few) == 9 else many[3:4])


def test_a_sum_starts_from_what_it_is_added_to(capability):
    """In every layout: along k, across, apart and of one line."""
    for m, n, k in ((24, 40, 72), (1, 16, 70), (16, 1, 64), (8, 8, 1)):
        a, b = torch.randint(-2, 3, (m, k)).bfloat16(), torch.randint(-2, 3, (k, n)).bfloat16()
        apart = (
            torch.zeros(k, 2 * m).bfloat16()[:, ::2].copy_(a.t()).t(),
            torch.zeros(k, n + 3).bfloat16()[:, :n].copy_(b),
        )
        for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t()), apart):
            c = torch.full((m, n), 3.0)
            with ak.backend("emulate"):
                gemm_accumulate_(c, x, y, batch_invariant=True)
            assert launches()[-1].name == ("gemm_sm90" if capability == "9.0" else "gemm_sm80")
            assert torch.equal(c, 3 + a.float() @ b.float())


def test_the_planned_tile_is_the_one_that_runs():
    """Narrow and wide tiles have room for different numbers of stages."""
    shared = []
    for activation in ("none", "swiglu"):  # swiglu takes tiles of at least 128 columns
        with ak.backend("emulate"):
            gemm(torch.ones(64, 64, dtype=bf16), torch.ones(64, 128, dtype=bf16), activation=activation)
        shared.append(launches()[-1].shared)
    assert shared[0] != shared[1]


# ---- rows

LONGEST = 2**30  # the kernels count columns in ints, and what a thread or a piece has past the last one too
NO_ROWS = {  # calls without a row, which so need no memory, and what they say of one column too many
    "norm_forward": (lambda op, x: op(x, eps=1e-5, centred=True, out_dtype=f32),
        f"norm_forward: x must have at most {LONGEST} columns; got {LONGEST + 1}"),
    "norm_backward": (lambda op, x: op(x, x, torch.empty(0), parameters=0),
        f"norm_backward: x must have at most {LONGEST} columns; got {LONGEST + 1}"),
    "cross_entropy_rows_": (lambda op, x: op(x, torch.empty(0, dtype=torch.int64), None, None, torch.empty(0), None),
        f"cross_entropy_rows_: logits must have at most {LONGEST} classes; got (0, {LONGEST + 1})"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ROWS)
def test_rows_that_are_too_long_are_refused(name):
    call, message = NO_ROWS[name]
    with ak.backend("emulate"), torch.no_grad():
        call(REGISTRY[name], torch.empty(0, LONGEST))
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call(REGISTRY[name], torch.empty(0, LONGEST + 1))


# ---- updates


def trained(name, backend, options, count, steps=3):
    """Parameters and state after some steps in which every scalar and group differs."""
    generator = torch.Generator().manual_seed(count)
    dtypes = (f32, bf16, f16)
    params = [
        torch.nn.Parameter(torch.randn(5 + i % 3, 2, generator=generator).to(dtypes[i % 3])) for i in range(count)
    ]
    groups = [{"params": params[0::2]}, {"params": params[1::2], "lr": torch.tensor(0.07), "weight_decay": 0.2}]
    optimizer = getattr(ak.optim, name)(groups, lr=0.03, weight_decay=0.1, **options)
    scaler = ak.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(()))
    with ak.backend(backend):
        for _ in range(steps):
            for p in params:
                p.grad = (64 * torch.randn(p.shape, generator=generator)).to(p.dtype)
            scaler.step(optimizer, max_norm=0.5)
            scaler.update()
    state = optimizer.state_dict()["state"]
    shadows = [shadow for p in params if (shadow := fresh_shadow(p, optimizer.shadow_dtype)) is not None]
    return (
        params,
        shadows,
        [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)],
    )


RULES = {
    "AdamW": [{"amsgrad": True, "shadow_dtype": bf16}, {"master_weights": "split", "ema_decay": 0.5}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"master_weights": "none", "seed": 3 << 33}],
    "Lion": [{"state_dtype": bf16, "ema_decay": 0.9}, {"betas": (0.7, 0.95), "maximize": True}],
    "Muon": [{"nesterov": False, "ema_decay": 0.5}, {"master_weights": "none", "cautious": True}],
    "LAMB": [{"betas": (0.8, 0.9)}, {"use_nvlamb": True, "bias_correction": False}],
}


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, row in RULES.items() for options in row])
@pytest.mark.parametrize("count", [7, 700])
def test_a_step_of_more_parameters_than_one_launch_takes(monkeypatch, name, options, count):
    """The last of 700 are not in the first launch; the second step of 7 comes from a table of addresses. Muon goes without its
    products, which may be of another precision."""
    monkeypatch.setattr(_matrices, "orthogonalized", lambda x, *_: x.to(f16))
    with torch.random.fork_rng():
        emulated = trained(name, "emulate", options, count, steps=3 if count == 7 else 1)
        expected = trained(name, "cpu", options, count, steps=3 if count == 7 else 1)
    if count > 600:
        assert len([launch for launch in launches() if launch.name == "update_scale"]) == 1
    torch.testing.assert_close([*tensors(emulated)], [*tensors(expected)], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["adamw_", "sgd_", "lion_", "muon_", "lamb_"])
def test_an_empty_list_is_no_step(name):
    op = REGISTRY[name]
    args, kwargs = next(iter(op.samples("cpu")))
    empty = [[] if isinstance(value, list) else value for value in args]
    layout = next(i for i, argument in enumerate(op.schema.arguments) if argument.name == "layout")
    empty[layout] = empty[layout][:0]
    with ak.backend("emulate"):
        check_and_norm([torch.ones(3)])
    op.emulated(*empty, **kwargs)
    assert [launch.name for launch in launches()] == ["check_and_norm"]  # still the last one


# ---- launches

ROWS_AND_ELEMENTS = [
    "norm_forward",
    "norm_backward",
    "cross_entropy_rows_",
    "rotary_forward",
    "rotary_backward",
    "activation_forward",
    "activation_backward",
    "cast_",
]


@pytest.mark.parametrize("name", ROWS_AND_ELEMENTS)
def test_kernels_of_rows_and_elements_may_start_before_the_previous_one_ends(name):
    """The emulator reports a kernel that does not wait before its first access."""
    op, found = REGISTRY[name], []
    for args, kwargs in op.samples("cpu"):
        with ak.backend("emulate"), torch.no_grad():
            op(*args, **kwargs)
        found += launches()
    assert found
    assert all(launch.overlaps for launch in found), {launch.name for launch in found if not launch.overlaps}
