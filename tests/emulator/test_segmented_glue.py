"""The host code of products whose A is several matrices, on the emulator: read in place or concatenated, with the bits of a
concatenation in either case, in any order of summation."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host
from amp_kernels._raw.gemm import gemm_accumulate_op, gemm_op
from amp_kernels._raw.segmented_gemm import accumulate_op, joined, op

from ..helpers.emulator import launches
from ..helpers.generators import HALF_DTYPES, normal

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _emulated():
    with ak.backend("emulate"):
        yield


def gradients(rows, sizes, dtype=bf16):
    return [normal(rows, size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


def copies(call):
    with torch.profiler.profile() as profile:
        call()
    return sum(event.name == "aten::copy_" for event in profile.events())


def check(parts, dim, columns=72, out_dtype=None, dtype=bf16):
    """The number of copies; results are those of the concatenation to the bit."""
    a = joined(parts, dim)
    b, found = normal(a.shape[1], columns, dtype=dtype, seed=9), []
    made = copies(lambda: found.append(op(parts, b, dim=dim, out_dtype=out_dtype)))
    ran = launches()
    assert torch.equal(found[0], gemm_op(a, b, out_dtype=out_dtype)[0])
    assert ran == launches()
    if dim == 0:
        for overwrite in (False, True):
            c = torch.full(found[0].shape, torch.nan if overwrite else 3.0)
            want = c.clone()
            assert copies(lambda c=c, o=overwrite: accumulate_op(c, parts, b, overwrite=o)) == made
            gemm_accumulate_op(want, a, b, beta=float(not overwrite))
            assert torch.equal(c, want)
    return made


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("sizes", [(64, 128), (192, 64, 64), (64, 128, 40)])
def test_segments_are_read_where_they_lie(sizes, dtype, capability):
    for out_dtype in (None, f32):
        parts = gradients(300, sizes, dtype)
        lie = 0 if capability == "9.0" else len(sizes)
        assert check(parts, 1, out_dtype=out_dtype, dtype=dtype) == lie
        assert check([t.t() for t in parts], 0, out_dtype=out_dtype, dtype=dtype) == lie


def test_rows_apart_and_odd_beginnings():
    first, second = gradients(130, (64, 64))
    wide = torch.full((130, 80), torch.nan, dtype=bf16)
    wide[:, 8:72] = second
    odd = torch.full((130 * 64 + 1,), torch.nan, dtype=bf16)[1:].view(130, 64)
    odd.copy_(first)
    for turned in (False, True):
        dim, of = (0, torch.t) if turned else (1, torch.clone)
        keep = torch.t if turned else (lambda t: t)
        assert check([keep(first), keep(wide[:, 8:72])], dim) == 0
        assert check([keep(odd), keep(first)], dim) > 0
        assert check([keep(first), keep(odd)], dim) > 0
        assert check([keep(wide[:, 7:71].nan_to_num()), of(first)], dim) >= 0
        assert check([keep(first), keep(gradients(130, (128,))[0][:, ::2])], dim) == 2


@pytest.mark.parametrize("begin", [0, 8])
def test_the_plan_is_that_of_the_concatenation(begin, monkeypatch):
    """Rows across lines of L2 would have another one."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SMS", "4")
    of_concatenation, of_first = (
        _host.plan_gemm(96, 128, 256, n_major_b=True, ld_a=ld, sm_count=4) for ld in (256, 72)
    )
    assert of_concatenation["tile"] != of_first["tile"]
    first, second = gradients(96, (64, 192))
    wide = torch.full((96, 72 if begin == 0 else 128), torch.nan, dtype=bf16)
    wide[:, begin : begin + 64] = first
    assert check([wide[:, begin : begin + 64], second], 1, columns=128) == 0


@pytest.mark.parametrize("sizes", [(64, 24, 64), (64, 64, 64, 64), (72,), (64, 60), (3, 0, 5), (64, 0, 64)])
def test_other_segments_are_concatenated(sizes):
    parts = gradients(130, sizes)
    assert check(parts, 1) == len(sizes)
    assert check([t.t() for t in parts], 0) == len(sizes)


def test_few_rows_and_unaligned_operands(monkeypatch):
    """Plans that exchange rows and columns, or repack an operand."""
    assert _host.plan_gemm(2, 256, 512, n_major_b=True, sm_count=4)["swapped"]
    with monkeypatch.context() as patch:
        patch.setenv("AMP_KERNELS_EMULATE_SMS", "4")
        assert check(gradients(2, (256, 256)), 1, columns=256) == 2
    assert check(gradients(1, (64, 128)), 1) == 2
    assert check(gradients(130, (64, 128)), 1, columns=67) == 2
    assert check([t.t() for t in gradients(0, (64, 64))], 0) == 2
    assert check([t.t() for t in gradients(64, (64, 64))], 0) == 0


def test_a_long_k_is_split(monkeypatch):
    """Parts that begin and end within segments."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SMS", "132")
    assert check(gradients(96, (2112, 64, 1984)), 1, columns=64) == 0
    assert check([t.t() for t in gradients(2048, (64, 64))], 0, columns=64) == 0


@pytest.mark.parametrize(
    ("a", "b", "dim", "message"),
    [
        ([], (4, 4), 1, "a is empty"),
        ([(4, 4), (4, 4)], (8, 4), 2, "dim is 2; accepted: 0 or 1"),
        ([(4, 4), (5, 4)], (8, 4), 1, r"a\[1\] must be a matrix with as many rows as a\[0\]; got shapes \(5, 4\) and \(4, 4\)"),
        ([(4, 4), (4, 5)], (4, 4), 0, "as many columns"),
        ([(4, 4), (4, 4)], (4, 4), 1, r"b must have shape \(8, N\); got \(4, 4\)"),
        ([(4, 4), (4, 4, 1)], (8, 4), 1, "must be a matrix"),
    ],
)  # fmt: skip
def test_errors(a, b, dim, message):
    a, b = [torch.zeros(shape, dtype=bf16) for shape in a], torch.zeros(b, dtype=bf16)
    for backend in ("emulate", "cpu"):
        with ak.backend(backend), pytest.raises(RuntimeError, match=message):
            op(a, b, dim=dim)
    with pytest.raises(RuntimeError, match=r"a\[1\] must have dtype"):
        op([torch.zeros(4, 4, dtype=bf16), torch.zeros(4, 4, dtype=f16)], torch.zeros(8, 4, dtype=bf16), dim=1)
    with pytest.raises(RuntimeError, match="c must have shape"):
        accumulate_op(torch.zeros(4, 4), [torch.zeros(4, 4, dtype=bf16)] * 2, torch.zeros(4, 4, dtype=bf16))
