"""Calls of torch.ops that gemm, gemm_dact and gemm_accumulate_ refuse before anything is computed, where no C++ kernel is registered;
the compiled kernels refuse them in their own words."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY

from .tensors import half

A, B, BF16 = half(2, 3), half(3, 4), torch.bfloat16
#: arguments, keyword arguments, error without a kernel, its message, whether the kernel is asked, too
GEMM = [
    ((A.float(), B), {}, TypeError, "a has dtype float32; accepted: float16, bfloat16", True),
    ((A, B.long()), {}, TypeError, "b has dtype int64", True),
    ((A, B.cfloat()), {}, TypeError, "b has dtype complex64", True),
    ((A, B.bfloat16()), {}, TypeError, "a is float16 and b is bfloat16", True),
    ((A.to_sparse(), B), {}, TypeError, "a has layout torch.sparse_coo", False),
    (([1.0], B), {}, TypeError, "a has type list; accepted: a tensor", False),
    ((half(3), B), {}, ValueError, r"a has shape \[3\]", True),
    ((A, half(1, 3, 2)), {}, ValueError, r"accepted: \[M, K\] and \[K, N\]", True),
    ((A, half(4, 2)), {}, ValueError, "must be as many", True),
    ((half(5, 2, 3), half(4, 3, 2)), {}, ValueError, "must be as many, and so must the batches", True),
    ((A, B.to("meta")), {}, ValueError, "b is on meta, but a is on cpu", False),
    ((A, B), {"activation": "tanh"}, ValueError, "activation is 'tanh'; accepted: None, 'none'", True),
    ((A, B), {"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64", True),
    ((A, B), {"out_dtype": torch.int32}, TypeError, "out_dtype is torch.int32", True),
    ((A, B, half(3)), {}, ValueError, r"bias has shape \[3\]; accepted: \[4\]", True),
    ((A, B, half(3, 1)), {}, ValueError, r"bias has shape \[3, 1\]; accepted: \[4\].*or \[2, 1\]", True),
    ((A, B, half(1, 4)), {}, ValueError, r"bias has shape \[1, 4\]", True),
    ((A, B, half(4).bfloat16()), {}, TypeError, "bias has dtype bfloat16", True),
    ((A, B, None, half(3, 4)), {}, ValueError, r"residual has shape \[3, 4\]; accepted: \[2, 4\]", True),
    ((A, B, None, half(1, 2, 4)), {}, ValueError, "residual has shape", True),
    ((A, B, None, half(2, 4)), {"activation": "swiglu"}, ValueError, r"residual .*; accepted: \[2, 2\]", True),
    ((A, B, None, half(2, 4).bfloat16()), {}, TypeError, "residual has dtype bfloat16", True),
    ((A, B, None, half(2, 4).double()), {}, TypeError, "residual has dtype float64", True),
    ((A, B, None, half(2, 4).to("meta")), {}, ValueError, "residual is on meta, but a is on cpu", False),
    ((A, B, None, 1.0), {}, TypeError, "residual has type float; accepted: a tensor", False),
    ((A, half(3, 3)), {"activation": "swiglu"}, ValueError, r"b has shape \[3, 3\]; .* an even size 4 or 2", True),
]
Z, RELU = half(2, 4), {"activation": "relu"}
GEMM_DACT = [
    ((A, B.bfloat16(), Z), RELU, TypeError, "the same dtype for both", True),
    ((A, B, half(2, 3)), RELU, ValueError, r"preact has shape \[2, 3\]; .*: \[2, 4\]", True),
    ((A, B, half(1, 2, 4)), RELU, ValueError, "preact has shape", True),
    ((A, B, Z), {"activation": "swiglu"}, ValueError, r"activation='swiglu': \[2, 8\]", True),
    ((A, B, Z.bfloat16()), RELU, TypeError, "preact has dtype bfloat16", True),
    ((A, B, Z.to("meta")), RELU, ValueError, "preact is on meta", False),
    ((A, B, Z), {"activation": "mish"}, ValueError, "activation is 'mish'", True),
    ((A, B, Z), {**RELU, "out_dtype": torch.float64}, TypeError, "out_dtype is", True),
]
GEMM_ACCUMULATE = [
    ((Z, A, B), {}, TypeError, "c has dtype float16", True),
    ((torch.zeros(2, 3), A, B), {}, ValueError, r"c has shape \[2, 3\]", True),
]
CASES = [
    (name, *row)
    for name, rows in (("gemm", GEMM), ("gemm_dact", GEMM_DACT), ("gemm_accumulate_", GEMM_ACCUMULATE))
    for row in rows
]


@pytest.mark.parametrize(("name", "args", "kwargs", "error", "message", "kernel"), CASES)
def test_bad_input(name, args, kwargs, error, message, kernel):
    with pytest.raises(error, match=message):
        REGISTRY[name]._without_cpp_kernel(*args, **kwargs)
    for namespace in ("amp_kernels", "amp_kernels_emulated") if kernel else ():
        with pytest.raises(RuntimeError, match=rf"^{name}: "):
            getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)
