"""The Triton GEMM compiled for GPUs that are not there: Tensor Cores, wide copies, registers and shared memory. On a GPU, exact sums."""

import inspect
import itertools

import pytest
import torch

from amp_kernels._triton import gemm
from amp_kernels._triton.gemm import LARGE, SMALL
from tools.sass.main_loop import main_loop

from . import aot

DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = list(itertools.product(("row", "column"), repeat=2))
CP_ASYNC = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], "
TENSOR_CORE = {
    80: r"mma\.sync\.aligned\.m16n8k16",
    90: r"wgmma\.mma_async",
    100: r"tcgen05\.mma",
    120: r"mma\.sync\.aligned\.m16n8k16",
}
#: Arguments of gemm.run, with dtypes for tensors; None is that of the operands.
EPILOGUES = {
    "plain": {},
    "accumulate": {"c": torch.float32, "alpha": 0.5, "residual": "c"},
    "chained": {"c": torch.float32, "residual": "c", "chained": True},
    "gelu": {"activation": "gelu", "bias": torch.float32, "residual": None},
}


def matrix(rows, columns, dtype, layout="row"):
    return (
        torch.empty(columns, rows, dtype=dtype).t() if layout == "column" else torch.empty(rows, columns, dtype=dtype)
    )


def compile_gemm(
    arch, tile, *, dtype=torch.bfloat16, layouts=("row", "column"), sizes=(272, 528, 400), epilogue="plain", **more
):
    """Sizes that are multiples of 16, but not of 32 or of a tile."""
    m, n, k = sizes
    options = EPILOGUES[epilogue] | more
    c = matrix(m, n, options.pop("c", None) or dtype)
    make = {
        "bias": lambda kind: torch.empty(n, dtype=kind or dtype),
        "residual": lambda kind: c if kind == "c" else matrix(m, n, kind or dtype),
    }
    options = {name: make[name](value) if name in make else value for name, value in options.items()}
    with aot.compiling_for(arch) as kernels:
        gemm.run(c, matrix(m, k, dtype, layouts[0]), matrix(k, n, dtype, layouts[1]), tile=tile, **options)
    (kernel,) = kernels
    return kernel


def sampled(cases, of):
    """One in so many; all of them in the exhaustive run."""
    return [case if i % of == 0 else pytest.param(*case, marks=pytest.mark.exhaustive) for i, case in enumerate(cases)]


def check_fits(kernel, arch):
    used = aot.usage(kernel)
    assert used.stack <= 16, f"{used}: spilled registers"  # a word or two may go to let one more block reside
    assert used.shared <= aot.SHARED_LIMIT[arch], used
    assert aot.count(r"\.f64", kernel) == 0, "a scalar argument became float64"  # Liger-Kernel#1358
    assert aot.count(r"\batom\b|\bred\b\.", kernel) == 0, "atomics add in another order each time"
    assert aot.count(TENSOR_CORE[arch], kernel) > 0


@pytest.mark.parametrize(
    ("arch", "tile", "epilogue", "layouts", "dtype"),
    sampled(itertools.product(TENSOR_CORE, (LARGE, SMALL), EPILOGUES, LAYOUTS, DTYPES), of=23),
)
def test_aligned_matrices_move_16_bytes_at_a_time(arch, tile, epilogue, layouts, dtype):
    kernel = compile_gemm(arch, tile, epilogue=epilogue, layouts=layouts, dtype=dtype)
    check_fits(kernel, arch)
    assert aot.count(CP_ASYNC + "0x10", kernel) == aot.count(CP_ASYNC, kernel) > 0
    assert aot.count(r"ld\.global", kernel) == aot.count(r"ld\.global\.v4\.b32", kernel)
    assert aot.count(r"st\.global", kernel) == aot.count(r"st\.global\.v4\.b32", kernel) > 0
    assert (aot.count(r"ld\.global", kernel) > 0) == (epilogue != "plain")


@pytest.mark.parametrize(
    ("arch", "epilogue", "layouts"), sampled(itertools.product(TENSOR_CORE, EPILOGUES, LAYOUTS), of=9)
)
def test_the_tile_of_odd_sizes_fits(arch, epilogue, layouts):
    sizes = (257, 511, 383)
    check_fits(
        compile_gemm(arch, gemm.tile_of(*sizes, 10**6, False), sizes=sizes, layouts=layouts, epilogue=epilogue), arch
    )


@pytest.mark.parametrize(
    ("tile", "epilogue", "layouts"), sampled(itertools.product((LARGE, SMALL), EPILOGUES, LAYOUTS), of=9)
)
def test_one_wait_a_step(tile, epilogue, layouts):
    """ptxas serialises wgmma, a wait after each, where anything but a product defines the accumulators."""
    loop = main_loop(aot.machine_code(compile_gemm(90, tile, epilogue=epilogue, layouts=layouts)))
    assert len(loop.products) > 1
    assert sum("gsb0" in product.operands for product in loop.products) == 1
    assert len(loop.waits) <= 1


def test_results_are_rounded_to_nearest_even():
    for dtype, name in zip(DTYPES, ("f16", "bf16"), strict=True):
        kernel = compile_gemm(80, SMALL, dtype=dtype)
        assert aot.count(rf"cvt\.rn\.{name}(x2)?\.f32", kernel) > 0
        assert aot.count(r"cvt\.rz", kernel) == 0


def test_an_empty_sum_compiles():
    """As the weight's gradient of an empty batch is one."""
    for layouts in LAYOUTS:
        compile_gemm(90, SMALL, layouts=layouts, sizes=(64, 128, 0))


def test_sizes_do_not_multiply_kernels():
    """Another M, N or K of the same alignment runs the same kernel."""
    assert compile_gemm(80, SMALL) is compile_gemm(80, SMALL, sizes=(288, 560, 432))


def test_the_kernel_stays_small():
    assert len(gemm.gemm_kernel.params) <= 20
    assert len(inspect.getsource(gemm).splitlines()) <= 400


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("size", [(256, 512, 384), (250, 510, 390), (257, 511, 383)], ids=str)
def test_every_tile_computes_exactly(layouts, size):
    """Small integers: the result is exact, so one lost product shows."""
    m, n, k = size
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype, tile in itertools.product(DTYPES, (LARGE, SMALL)):
        a, b = (matrix(*shape, dtype, layout).cuda() for shape, layout in zip(((m, k), (k, n)), layouts, strict=True))
        for operand in (a, b):
            operand.copy_(torch.randint(-2, 3, operand.shape, generator=generator, device="cuda"))
        c = torch.full((m, n), torch.nan, device="cuda")
        gemm.run(c, a, b, tile=tile)
        assert torch.equal(c.double(), a.double() @ b.double()), tile


@pytest.mark.gpu
def test_more_than_2_to_31_elements_on_a_gpu():
    a = torch.zeros(2**17 + 64, 2**14 + 8, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    a[-1] = 1
    b = torch.ones(2**14 + 8, 32, dtype=torch.bfloat16, device="cuda")
    c = torch.empty(2**17 + 64, 32, device="cuda")
    gemm.run(c, a, b)
    assert (c[-1] == 2**14 + 8).all()
    assert (c[:-1] == 0).all()
