"""The host code of grouped products on the emulator: operands that lie in every way, the kernel that takes them, sizes of 0.

Operands are small integers, so results are those of the CPU kernels to the bit."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.gemm import gemm_op
from amp_kernels._raw.grouped_gemm import grouped_gemm_accumulate_op, grouped_gemm_op

from ..helpers.emulator import launches
from .both import assert_same_on_both, bf16, f16, f32, integers, laid


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def ways(t: torch.Tensor):
    return [laid(t, how) for how in ("plain", "transposed", "apart", "odd", "strided")]


@pytest.mark.parametrize("k", [1, 40, 41])
def test_rows_of_operands_that_lie_in_any_way(k, capability):
    a, b, offs = integers(20, k, seed=1), integers(3, k, 24, seed=2), ends(7, 7, 18)
    for left, right in zip((*ways(a), *[a] * 5), (*[b] * 5, *ways(b)), strict=True):
        launched = assert_same_on_both(lambda left=left, right=right: grouped_gemm_op(left, right, offs))
        assert launched[-1] == f"gemm_sm{'90' if capability == '9.0' else '80'}_grouped"
    expanded = b[:1].expand(3, -1, -1)
    assert_same_on_both(lambda: grouped_gemm_op(a, expanded, offs, out_dtype=f32))
    assert_same_on_both(lambda: grouped_gemm_op(a[2:], b[:1], offs[:1]))


@pytest.mark.parametrize("m", [8, 9])
def test_sums_of_operands_that_lie_in_any_way(m, capability):
    a, b, offs = integers(m, 30, dtype=f16, seed=1), integers(30, 24, dtype=f16, seed=2), ends(0, 9, 9, 27)
    c = torch.ones(4, m, 24)
    for left, right in zip((*ways(a), *[a] * 5), (*[b] * 5, *ways(b)), strict=True):
        assert_same_on_both(lambda left=left, right=right: grouped_gemm_op(left, right, offs))
        assert_same_on_both(
            lambda c, left=left, right=right: grouped_gemm_accumulate_op(c, left, right, offs), c.mT.contiguous().mT
        )
    assert_same_on_both(lambda: grouped_gemm_op(a, integers(1, 24, dtype=f16).expand(30, 24), offs))
    assert_same_on_both(lambda c: grouped_gemm_accumulate_op(c, a, b, offs, overwrite=True), c * torch.nan)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [None, f16, f32])
def test_every_argument_has_its_own_place(activation, out_dtype, capability):
    a, b = integers(40, 24, seed=1), integers(3, 24, 32, seed=2)
    offs = ends(5, 0, 9, 0, 33, 0)[::2]
    per_group = integers(32, 3, dtype=f32, seed=3).t() / 4
    for bias in (None, per_group, per_group.to(bf16), per_group[1]):
        for preact in (False, True):
            options = {"activation": activation, "out_dtype": out_dtype, "preact": preact}
            assert_same_on_both(lambda bias=bias, options=options: grouped_gemm_op(a, b, offs, bias, **options))


def test_halves_that_tma_cannot_read(capability):
    """The second half of a row of an n-major B begins within 16 bytes: the other kernel serves."""
    a, b = integers(20, 16), integers(2, 16, 40, seed=1)
    launched = assert_same_on_both(lambda: grouped_gemm_op(a, b, ends(3, 20), activation="swiglu"))
    assert launched[-1] == "gemm_sm80_grouped"


def family(call) -> str:
    """The family of the product that `call` launches: its kernels sum in an order of their own."""
    call()
    (*_, last) = (launch.name for launch in launches() if launch.name.startswith("gemm_sm"))
    return last[: len("gemm_sm90")]


@pytest.mark.parametrize("k", [1, 7, 8, 20])
@pytest.mark.parametrize("n", [6, 8, 24])
def test_batch_invariant_groups_take_the_family_of_a_lone_product(k, n, capability):
    """Also where k, n or an address is no multiple of 16 bytes, so that operands are copied for TMA."""
    options, offs = {"batch_invariant": True}, ends(2, 6)
    a, b, x, y = integers(6, k), integers(2, k, n, seed=1), integers(k, 6, seed=2), integers(6, n, seed=3)
    with ak.backend("emulate"):
        for left, right in zip((*ways(a), *[a] * 5), (*[b] * 5, *ways(b)), strict=True):
            for activation in ("none", "swiglu"):
                options["activation"] = activation
                alone = family(lambda: gemm_op(left[:2], right[0], **options))  # noqa: B023
                assert family(lambda: grouped_gemm_op(left, right, offs, **options)) == alone  # noqa: B023
        options["activation"] = "none"
        for left, right in zip((*ways(x), *[x] * 5), (*[y] * 5, *ways(y)), strict=True):
            alone = family(lambda: gemm_op(left[:, 2:6], right[2:6], **options))  # noqa: B023
            assert family(lambda: grouped_gemm_op(left, right, offs, **options)) == alone  # noqa: B023


def test_sizes_of_zero(capability):
    a, b = integers(12, 8), integers(2, 8, 16)
    for tensors in ((a[:, :0], b[:, :0]), (a[:0], b), (a, b[..., :0])):
        offs = ends(0, 0) if len(tensors[0]) == 0 else ends(3, 9)
        bias = torch.ones(2, tensors[1].shape[-1])
        assert_same_on_both(lambda t=tensors, offs=offs, bias=bias: grouped_gemm_op(*t, offs, bias, preact=True))
    assert_same_on_both(lambda: grouped_gemm_op(a, b[:0], ends(), preact=True))
    c = torch.full((2, 12, 16), 7.0)
    for columns in (16, 12):
        empty = integers(0, columns), ends(0, 0)
        assert_same_on_both(lambda empty=empty: grouped_gemm_op(a[:, :0], *empty))
        for overwrite in (False, True):
            assert_same_on_both(
                lambda c, empty=empty, overwrite=overwrite: grouped_gemm_accumulate_op(
                    c, a[:, :0], *empty, overwrite=overwrite
                ),
                c[..., :columns].clone(),
            )


def test_ends_are_read_on_the_device_alone(capability):
    """Bad ones raise nothing there; each is clamped to [previous end, T]."""
    a, b = integers(12, 8), integers(3, 8, 16, seed=1)
    with ak.backend("emulate"):
        got = grouped_gemm_op(a, b, ends(-4, 50, 2))[0]
    with ak.backend("cpu"):
        assert torch.equal(got, grouped_gemm_op(a, b, ends(0, 12, 12))[0])
