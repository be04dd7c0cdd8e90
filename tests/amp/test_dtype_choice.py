"""The format rule, on the GPUs people have, without any of them."""

import pytest
import torch

from amp_kernels.amp import advise, decide, recommended_dtype


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "dtype", "scaler"),
    [
        ("NVIDIA H200", (9, 0), True, torch.bfloat16, False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), True, torch.bfloat16, False),
        ("NVIDIA GeForce RTX 4090", (8, 9), True, torch.bfloat16, False),
        ("NVIDIA B200", (10, 0), True, torch.bfloat16, False),
        ("NVIDIA GeForce RTX 5090", (12, 0), True, torch.bfloat16, False),
        ("Tesla T4", (7, 5), False, torch.float16, True),
        ("NVIDIA GeForce GTX 1660", (7, 5), False, torch.float16, True),
        ("Tesla V100-SXM2-16GB", (7, 0), False, torch.float16, True),
        ("Tesla P100-PCIE-16GB", (6, 0), False, torch.float32, False),
        ("NVIDIA GeForce GTX 1080", (6, 1), False, torch.float32, False),
    ],
)
def test_nvidia(name, capability, bf16, dtype, scaler):
    advice = decide("cuda", name, capability, bf16)
    assert (advice.device_name, advice.dtype, advice.needs_scaler) == (name, dtype, scaler)
    assert f"{capability[0]}.{capability[1]}" in advice.reason
    assert bool(advice.warnings) == (capability < (8, 0))


def test_warnings_name_the_problem():
    def text(name, capability):
        return " ".join(decide("cuda", name, capability, False).warnings)

    assert "CUDA 13 no longer compiles" in text("Tesla V100", (7, 0))
    assert "CUDA 13" not in text("Tesla T4", (7, 5))
    assert "through torch" in text("Tesla T4", (7, 5))
    assert "no tensor cores" in text("NVIDIA GeForce GTX 1650", (7, 5))
    assert "emulated" in text("Tesla T4", (7, 5))


def test_other_devices():
    assert decide("cuda", "AMD Instinct MI300X", None, True).dtype == torch.bfloat16
    old = decide("cuda", "AMD", None, False)
    assert (old.dtype, old.needs_scaler) == (torch.float16, True)
    fast, slow = decide("cpu", "AVX512", None, True), decide("cpu", "AVX2", None, False)
    assert fast.dtype == slow.dtype == torch.bfloat16
    assert not fast.warnings
    assert "float32 may be faster" in slow.warnings[0]
    assert decide("mps", "mps", None, False).dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without CUDA")
def test_a_cuda_device_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"device is cuda, and no CUDA device is available \(torch .* is built "):
        recommended_dtype("cuda")


def test_this_machine():
    assert recommended_dtype("cpu") == torch.bfloat16
    assert recommended_dtype(torch.device("cpu")) == advise("cpu").dtype
    assert recommended_dtype() == advise().dtype
    assert recommended_dtype("meta") == torch.float32
