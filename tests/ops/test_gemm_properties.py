"""gemm over any combination of shape, layout, dtype and epilogue, within the bound of the arithmetic."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels._raw._product import output_shape
from amp_kernels.testing.bounds import assert_within, reference_and_bound
from amp_kernels.testing.generators import HALF_DTYPES, LAYOUTS, OUT_DTYPES, operand

from .raw import gemm


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_shape_layout_dtype_and_epilogue(data):
    sizes = st.integers(0, 40)
    m, n, k = (data.draw(sizes, label=name) for name in "mnk")
    batch = data.draw(st.sampled_from([(), (1,), (3,)]), label="batch")
    dtype = data.draw(st.sampled_from(HALF_DTYPES), label="dtype")
    out_dtype = data.draw(st.sampled_from(OUT_DTYPES), label="out_dtype")
    layouts = [data.draw(st.sampled_from(list(LAYOUTS)), label="layout") for _ in "ab"]
    bias_dtype = data.draw(st.sampled_from([None, dtype, torch.float32]), label="bias")
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)), label="activation")
    n += n % 2 if activation in GATED else 0
    residual_dtype = data.draw(st.sampled_from([None, dtype, torch.float32]), label="residual")
    alpha = data.draw(st.sampled_from([1.0, -0.5, 3.0]), label="alpha")
    beta = data.draw(st.sampled_from([1.0, 0.0, -2.5]), label="beta")
    options = {"alpha": alpha, "beta": beta, "batch_invariant": data.draw(st.booleans(), label="batch_invariant")}
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    a = operand(*batch, m, k, dtype=dtype, generator=generator, layout=layouts[0])
    b = operand(*batch, k, n, dtype=dtype, generator=generator, layout=layouts[1])
    bias = residual = None
    if bias_dtype is not None:
        rows = data.draw(st.booleans(), label="row bias")
        bias = torch.randn((m, 1) if rows else (n,), generator=generator).to(bias_dtype)
    if residual_dtype is not None:
        layout = data.draw(st.sampled_from(list(LAYOUTS)), label="residual layout")
        shape = output_shape(a, b, activation)
        residual = operand(*shape, dtype=residual_dtype, generator=generator, layout=layout)
    z, z_bound = reference_and_bound(a, b, bias, alpha=alpha, out_dtype=out_dtype)
    reference, bound = reference_and_bound(
        a, b, bias, activation=activation, out_dtype=out_dtype, alpha=alpha, beta=beta, c=residual
    )
    out = gemm(a, b, bias, residual, activation=activation, out_dtype=out_dtype, **options)
    assert_within(out, reference, bound, "gemm")
    out, preact = gemm(a, b, bias, residual, activation=activation, out_dtype=out_dtype, **options, preact=True)
    assert_within(out, reference, bound, "preact")
    assert_within(preact, z, z_bound, "z")
