"""The choice of a backend is a pure function: every machine is tested here without having it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.policy import BackendUnavailable, Built, Choice, arch_runs, choose, requested_backend

FULL = Built(cpu=True, cuda=True, cuda_archs=("7.5", "8.0+PTX", "9.0a", "12.0+PTX"), triton=True, emulate=True)
PYTHON_ONLY = Built(triton=True, absent=(("cpu", "no compiler"), ("cuda", "nvcc was not found")))


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("7.5", (7, 5), True),
        ("7.5", (7, 0), False),  # older minor
        ("7.5", (8, 0), False),  # a cubin stays within its major version
        ("8.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("8.0+PTX", (7, 5), False),
        ("9.0a", (9, 0), True),
        ("9.0a", (9, 1), False),  # exactly that chip
        ("9.0a", (10, 0), False),
        ("9.0a+PTX", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("12.0+PTX", (12, 1), True),
        ("10.0", (12, 0), False),
    ],
)
def test_arch_runs(arch, capability, runs):
    assert arch_runs(arch, capability) is runs


@pytest.mark.parametrize(
    ("device", "capability", "built", "backend"),
    [
        ("cpu", None, FULL, "cpu"),
        ("cpu", None, PYTHON_ONLY, "reference"),
        ("cuda", (9, 0), FULL, "cuda"),
        ("cuda", (8, 6), FULL, "cuda"),
        ("cuda", (10, 0), FULL, "cuda"),  # PTX of 8.0
        ("cuda", (10, 0), Built(cuda=True, cuda_archs=("9.0a",), triton=True), "triton"),
        ("cuda", (9, 0), PYTHON_ONLY, "triton"),
        ("cuda", (7, 0), FULL, "reference"),  # V100: nvcc 13 cannot compile for it, Triton needs 8.0
        ("cuda", (7, 5), PYTHON_ONLY, "reference"),
        ("xpu", None, FULL, "reference"),
        ("meta", None, FULL, "reference"),
    ],
)
def test_automatic_choice(device, capability, built, backend):
    assert choose("gemm", device, capability, built).backend == backend


PRODUCTS = replace(FULL, tensor_cores=True, aten=True, cuda_archs=("8.0+PTX", "9.0a", "12.0+PTX"))


@pytest.mark.parametrize(
    ("capability", "backend", "own"),
    [
        ((7, 5), "aten", "reference"),
        ((8, 0), "cuda", "cuda"),
        ((8, 9), "cuda", "cuda"),
        ((9, 0), "cuda", "cuda"),
        ((10, 0), "aten", "triton"),  # tcgen05 is Triton's to write
        ((10, 3), "aten", "triton"),
        ((11, 0), "aten", "triton"),
        ((12, 0), "cuda", "cuda"),
        ((12, 1), "cuda", "cuda"),
        ((13, 0), "aten", "cuda"),  # the driver would compile mma.sync for it
    ],
)
def test_gemm_kernels_go_where_their_instructions_are(capability, backend, own):
    """Elsewhere torch's products are taken, unless the sums must be in the package's order."""
    choice = choose("gemm", "cuda", capability, PRODUCTS)
    assert (choice.backend, choice.slow) == (backend, False)
    assert backend != "aten" or "compute capability" in choice.reason or "tcgen05" in choice.reason
    assert choose("gemm", "cuda", capability, PRODUCTS, own=True).backend == own


@pytest.mark.parametrize("archs", [("8.0+PTX",), ("8.0+PTX", "12.0")], ids=str)
def test_hopper_without_its_kernels_takes_torchs_products(archs):
    choice = choose("gemm", "cuda", (9, 0), replace(PRODUCTS, cuda_archs=archs))
    assert choice.backend == "aten"
    assert "9.0a" in choice.reason


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (10, 0)])
def test_an_install_without_cuda_kernels_takes_torchs_products(capability):
    built = replace(PYTHON_ONLY, tensor_cores=True, aten=True)
    assert choose("gemm", "cuda", capability, built).backend == "aten"
    assert choose("gemm", "cuda", capability, built, "triton").backend == "triton"


def test_products_without_a_triton_kernel_are_torchs():
    """With Triton asked for, and for sums in a fixed order, which are then made of the op gemm."""
    built = replace(PYTHON_ONLY, triton=False, tensor_cores=True, aten=True)
    for capability in ((8, 6), (9, 0), (10, 0)):
        assert choose("gemm_dact", "cuda", capability, built, "triton") == Choice("aten", "asked for")
        assert choose("gemm_dact", "cuda", capability, built, own=True).backend == "aten"
    without = replace(built, absent=(("triton", "the package triton is not installed"),))
    with pytest.raises(BackendUnavailable, match="not installed"):
        choose("gemm_dact", "cuda", (9, 0), without, "triton")
    assert choose("gemm", "cuda", (9, 0), without, own=True).slow, "torch's product has no fixed order"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_aten_is_for_products_alone(device):
    capability = (10, 0) if device == "cuda" else None
    assert choose("gemm", device, capability, PRODUCTS, "aten") == Choice("aten", "asked for")
    assert choose("unscale_", device, capability, FULL, "aten").backend == device


def test_a_gemm_that_cannot_run_says_why():
    with pytest.raises(BackendUnavailable, match="needs compute capability 8"):
        choose("gemm", "cuda", (7, 5), replace(FULL, tensor_cores=True), "cuda")
    with pytest.raises(BackendUnavailable, match="tcgen05"):
        choose("gemm", "cuda", (10, 0), replace(FULL, tensor_cores=True), "cuda")


@pytest.mark.parametrize("op", ["cross_entropy_rows_", "norm_forward", "norm_backward", "unscale_"])
def test_rows_go_to_cuda_before_ampere(op):
    """It has no bf16: the kernels' conversions are arithmetic there (tests/ptx/test_forms.py). Triton's, which need its
    instructions, are not taken (Liger-Kernel#1316)."""
    assert choose(op, "cuda", (7, 5), FULL).backend == "cuda"
    assert choose(op, "cuda", (7, 5), PYTHON_ONLY).backend == "reference"
    with pytest.raises(BackendUnavailable):
        choose(op, "cuda", (7, 5), FULL, "triton")


def test_a_fall_to_the_reference_is_slow():
    assert choose("gemm", "cuda", (7, 0), FULL).slow
    assert choose("gemm", "cpu", None, PYTHON_ONLY).slow
    assert not choose("gemm", "cuda", (9, 0), PYTHON_ONLY).slow
    assert not choose("gemm", "cpu", None, FULL, "reference").slow


@pytest.mark.parametrize("backend", ["cpu", "reference", "emulate"])
def test_explicit_choice_is_kept_on_the_cpu(backend):
    assert choose("gemm", "cpu", None, FULL, backend) == Choice(backend, "asked for")


@pytest.mark.parametrize(
    ("device", "capability", "built", "requested", "said"),
    [
        ("cpu", None, FULL, "cuda", "the tensors are on cpu"),
        ("cpu", None, FULL, "triton", "the interpreter is off"),
        ("cuda", (9, 0), FULL, "cpu", "the tensors are on cuda"),
        ("cuda", (9, 0), FULL, "emulate", "the tensors are on cuda"),
        ("cuda", (9, 0), PYTHON_ONLY, "cuda", "nvcc was not found"),
        ("cuda", (7, 0), FULL, "cuda", "built for 7.5, 8.0+PTX, 9.0a, 12.0+PTX"),
        ("cuda", (7, 5), FULL, "triton", "Triton needs compute capability 8.0"),
        ("cuda", (9, 0), Built(cuda=True, cuda_archs=("9.0a",)), "triton", "this op has no Triton kernel"),
    ],
)
def test_explicit_choice_works_or_says_why(device, capability, built, requested, said):
    with pytest.raises(BackendUnavailable) as error:
        choose("gemm", device, capability, built, requested)
    for part in (repr(requested), "gemm", said, "Available here", "reference"):
        assert part in str(error.value)


_MATRIX = torch.ones(2, 2)
_PRODUCTS = {
    "matmul": lambda m: ak.matmul(m, m),
    "matmul(out=)": lambda m: ak.matmul(m, m, out=torch.empty_like(m)),
    "linear": lambda m: ak.linear(m, m),
    "linear(split=)": lambda m: ak.linear(m, m, split=[1, 1]),
    "mlp": lambda m: ak.mlp(m, m, None, m),
    "addmm": lambda m: ak.addmm(m, m, m),
    "baddbmm": lambda m: ak.baddbmm(m[None], m[None], m[None]),
    "grouped_mm": lambda m: ak.grouped_mm(m, m[None], offs=torch.tensor([2], dtype=torch.int32)),
    "linear_cross_entropy": lambda m: ak.linear_cross_entropy(m, m, torch.tensor([0, 1])),
    "syrk": ak.syrk,
}


@pytest.mark.own_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", _PRODUCTS)
def test_a_choice_that_cannot_be_served_is_refused_in_every_dtype(name, dtype, monkeypatch):
    """FP32 and float64 products are torch's, whatever backend serves the other ops."""
    product, m = _PRODUCTS[name], _MATRIX.to(dtype)
    with ak.backend("cuda"), pytest.raises(BackendUnavailable, match="'cuda' was asked for, but cpu cannot use it"):
        product(m)
    monkeypatch.setenv("AMP_KERNELS_BACKEND", "cudda")
    with pytest.raises(ValueError, match="backend 'cudda' is unknown; accepted: cpu, cuda, triton"):
        product(m)
    monkeypatch.setenv("AMP_KERNELS_BACKEND", "reference")
    product(m)


def test_interpreted_triton_runs_on_the_cpu():
    built = Built(cpu=True, triton=True, triton_interpreted=True)
    assert choose("gemm", "cpu", None, built, "triton").backend == "triton"
    assert choose("gemm", "cpu", None, built).backend == "cpu"


def test_unknown_backend():
    with pytest.raises(ValueError, match="'tpu' is unknown; accepted: cpu, cuda, triton, aten, reference, emulate"):
        choose("gemm", "cpu", None, FULL, "tpu")
    with pytest.raises(ValueError, match="name is 'tpu'"), ak.backend("tpu"):
        pass


def test_backend_block_beats_the_environment(monkeypatch):
    assert requested_backend() is None
    monkeypatch.setenv("AMP_KERNELS_BACKEND", "cpu")
    assert requested_backend() == "cpu"
    with ak.backend("reference"):
        assert requested_backend() == "reference"
        with ak.backend("triton"):
            assert requested_backend() == "triton"
        assert requested_backend() == "reference"
    assert requested_backend() == "cpu"


def test_backend_block_holds_in_the_threads_that_autograd_starts():
    with ThreadPoolExecutor(1) as pool, ak.backend("reference"):
        assert pool.submit(requested_backend).result() == "reference"
