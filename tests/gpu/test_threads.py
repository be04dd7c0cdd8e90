"""Ops called from several host threads: one that has not used the GPU before, and two that start the same kernels."""

import threading

import pytest
import torch

import amp_kernels as ak

from ..ops.raw import gemm

pytestmark = pytest.mark.gpu


def in_threads(*functions):
    """Runs each function in a new thread; their results in order, or the first error."""
    results: list = [None] * len(functions)

    def call(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def operands(m: int, n: int, k: int):
    generator = torch.Generator("cuda").manual_seed(m)
    a = torch.randint(-2, 3, (m, k), device="cuda", generator=generator).bfloat16()
    return a, torch.randint(-2, 3, (k, n), device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (255, 253, 251)])
def test_a_gemm_is_the_first_that_a_thread_does(m, n, k):
    """Tensor maps are encoded by the driver, which makes no context for a thread as the runtime does."""
    a, b = operands(m, n, k)
    with ak.backend("cuda"):
        expected = gemm(a, b)
        spare = gemm(a, b)
        del spare  # into the cache: then the thread's own allocation asks nothing of the driver
        torch.cuda.synchronize()
        (got,) = in_threads(lambda: gemm(a, b))
    assert torch.equal(got, expected)


def test_threads_that_start_one_kernel_with_different_shared_memory():
    """Odd rows take more of it than aligned ones: the limit that one thread sets must not be too low for the other."""
    aligned, odd = operands(512, 260, 516), operands(512, 259, 515)
    with ak.backend("cuda"):
        expected = [gemm(*aligned), gemm(*odd)]

        def many(pair):
            return [gemm(*pair) for _ in range(300)]

        results = in_threads(lambda: many(aligned), lambda: many(odd))
    for got, want in zip(results, expected, strict=True):
        assert all(torch.equal(one, want) for one in got)
