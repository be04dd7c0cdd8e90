"""The Triton GEMM compiled for GPUs that are not there: Tensor Cores, wide copies, registers and shared memory; and the choice of
configurations."""

import itertools

import pytest
import torch

from amp_kernels import _autotune
from amp_kernels._autotune import GemmConfig, gemm_config
from amp_kernels._triton import _gemm, activation_backward

from . import aot

ARCHS = {80: (8, 0), 90: (9, 0), 100: (10, 0)}
DTYPES = (torch.float16, torch.bfloat16)
CP_ASYNC = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], "
TENSOR_CORE = {80: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}

#: name -> (output dtype or None, arguments of _gemm.run, whether it is a full epilogue)
EPILOGUES = {
    "plain": (None, {}, False),
    "relu_fp32": (torch.float32, {"activation": "relu", "bias": torch.float32}, False),
    "gelu": (None, {"activation": "gelu", "bias": torch.float32}, True),
    "silu_preact": (None, {"activation": "silu", "bias": torch.float32, "preact": True}, True),
    "accumulate": (torch.float32, {"alpha": 0.5, "beta": 1.0}, True),
}


def matrix(rows, columns, dtype, layout):
    if layout == "column":
        return torch.empty(columns, rows, dtype=dtype).t()
    return torch.empty(rows, columns, dtype=dtype)


def compile_gemm(
    arch, config, *, dtype=torch.float16, layouts=("row", "column"), sizes=(256, 512, 384), epilogue="plain", **more
):
    m, n, k = sizes
    out_dtype, arguments, _ = EPILOGUES[epilogue]
    arguments = arguments | more
    c = torch.empty(m, n, dtype=out_dtype or dtype)
    if "bias" in arguments:
        arguments["bias"] = torch.empty(n, dtype=arguments["bias"])
    if "preact" in arguments:
        arguments["preact"] = torch.empty_like(c)
    with aot.compiling_for(arch) as kernels:
        _gemm.run(c, matrix(m, k, dtype, layouts[0]), matrix(k, n, dtype, layouts[1]), config=config, **arguments)
    return kernels[0]


def check_fits(kernel, arch):
    used = aot.usage(kernel)
    assert used.stack <= 16, f"{used}: spilled registers"  # a word or two may go to let one more block reside
    assert used.shared <= aot.SHARED_LIMIT[arch], used


def classes():
    """Every configuration of every architecture and access width with each class of epilogue that may use it."""
    for arch, capability in ARCHS.items():
        chip = _autotune.chip(capability)
        for vec, size in ((8, 0), (2, 2), (1, 1)):
            for config in _autotune._BY_ACCESS.get(vec, chip.candidates):
                limit = chip.full_epilogue if vec == 8 else 32
                for name, (_, _, full) in EPILOGUES.items():
                    if not full or config.accumulators <= limit:
                        yield arch, (256 + size, 512 + size, 384 + size), config, name


CLASSES = list(classes())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_every_configuration_fits(number):
    arch, sizes, config, epilogue = CLASSES[number]
    layouts = list(itertools.product(("row", "column"), repeat=2))[number % 4]
    kernel = compile_gemm(arch, config, sizes=sizes, dtype=DTYPES[number // 4 % 2], layouts=layouts, epilogue=epilogue)
    check_fits(kernel, arch)
    assert aot.count(TENSOR_CORE[arch], kernel) > 0


@pytest.mark.parametrize("layouts", list(itertools.product(("row", "column"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("arch", ARCHS)
def test_aligned_operands_are_copied_16_bytes_at_a_time(arch, layouts):
    """Sizes that are multiples of 8, but not of 16, which is all that Triton looks for by itself."""
    sizes = (264, 520, 392)
    config = gemm_config(8192, 8192, 8192, capability=ARCHS[arch])
    kernel = compile_gemm(arch, config, layouts=layouts, sizes=sizes)
    check_fits(kernel, arch)
    assert aot.count(TENSOR_CORE[arch], kernel) > 0
    assert aot.count(r"ld\.global", kernel) == 0
    assert aot.count(r"st\.global\.v4\.b32", kernel) == aot.count(r"st\.global", kernel) > 0
    if arch == 90:
        assert config.tma
        assert aot.count(r"cp\.async\.bulk\.tensor\.3d", kernel) >= 2 * (config.num_stages - 1)
        assert aot.count(CP_ASYNC, kernel) == 0
    else:
        assert aot.count(CP_ASYNC + "0x10", kernel) == aot.count(CP_ASYNC, kernel) > 0


@pytest.mark.parametrize(("odd", "size"), [(4, "0x8"), (2, "0x4")])
@pytest.mark.parametrize("layouts", [("row", "column"), ("column", "row")], ids="-".join)
def test_less_aligned_operands_are_still_copied_asynchronously(odd, size, layouts):
    sizes = tuple(x + odd for x in (256, 512, 384))
    kernel = compile_gemm(90, gemm_config(8192, 8192, 8192, vec=odd, capability=(9, 0)), layouts=layouts, sizes=sizes)
    assert aot.count(CP_ASYNC + size, kernel) == aot.count(CP_ASYNC, kernel) > 0
    assert aot.count(r"wgmma\.mma_async", kernel) > 0


def test_results_are_rounded_to_nearest_even():
    for dtype, name in zip(DTYPES, ("f16x2", "bf16x2"), strict=True):
        kernel = compile_gemm(80, GemmConfig(64, 64, 32, 4, 3), dtype=dtype)
        assert aot.count(rf"cvt\.rn\.{name}\.f32", kernel) > 0
        assert aot.count(r"cvt\.rz", kernel) == 0


def test_without_beta_c_is_not_read():
    config = GemmConfig(64, 64, 32, 4, 3)
    assert aot.count(r"ld\.global", compile_gemm(80, config, epilogue="accumulate", beta=None)) == 0
    assert aot.count(r"ld\.global\.v4", compile_gemm(80, config, epilogue="accumulate")) > 0


def test_sizes_do_not_multiply_kernels():
    """Another M, N or K of the same alignment runs the same kernel."""
    config = GemmConfig(64, 64, 32, 4, 3)
    first = compile_gemm(80, config, sizes=(256, 512, 384))
    assert compile_gemm(80, config, sizes=(264, 520, 392)) is first
    assert compile_gemm(80, config, sizes=(257, 512, 384)) is first


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activation_backward_is_memory_bound_code(arch, activation):
    """Inner tiles load and store 16 bytes at a time, for any number of elements."""
    x = torch.empty(255, 513, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        activation_backward.launch(x, x, activation=activation)
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == 2
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == 1
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 128, "two blocks of 256 threads must fit an SM"


# ---- the choice of a configuration

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LIMIT = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("vec", [1, 2, 4, 8])
@pytest.mark.parametrize("full_epilogue", [False, True])
def test_choices_are_legal(capability, vec, full_epilogue):
    for m, n, k in itertools.product([1, 65, 512, 8192, 200704], [1, 16, 576, 28672], [0, 13, 4096, 500000]):
        config = gemm_config(m, n, k, vec=vec, capability=capability, full_epilogue=full_epilogue)
        assert config.shared_bytes + 1024 <= LIMIT.get(capability, 101_376)
        assert config.accumulators <= (64 if full_epilogue else 128)
        if capability >= (9, 0) and max(config.block_m, config.block_n) >= 128:
            assert config.num_warps >= 8, "Triton miscompiles 128-wide tiles of 4 warps on Hopper"
        assert config.tma == (capability == (9, 0) and vec == 8)
        for size in (config.block_m, config.block_n, config.block_k):
            assert 16 <= size <= 256
            assert size & (size - 1) == 0


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((8192, 6144, 4096), (128, 256)),  # much of everything: the largest tile
        ((8192, 28672, 4096), (128, 256)),
        ((200704, 64, 576), (128, 64)),  # a narrow result: no wider tile than that
        ((8192, 16, 4096), (64, 16)),
        ((512, 512, 512), (64, 32)),  # too few tiles of any size: the smallest one fills most multiprocessors
    ],
)
def test_choices_on_hopper(sizes, tile):
    config = gemm_config(*sizes, capability=(9, 0))
    assert (config.block_m, config.block_n) == tile


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", list(itertools.product(("row", "column"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("size", [(256, 512, 384), (250, 510, 390), (257, 511, 383)], ids=str)
def test_every_configuration_computes_exactly(layouts, size):
    """Small integers in every tile shape that this GPU may be given: the result is exact, so one lost product shows."""
    m, n, k = size
    capability = torch.cuda.get_device_capability()
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype, vec in itertools.product(DTYPES, (8, 2, 1)):
        a, b = (matrix(*shape, dtype, layout).cuda() for shape, layout in zip(((m, k), (k, n)), layouts, strict=True))
        for operand in (a, b):
            operand.copy_(torch.randint(-2, 3, operand.shape, generator=generator, device="cuda"))
        expected = a.double() @ b.double()
        for config in _autotune._BY_ACCESS.get(vec, _autotune.chip(capability).candidates):
            c = torch.full((m, n), torch.nan, device="cuda")
            _gemm.run(c, a, b, config=config)
            assert torch.equal(c.double(), expected), config
            again = torch.empty_like(c)
            _gemm.run(again, a, b, config=config)
            assert torch.equal(c, again), config


@pytest.mark.gpu
def test_more_than_2_to_31_elements_on_a_gpu():
    a = torch.zeros(2**17 + 64, 2**14 + 8, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    a[-1] = 1
    b = torch.ones(2**14 + 8, 32, dtype=torch.bfloat16, device="cuda")
    c = torch.empty(2**17 + 64, 32, device="cuda")
    _gemm.run(c, a, b)
    assert (c[-1] == 2**14 + 8).all()
    assert (c[:-1] == 0).all()
