"""The Triton GEMM compiled for GPUs that are not there: Tensor Cores, wide copies, registers and shared memory; and the choice of
configurations."""

import itertools
from dataclasses import replace

import pytest
import torch

from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._triton import _autotune, activation_backward, activation_forward, gemm
from amp_kernels._triton._autotune import GemmConfig, gemm_config

from ..build.main_loop import main_loop
from . import aot

ARCHS = {80: (8, 0), 90: (9, 0), 100: (10, 0)}
DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = list(itertools.product(("row", "column"), repeat=2))
CP_ASYNC = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], "
TENSOR_CORE = {80: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}

#: name -> (output dtype or None, arguments of gemm.run with dtypes for tensors, those of candidates). The last of each of the
#: kinds that candidates tells apart is the one that takes the most registers.
FULL, GATED = {"full_epilogue": True}, {"full_epilogue": True, "gated": True}
BIAS = {"bias": torch.float32}
EPILOGUES = {
    "plain": (None, {}, {}),
    "relu_fp32": (torch.float32, {"activation": "relu", **BIAS}, {}),
    "gelu": (None, {"activation": "gelu", **BIAS}, FULL),
    "accumulate": (torch.float32, {"alpha": 0.5, "residual": "c"}, FULL),
    "dact": (None, {"activation": "gelu", "backward": True, "preact": None, "sums": True}, FULL),
    "silu_preact_residual": (None, {"activation": "silu", "preact": None, "residual": torch.float32, **BIAS}, FULL),
    "swiglu": (None, {"activation": "swiglu", "preact": None, "residual": None, **BIAS}, GATED),
    "swiglu_dact": (
        None,
        {"activation": "swiglu", "backward": True, "preact": None, "sums": True},
        GATED | {"backward": True},
    ),
}


def matrix(rows, columns, dtype, layout):
    if layout == "column":
        return torch.empty(columns, rows, dtype=dtype).t()
    return torch.empty(rows, columns, dtype=dtype)


def compile_all(
    arch, config, *, dtype=torch.float16, layouts=("row", "column"), sizes=(256, 512, 384), epilogue="plain", **more
):
    """The kernels that one call of gemm.run launches."""
    m, n, k = sizes
    out_dtype, arguments, _ = EPILOGUES[epilogue]
    arguments = arguments | more
    gated, backward = arguments.get("activation") == "swiglu", "backward" in arguments
    out_dtype = out_dtype or dtype
    c = torch.empty(m, 2 * n if gated and backward else n, dtype=out_dtype)
    b_columns = 2 * n if gated and not backward else n
    make = {
        "bias": lambda kind: torch.empty(b_columns, dtype=kind),
        "preact": lambda kind: torch.empty(m, 2 * n if gated else n, dtype=kind or out_dtype),
        "residual": lambda kind: c if kind == "c" else torch.empty(m, n, dtype=kind or out_dtype),
        "sums": lambda kind: torch.empty(c.shape[1]),
    }
    arguments = {name: make[name](value) if name in make else value for name, value in arguments.items()}
    a, b = matrix(m, k, dtype, layouts[0]), matrix(k, b_columns, dtype, layouts[1])
    with aot.compiling_for(arch) as kernels:
        gemm.run(c, a, b, config=config, **arguments)
    return kernels


def compile_gemm(*args, **kwargs):
    return compile_all(*args, **kwargs)[0]


def check_fits(kernel, arch):
    used = aot.usage(kernel)
    assert used.stack <= 16, f"{used}: spilled registers"  # a word or two may go to let one more block reside
    assert used.shared <= aot.SHARED_LIMIT[arch], used
    assert aot.count(r"\.f64", kernel) == 0, "a scalar argument became float64"  # Liger-Kernel#1358


def classes():
    """Every configuration of every architecture and access width with each epilogue that may use it."""
    for arch, capability in ARCHS.items():
        for vec, size in ((8, 0), (2, 2), (1, 1)):
            for name, (_, _, kind) in EPILOGUES.items():
                for config in _autotune.candidates(capability, vec, **kind):
                    yield arch, (256 + size, 512 + size, 384 + size), config, name


CLASSES = list(classes())


@pytest.mark.parametrize(
    "number", [i if i % 9 == 0 else pytest.param(i, marks=pytest.mark.exhaustive) for i in range(len(CLASSES))]
)
def test_every_configuration_fits(number):
    arch, sizes, config, epilogue = CLASSES[number]
    layouts = LAYOUTS[number % 4]
    kernel = compile_gemm(arch, config, sizes=sizes, dtype=DTYPES[number // 4 % 2], layouts=layouts, epilogue=epilogue)
    check_fits(kernel, arch)
    assert aot.count(TENSOR_CORE[arch], kernel) > 0


ON_HOPPER = [(layouts, *rest) for arch, *rest in CLASSES if arch == 90 for layouts in LAYOUTS]


@pytest.mark.parametrize(
    "number", [i if i % 17 == 1 else pytest.param(i, marks=pytest.mark.exhaustive) for i in range(len(ON_HOPPER))]
)
def test_one_wait_a_step(number):
    """ptxas serialises wgmma, a wait after each, where anything but a product defines the accumulators."""
    layouts, sizes, config, epilogue = ON_HOPPER[number]
    loop = main_loop(aot.machine_code(compile_gemm(90, config, sizes=sizes, layouts=layouts, epilogue=epilogue)))
    assert len(loop.products) > config.b_tiles
    assert sum("gsb0" in product.operands for product in loop.products) == config.b_tiles
    assert len(loop.waits) <= config.b_tiles


@pytest.mark.parametrize("epilogue", ["plain", "accumulate", "silu_preact_residual", "swiglu_dact"])
def test_consumer_blackwell(epilogue):
    """It has the Tensor Cores of sm_80, and less shared memory."""
    config = _autotune.candidates((12, 0), 8, **EPILOGUES[epilogue][2])[0]
    kernel = compile_gemm(120, config, dtype=torch.bfloat16, epilogue=epilogue)
    check_fits(kernel, 120)
    assert aot.count(TENSOR_CORE[80], kernel) > 0


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
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
    if arch >= 90:
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
    assert aot.count(r"ld\.global", compile_gemm(80, config, epilogue="accumulate", beta=0.0)) == 0
    assert aot.count(r"ld\.global\.v4", compile_gemm(80, config, epilogue="accumulate")) > 0


@pytest.mark.parametrize("epilogue", ["silu_preact_residual", "swiglu", "swiglu_dact"])
@pytest.mark.parametrize("arch", ARCHS)
def test_epilogues_are_wide_and_deterministic(arch, epilogue):
    """Every matrix 16 bytes at a time; sums one number a thread. No atomics, which would add in another order each time."""
    _, arguments, kind = EPILOGUES[epilogue]
    config = gemm_config(8192, 8192, 8192, capability=ARCHS[arch], **kind)
    kernels = compile_all(arch, config, sizes=(264, 520, 392), epilogue=epilogue)
    kernels += compile_all(arch, GemmConfig(64, 64, 64, 4, 3, splits=2), sizes=(264, 520, 392), epilogue=epilogue)
    sums = "sums" in arguments
    names = [
        "gemm_kernel",
        *["column_sums_kernel"] * sums,
        "gemm_kernel",
        "finish_kernel",
        *["column_sums_kernel"] * sums,
    ]
    assert [kernel.name for kernel in kernels] == names
    for number, kernel in enumerate(kernels):
        check_fits(kernel, arch)
        assert aot.count(r"\batom\b|\bred\b\.", kernel) == 0
        if kernel.name == "column_sums_kernel":
            continue
        finishes = number == 0 or kernel.name == "finish_kernel"
        narrow_stores = aot.count(r"st\.global", kernel) - aot.count(r"st\.global\.v4\.b32", kernel)
        assert narrow_stores == (2 if sums and finishes else 0)
        loads = aot.count(r"ld\.global", kernel) - aot.count(r"ld\.global\.v4\.b32", kernel)
        assert loads == 0 or (finishes and "bias" in arguments)
    assert aot.count(TENSOR_CORE[arch], kernels[0]) > 0


@pytest.mark.parametrize("arch", [80, 90])
def test_both_tiles_of_b_are_multiplied_and_pipelined(arch):
    config = gemm_config(8192, 8192, 8192, capability=ARCHS[arch], gated=True, full_epilogue=True)
    assert config.b_tiles == 2
    kernel = compile_gemm(arch, config, epilogue="swiglu")
    plain = compile_gemm(arch, replace(config, b_tiles=1))
    assert aot.count(TENSOR_CORE[arch], kernel) == 2 * aot.count(TENSOR_CORE[arch], plain)
    stages = config.num_stages - (arch == 80)  # mma.sync reads the last one into registers before the next copy begins
    assert aot.usage(kernel).shared >= config.shared_bytes // config.num_stages * stages


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_an_empty_sum_compiles(layouts):
    """As the weight's gradient of an empty batch is one: no descriptor can describe nothing."""
    config = next(config for config in _autotune.candidates((9, 0), 8) if config.tma)
    assert "cp.async.bulk.tensor" not in compile_gemm(90, config, layouts=layouts, sizes=(64, 128, 0)).asm["ptx"]


def test_sizes_do_not_multiply_kernels():
    """Another M, N or K of the same alignment runs the same kernel."""
    config = GemmConfig(64, 64, 32, 4, 3)
    first = compile_gemm(80, config, sizes=(256, 512, 384))
    assert compile_gemm(80, config, sizes=(264, 520, 392)) is first
    assert compile_gemm(80, config, sizes=(257, 512, 384)) is first


@pytest.mark.parametrize("arch", [*ARCHS, 120])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activation_backward_is_memory_bound_code(arch, activation):
    """Inner tiles load and store 16 bytes at a time, for any number of elements; a gated one for whole groups of 16."""
    gated = activation == "swiglu"
    z = torch.empty(255, 1056 if gated else 513, dtype=torch.bfloat16)
    grad = torch.empty(255, 528, dtype=torch.bfloat16) if gated else z
    with aot.compiling_for(arch) as kernels:
        activation_backward.activation_backward(grad, z, activation=activation)
    copies = 2 if gated else 1  # such a row ends with a whole group, so its masks are as fine
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == copies * (2 + gated)
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == copies * (1 + gated)
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 128, "two blocks of 256 threads must fit an SM"


@pytest.mark.parametrize("arch", [*ARCHS, 120])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in ("none", "swiglu")])
def test_activation_backward_with_sums_is_memory_bound_code(arch, activation):
    """A thread of 128 takes 32 elements at a time."""
    z = torch.empty(255, 528, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        activation_backward.activation_backward(z, z, activation=activation, bias_grad=True)
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == 2 * 4
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == 4
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 168, "three blocks of 128 threads must fit an SM"


@pytest.mark.parametrize("arch", [*ARCHS, 120])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activation_forward_is_memory_bound_code(arch, activation):
    gated = activation == "swiglu"
    z = torch.empty(255, 1056 if gated else 513, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        activation_forward.activation_forward(z, activation=activation)
    copies = 2 if gated else 1
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == copies * (1 + gated)
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == copies
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 128


# ---- the choice of a configuration

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LIMIT = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448}


KINDS = ({}, FULL, GATED, GATED | {"backward": True})
SIZES = list(itertools.product([1, 65, 512, 8192, 200704], [1, 16, 576, 28672], [0, 13, 4096, 500000]))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_candidates_are_legal(capability, kind):
    for vec in (1, 2, 4, 8):
        configs = _autotune.candidates(capability, vec, **kind)
        assert configs
        for config in configs:
            assert config.shared_bytes + 1024 <= LIMIT.get(capability, 101_376)
            assert config.accumulators <= (64 if kind else 128)
            if capability >= (9, 0) and max(config.block_m, config.block_n) >= 128:
                assert config.num_warps >= 8, "Triton miscompiles 128-wide tiles of 4 warps on Hopper"
            assert config.tma == (capability in ((9, 0), (10, 0)) and vec == 8)
            assert config.splits == 1
            assert config.b_tiles == (2 if "gated" in kind and "backward" not in kind else 1)
            for size in (config.block_m, config.block_n, config.block_k):
                assert 16 <= size <= 256
                assert size & (size - 1) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_choices_are_candidates(capability, kind):
    """A split is one of a plain product, worth its second kernel and its memory; the same call gets the same answer."""
    for (m, n, k), vec in itertools.product(SIZES, (1, 8)):
        config = gemm_config.__wrapped__(m, n, k, vec=vec, capability=capability, **kind)
        assert config == gemm_config(m, n, k, vec=vec, capability=capability, **kind)
        if config.splits == 1:
            assert config in _autotune.candidates(capability, vec, **kind)
            continue
        assert replace(config, splits=1) in _autotune.candidates(capability, vec)
        assert k // (config.splits * config.block_k) >= 4
        assert config.splits * m * n * 4 <= 2**27, "bytes of partial sums"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batch_invariant_choices_depend_on_n_and_k_alone(capability, kind):
    for n, k in itertools.product([1, 256, 28672], [13, 65536]):
        choices = {
            gemm_config(m, n, k, batch=batch, capability=capability, batch_invariant=True, **kind)
            for m in (1, 300, 200704)
            for batch in (1, 64)
        }
        assert len(choices) == 1
        assert choices.pop().splits == 1


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ((256, 256, 65536), 16, 64),  # one tile, or four
        ((3072, 768, 65536), 2, 16),  # 72 tiles on 132 multiprocessors
        ((16, 4096, 14336), 2, 8),
        ((8192, 8192, 8192), 1, 1),
        ((512, 512, 512), 1, 1),  # too short
        ((8192, 16, 4096), 1, 1),  # tiles enough
    ],
)
def test_splits_on_hopper(sizes, least, most):
    assert least <= gemm_config(*sizes, capability=(9, 0)).splits <= most


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
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
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
        for whole, splits in itertools.product(_autotune.candidates(capability, vec), (1, 3)):
            config = replace(whole, splits=splits)
            c = torch.full((m, n), torch.nan, device="cuda")
            gemm.run(c, a, b, config=config)
            assert torch.equal(c.double(), expected), config
            again = torch.empty_like(c)
            gemm.run(again, a, b, config=config)
            assert torch.equal(c, again), config


@pytest.mark.gpu
def test_more_than_2_to_31_elements_on_a_gpu():
    a = torch.zeros(2**17 + 64, 2**14 + 8, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    a[-1] = 1
    b = torch.ones(2**14 + 8, 32, dtype=torch.bfloat16, device="cuda")
    c = torch.empty(2**17 + 64, 32, device="cuda")
    gemm.run(c, a, b)
    assert (c[-1] == 2**14 + 8).all()
    assert (c[:-1] == 0).all()
