"""``AMP_KERNELS_BACKEND=emulate``: CUDA kernels on CPU tensors through the op, bit for bit like the CPU backend."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..ops import raw

OPS = [op for _, op in sorted(REGISTRY.items()) if not op.composite]


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


# Compared within bounds by tests/registration/test_opcheck.py: sums in another order (test_gemm_backend.py), the hardware's exp2.
OTHER_BITS = [
    op
    for op in OPS
    if op.name.startswith(
        (
            "column_sums",
            "gemm",
            "grouped_gemm",
            "segmented_gemm",
            "norm_",
            "rotary_",
            "cross_entropy",
            "spread_rows",
            "embedding_accumulate",
            "lamb_half",
        )
    )
]


@pytest.mark.parametrize("op", [op for op in OPS if op not in OTHER_BITS], ids=lambda op: op.name)
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
        torch.testing.assert_close([*tensors(result)], [*tensors(expected)], rtol=0, atol=0, equal_nan=True)


def test_environment_variable_selects_it(monkeypatch):
    """Seen in an error that only the emulated op can raise."""
    monkeypatch.setitem(os.environ, "AMP_KERNELS_BACKEND", "emulate")
    sum_sq, found_inf = ak._raw.check_and_norm.check_and_norm([torch.full((100,), 3.0)])
    assert (sum_sq.item(), found_inf.item()) == (900.0, 0.0)
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", "ninety")
    with pytest.raises(RuntimeError, match=r"'ninety'; accepted: a compute capability such as 9\.0"):
        raw.gemm(torch.ones(2, 2).half(), torch.ones(2, 2).half())
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SMS", "0")
    with pytest.raises(RuntimeError, match="'0'; accepted: a number of multiprocessors, at least 1"):
        raw.gemm(torch.ones(2, 2).half(), torch.ones(2, 2).half())


def test_an_error_can_be_replayed(monkeypatch):
    """Here a race: below autograd's keys no raw op looks for tensors that share memory."""
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SEED", "7")
    grad, found_inf, factor = torch.ones(8), torch.zeros(()), torch.ones(())
    message = r"unscale_: kernel unscale, seed 7: CTA \d, warp 0 .*: race.*'grads\[0\]'"
    with pytest.raises(RuntimeError, match=message), torch._C._AutoDispatchBelowADInplaceOrView():
        REGISTRY["unscale_"].emulated([grad, grad], found_inf, factor)


def test_calls_from_several_threads_take_turns():
    with ak.backend("emulate"), ThreadPoolExecutor(4) as pool:
        calls = pool.map(lambda n: ak._raw.check_and_norm.check_and_norm([torch.ones(n)])[0].item(), range(1, 40))
        assert list(calls) == list(range(1, 40))
