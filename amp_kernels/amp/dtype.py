"""The choice of a training dtype: the rule as a pure function, and its application to a device.

bfloat16 has float32's exponent range and needs no loss scaling; it is chosen if the hardware multiplies it at full speed. float16
is chosen if only float16 has tensor cores (compute capability 7.0 and 7.5); small gradients are then below its range (6e-8) unless
the loss is scaled. GPUs of 7.5 without tensor cores (GTX 16) are treated like the others, because they multiply float16 at twice
float32's rate. On older GPUs, 16-bit arithmetic gains too little for its rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Advice:
    """The recommended training dtype of a device.

    Attributes:
        device_name: the vendor's name of the device.
        dtype: for ``torch.autocast``; ``torch.float32`` means not to use autocast.
        needs_scaler: True if gradients need a loss scale (:class:`amp_kernels.GradScaler`).
        reason: one sentence.
        warnings: further advice.

    Examples:
        >>> ak.amp.advise("cpu").dtype
        torch.bfloat16
    """

    device_name: str
    dtype: torch.dtype
    needs_scaler: bool
    reason: str
    warnings: tuple[str, ...] = ()


def decide(device_type: str, name: str, capability: tuple[int, int] | None, bf16_support: bool) -> Advice:
    """Apply the rule.

    Args:
        device_type: torch's device type, such as ``"cuda"`` or ``"cpu"``.
        name: the device's name, which distinguishes chips of the same compute capability.
        capability: compute capability of an NVIDIA GPU, else ``None``.
        bf16_support: True if the device computes in bfloat16 natively, without emulation.

    Examples:
        >>> advice = ak.amp.decide("cuda", "Tesla T4", (7, 5), bf16_support=False)
        >>> advice.dtype, advice.needs_scaler
        (torch.float16, True)
    """
    if device_type == "cuda" and capability is not None:
        return _decide_nvidia(name, capability, bf16_support)
    if device_type == "cuda":
        reason = (
            "this GPU computes in bfloat16, whose range is float32's" if bf16_support else "this GPU has no bfloat16"
        )
        return Advice(name, torch.bfloat16 if bf16_support else torch.float16, not bf16_support, reason)
    if device_type == "cpu":
        fast = "this CPU multiplies bfloat16 faster than float32 (AVX512-BF16 or AMX)"
        slow = "bfloat16 halves memory traffic; this CPU multiplies it at float32's speed or below"
        reason = f"{fast if bf16_support else slow}; its range is float32's"
        return Advice(
            name, torch.bfloat16, False, reason, () if bf16_support else ("float32 may be faster here: compare both",)
        )
    return Advice(name, torch.float32, False, f"there is no rule for devices of type {device_type!r}")


def _decide_nvidia(name: str, capability: tuple[int, int], bf16_support: bool) -> Advice:
    version = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0) and bf16_support:
        return Advice(
            name, torch.bfloat16, False, f"{version} has bfloat16 tensor cores, and bfloat16's range is float32's"
        )
    if capability < (7, 0):
        return Advice(
            name,
            torch.float32,
            False,
            f"{version} has no tensor cores, so 16-bit training gains little and loses precision",
            ("16-bit weights would still save memory; then use float16 with loss scaling",),
        )
    reason = f"{version} has tensor cores for float16 only, and float16's range needs loss scaling"
    warnings = ["bfloat16 is emulated here: torch accepts it, at less than float32's speed"]
    if capability < (7, 5):
        warnings.append(
            "CUDA 13 no longer compiles for this GPU: the CUDA kernels of this package do not run on it, and ops take "
            "their torch reference"
        )
    elif "GTX 16" in name:
        reason = f"{version} computes in float16 but not in bfloat16, and float16's range needs loss scaling"
        warnings.append("GeForce GTX 16 chips have no tensor cores: expect savings in memory rather than time")
    else:
        warnings.append("on this architecture matrix products go through torch; the optimizer step has its own kernels")
    return Advice(name, torch.float16, True, reason, tuple(warnings))


def advise(device: torch.device | str | None = None) -> Advice:
    """Query a device's properties and apply the rule.

    Args:
        device: the device to train on; default: the current CUDA device if there is one, else the CPU.

    Raises:
        RuntimeError: ``device`` is a CUDA device, and none is available.
        ValueError: ``device`` is not the name of a device.

    Examples:
        >>> advice = ak.amp.advise("cpu")
        >>> scaler = ak.GradScaler("cpu", enabled=advice.needs_scaler)
        >>> scaler.is_enabled()
        False
    """
    try:
        device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):  # torch lists some twenty types without naming the argument
        raise ValueError(
            f"device is {device!r}; accepted: None, 'cpu', 'cuda', 'cuda:0' and the like, or a torch.device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise RuntimeError(
            f"device is {device}, and no CUDA device is available (torch {torch.__version__} is built {build}); accepted: "
            "a device that is there, or None"
        )
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor) if torch.version.hip is None else None
        with torch.cuda.device(device):
            return decide("cuda", properties.name, capability, torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return decide("cpu", torch.backends.cpu.get_cpu_capability(), None, _cpu_has_bf16())
    return decide(device.type, str(device), None, False)


def _cpu_has_bf16() -> bool:
    return any(
        getattr(torch.cpu, test, lambda: False)() for test in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


def recommended_dtype(device: torch.device | str | None = None) -> torch.dtype:
    """The recommended dtype for ``torch.autocast`` on a device.

    Either bfloat16, or float16 (with a :class:`amp_kernels.GradScaler`), or float32 if mixed precision does not help.

    Args:
        device: the device to train on; default: the current CUDA device if there is one, else the CPU.

    Raises:
        RuntimeError: ``device`` is a CUDA device, and none is available.
        ValueError: ``device`` is not the name of a device.

    Examples:
        >>> ak.recommended_dtype("cpu")
        torch.bfloat16
    """
    return advise(device).dtype
