"""``AMP_KERNELS_BACKEND=emulate``: CUDA kernels on CPU tensors through the op, bit for bit like the CPU backend."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._dispatch.load import PACKAGE

EMULATED = sorted(path.stem for path in (PACKAGE / "_emulate").glob("*.py") if not path.stem.startswith("_"))
OPS = [op for name, op in sorted(REGISTRY.items()) if name.strip("_") in EMULATED]


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def test_the_list_is_not_empty():
    assert {"check_and_norm", "unscale_", "update_scale_", "adamw_", "lamb_", "lion_", "sgd_"} <= {
        op.name for op in OPS
    }


GEMM = [op for op in OPS if op.name.startswith("gemm")]  # tests/emulator/test_gemm_backend.py: sums in another order


@pytest.mark.parametrize("op", [op for op in OPS if op not in GEMM], ids=lambda op: op.name)
@pytest.mark.parametrize("seed", [0, 5])
def test_same_bits_as_the_cpu_kernel(op, seed, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SEED", str(seed))
    for (args, kwargs), (cpu_args, cpu_kwargs) in zip(op.samples("cpu"), op.samples("cpu"), strict=True):
        with torch.no_grad(), ak.backend("emulate"):
            result = op(*args, **kwargs)
        with torch.no_grad(), ak.backend("cpu"):
            expected = op(*cpu_args, **cpu_kwargs)
        if result is None:
            result, expected = (args, kwargs.values()), (cpu_args, cpu_kwargs.values())
        for got, want in zip(tensors(result), tensors(expected), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


GRADS = st.lists(
    st.tuples(
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
        st.integers(0, 300),  # elements
        st.integers(0, 9),  # in front of the first one: views of any alignment
        st.booleans(),  # an infinite element
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(grads=GRADS, scale=st.sampled_from([None, 1.0, 3.0, 2.0**16]), seed=st.integers(0, 11))
def test_check_and_norm_of_any_list(grads, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    views = []
    for dtype, numel, offset, broken in grads:
        storage = torch.full(
            (offset + numel + 16,), torch.nan, dtype=dtype
        )  # what stands around the view must not count
        views.append(storage[offset : offset + numel].copy_(torch.randn(numel, generator=generator)))
        if broken and numel:
            views[-1][numel // 2] = torch.inf
    with pytest.MonkeyPatch.context() as patch, ak.backend("emulate"):
        patch.setenv("AMP_KERNELS_EMULATE_SEED", str(seed))
        got = ak.ops.check_and_norm.check_and_norm(views, None if scale is None else torch.tensor(scale))
    values = [view.double() / (scale or 1.0) for view in views]
    expected = torch.stack([value.square().sum() for value in values]).sum().float()
    torch.testing.assert_close(got[0], expected, rtol=1e-6, atol=0, equal_nan=True)
    assert got[1].item() == float(any(not value.isfinite().all() for value in values))


def test_environment_variable_selects_it(monkeypatch):
    import amp_kernels._emulate.check_and_norm as emulated

    calls = []
    real = emulated.launch
    monkeypatch.setattr(emulated, "launch", lambda *args, **options: calls.append(args) or real(*args, **options))
    monkeypatch.setitem(os.environ, "AMP_KERNELS_BACKEND", "emulate")
    sum_sq, found_inf = ak.ops.check_and_norm.check_and_norm([torch.full((100,), 3.0)])
    assert (len(calls), sum_sq.item(), found_inf.item()) == (1, 900.0, 0.0)


def test_an_access_out_of_bounds_is_an_error_that_can_be_replayed(monkeypatch):
    from amp_kernels import _emulator

    monkeypatch.setenv("AMP_KERNELS_EMULATE_SEED", "7")
    grad, out = torch.zeros(8), torch.empty(2)
    pieces = [("grad", grad.data_ptr(), 32, True), ("out", out.data_ptr(), 8, False)]
    _emulator.set_options(seed=7)
    with pytest.raises(
        RuntimeError, match=r"kernel check_and_norm, seed 7: CTA 0, warp 0 .*, load: out of bounds: .*'grad'"
    ):
        _emulator.check_and_norm(pieces, [(grad.data_ptr(), 9, 2)], 0, out.data_ptr(), out.data_ptr() + 4, False, False)
