"""Which implementation runs: a pure function of the op, the device and what is built, so that it is tested without a GPU.

``AMP_KERNELS_BACKEND=<name>`` or ``with ak.backend("<name>"):`` is an explicit choice: it works or raises
:class:`BackendUnavailable`. The automatic choice may fall back; each one is a DEBUG line of the logger ``amp_kernels``, and a fall
to the slow reference is a WARNING: once per op on a GPU, once for each reason on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from . import load, nodes, profile
from .product_call import ProductCall, described
from .scoped import Setting

logger = logging.getLogger("amp_kernels")

BACKENDS = ("cpu", "cuda", "triton", "aten", "reference", "emulate")
_chosen: Setting[str] = Setting()  # by blocks of backend()
disabled = False  # by switch.py: every op on the reference, in FP32


class BackendUnavailable(RuntimeError):
    """An explicitly chosen backend cannot run this op here; the message says what exists, why, and the command that fixes it.

    Examples:
        >>> a = torch.ones(2, 2, dtype=torch.bfloat16)
        >>> try:
        ...     with ak.backend("cuda"):
        ...         ak.matmul(a, a)
        ... except ak.BackendUnavailable as error:
        ...     print(str(error).partition(". ")[0])
        gemm: backend 'cuda' was asked for, but cpu cannot use it: the tensors are on cpu
    """


@dataclass(frozen=True)
class Built:
    """The implementations of one op in this install.

    ``cuda_archs`` are entries as in ``TORCH_CUDA_ARCH_LIST`` (``"9.0a"``, ``"8.0+PTX"``). ``tensor_cores`` says that the CUDA
    kernels are mma.sync (from 8.0 on) and wgmma (9.0). ``aten``: the op also exists as torch's product and ops of the package.
    ``absent`` maps a backend to the reason why it does not exist.
    """

    cpu: bool = False
    cuda: bool = False
    cuda_archs: tuple[str, ...] = ()
    triton: bool = False
    triton_interpreted: bool = False
    aten: bool = False
    emulate: bool = False
    tensor_cores: bool = False
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    backend: str
    reason: str
    slow: bool = False


def arch_runs(arch: str, capability: tuple[int, int]) -> bool:
    """True if code built for ``arch`` runs on a GPU of ``capability``.

    A cubin runs on its own major version from its own minor version on; ``a`` suffixes run on exactly that chip; ``+PTX`` is
    compiled by the driver for anything newer.
    """
    name = arch.removesuffix("+PTX")
    major, minor = (int(part) for part in name.rstrip("af").split("."))
    if name.endswith("a"):  # its PTX, too, is for that chip alone
        return (major, minor) == capability
    if arch.endswith("+PTX") and capability >= (major, minor):
        return True
    return capability[0] == major and capability[1] >= minor


def choose(
    op: str,
    device: str,
    capability: tuple[int, int] | None,
    built: Built,
    requested: str | None = None,
    own: bool = False,
) -> Choice:
    """Pick the backend of ``op`` for tensors on ``device``.

    Products on a GPU go to the CUDA kernels if these use its Tensor Core instructions, else to torch's products; where no product was
    timed (:data:`UNTIMED`), plain ones are torch's all the same (:func:`select_product`). Triton's GEMM, which takes longer than
    either, runs if it is chosen, or if sums need an order and there is no CUDA kernel.

    Args:
        op: name of the op, for messages.
        device: ``"cpu"``, ``"cuda"`` or another torch device type.
        capability: compute capability of the GPU; ``None`` off CUDA.
        built: what exists for this op.
        requested: a name from :data:`BACKENDS` chosen by the user, or ``None``. ``"aten"`` concerns products alone, and with
            ``"triton"`` the products that have no Triton kernel are torch's.
        own: the package's own kernels are wanted, which add in a fixed order: not torch's products.

    Raises:
        BackendUnavailable: ``requested`` cannot serve this call.
        ValueError: ``requested`` is no backend's name.
    """
    excluded = why_not(device, capability, built)
    if requested == "aten" and not built.aten:
        requested = None
    if requested == "triton" and built.aten and excluded.get("triton") == _NO_TRITON:
        requested = "aten"
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f"backend {requested!r} is unknown; accepted: {', '.join(BACKENDS)}")
        if requested in excluded:
            able = [name for name in BACKENDS if name not in excluded]
            home = _HOMES.get(requested, device)
            fix = _FIX.get(requested, "") if home == device else f"It takes tensors on {home}."
            raise BackendUnavailable(
                f"{op}: backend {requested!r} was asked for, but {_describe(device, capability)} cannot use it: "
                f"{excluded[requested]}. Available here: {', '.join(able)}. {fix}".rstrip()
            )
        return Choice(requested, "asked for")
    if device == "cpu":
        if "cpu" not in excluded:
            return Choice("cpu", "compiled CPU kernel")
        return Choice("reference", f"no CPU kernel: {excluded['cpu']}", slow=True)
    if device == "cuda":
        foreign = excluded.get("cuda") or _not_native(capability, built)
        if foreign and "aten" not in excluded and not (own and op in _ORDERED):
            return Choice("aten", f"torch's product: {foreign}")
        if "cuda" not in excluded:
            plain = f"; plain products are torch's until {profile.TUNE} has timed them"
            untimed = op == "gemm" and built.aten and capability is not None and capability[0] in UNTIMED
            return Choice("cuda", f"compiled for {_describe(device, capability)}{plain * untimed}")
        if "triton" not in excluded:
            return Choice("triton", f"no CUDA kernel: {excluded['cuda']}")
        return Choice(
            "reference", f"no CUDA kernel: {excluded['cuda']}; no Triton kernel: {excluded['triton']}", slow=True
        )
    return Choice("reference", f"no kernels for device type {device!r}")


#: Major compute capabilities whose products go to mma.sync kernels that were never timed there: by arithmetic 0.88 to 0.93 of cuBLAS on
#: an A100, so that they are ahead with an epilogue, on unaligned operands and with FP32 results alone.
UNTIMED = (8, 12)
_NO_TRITON = "this op has no Triton kernel"
#: The products whose sums kernels of the package add in a fixed order. The others over torch's are made of them where one is wanted.
_ORDERED = ("gemm", "gemm_accumulate_")


def _not_native(capability: tuple[int, int] | None, built: Built) -> str | None:
    """Why CUDA kernels that would run leave the GPU's Tensor Cores idle, or ``None``."""
    if not built.tensor_cores or capability is None or capability[0] in (8, 12):  # mma.sync
        return None
    if capability[0] != 9:
        return f"no Tensor Core kernel is written for compute capability {capability[0]}.{capability[1]}"
    if any(arch.startswith("9.0a") for arch in built.cuda_archs):
        return None
    return f"the wgmma kernels need 9.0a, and the build is for {', '.join(built.cuda_archs)}"


_HOMES = {"cpu": "cpu", "emulate": "cpu", "cuda": "cuda"}  # the device of a backend that serves one alone
_FIX = {
    "cpu": "To build it: pip install --no-build-isolation -v . (needs a C++20 compiler).",
    "cuda": "To build it: TORCH_CUDA_ARCH_LIST=<your GPU, such as 9.0a> pip install --no-build-isolation -v . "
    "(needs a CUDA build of torch and nvcc); python -m amp_kernels info shows what was built.",
    "triton": "Triton kernels need a CUDA tensor, or TRITON_INTERPRET=1 set before Python starts.",
    "emulate": "The emulator runs CPU tensors through CUDA kernels for debugging; a working copy has it, an install if "
    "AMP_KERNELS_EMULATOR=1 was set for it.",
}


def why_not(device: str, capability: tuple[int, int] | None, built: Built) -> dict[str, str]:
    """Each backend that cannot run, with the reason."""
    absent = dict(built.absent)
    why: dict[str, str] = {}
    if device != "cpu":
        why["cpu"] = why["emulate"] = f"the tensors are on {device}"
    if device != "cuda":
        why["cuda"] = f"the tensors are on {device}"
    if not built.cpu:
        why.setdefault("cpu", absent.get("cpu", "this op has no CPU kernel"))
    if not built.aten:
        why["aten"] = "it is for products"
    if not built.emulate:
        why.setdefault("emulate", absent.get("emulate", "this op has no emulated kernel"))
    if not built.cuda:
        why.setdefault("cuda", absent.get("cuda", "this op has no CUDA kernel"))
    elif built.tensor_cores and capability is not None and capability < (8, 0):
        why.setdefault("cuda", f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}")
    elif built.tensor_cores and capability is not None and capability[0] in (10, 11):
        why.setdefault("cuda", "it has no tcgen05 instructions, the tensor cores of this GPU would mostly idle")
    elif capability is not None and not any(arch_runs(arch, capability) for arch in built.cuda_archs):
        why.setdefault(
            "cuda", f"it was built for {', '.join(built.cuda_archs)}, not for {_describe(device, capability)}"
        )
    if not built.triton:
        why["triton"] = absent.get("triton", _NO_TRITON)
    elif device != "cuda" and not built.triton_interpreted:
        why["triton"] = f"the tensors are on {device} and the interpreter is off"
    elif device == "cuda" and capability is not None and capability < (8, 0):
        why["triton"] = f"Triton needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    return why


def _describe(device: str, capability: tuple[int, int] | None) -> str:
    return device if capability is None else f"{device} (compute capability {capability[0]}.{capability[1]})"


def requested_backend() -> str | None:
    """The reference if the package is switched off; else the user's explicit choice: the innermost ``backend(...)`` block, else
    ``AMP_KERNELS_BACKEND``, else ``None``."""
    if disabled:
        return "reference"
    if _chosen.newest is None and "AMP_KERNELS_BACKEND" not in os.environ:  # quicker than get, at every call of an op
        return None
    return _chosen.here() or os.environ.get("AMP_KERNELS_BACKEND") or None


def backend(name: str) -> contextlib._GeneratorContextManager[None]:
    """Within the block every op runs on backend ``name``, or raises :class:`BackendUnavailable`.

    Blocks nest. One holds for its thread, and for every thread that is in no such block itself, such as those in which
    autograd runs the backward of CUDA tensors: these follow the open block that was entered last.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"triton"``, ``"aten"``, ``"reference"`` or ``"emulate"``. ``"aten"`` computes matrix
            products by torch's and leaves the other ops to the automatic choice. ``"triton"`` has one product, that of ``linear``
            and ``matmul``; grouped and symmetric ones and gradients of activations are torch's there.

    A program that torch.compile or torch.export made calls ops through torch's dispatcher, which holds one kernel per
    device: where that is a compiled one, it runs there whatever was chosen.

    Examples:
        >>> a = torch.ones(2, 2, dtype=torch.bfloat16)
        >>> with ak.backend("reference"):  # readable torch code
        ...     expected = ak.matmul(a, a)
        >>> torch.equal(ak.matmul(a, a), expected)
        True
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: name is {name!r}; accepted: {', '.join(BACKENDS)}")
    return _block(name)


@contextlib.contextmanager
def _block(name: str) -> Iterator[None]:
    with nodes.refused(), _chosen.block(name):
        yield


class Op(Protocol):
    """The attributes of an op that the choice reads."""

    name: str
    built: Built


def select(op: Op, tensor: torch.Tensor, own: bool = False) -> str:
    """The backend for a call whose first tensor is ``tensor``. The answer is cached per op, device and request.

    ``own``: as :func:`choose` takes it.
    """
    device = tensor.device
    return _select(op, device.type, device.index, requested_backend(), own)


def fixes_order(kwargs: dict) -> bool:
    """True if a call of a GEMM op wants sums in an order that the package fixes."""
    return kwargs.get("batch_invariant", False) or torch.are_deterministic_algorithms_enabled()


def select_product(op: Op, tensor: torch.Tensor, args: tuple, kwargs: dict) -> str:
    """:func:`select` for a call of a GEMM op: the profile of the GPU may know a faster backend for the sizes.

    Not for sums in an order that the package fixes, and not against an explicit choice.
    """
    own, device, requested = fixes_order(kwargs), tensor.device, requested_backend()
    if _recorded is not None and (call := described(op.name, args, kwargs)) is not None:
        _recorded.setdefault(call)
    if not own and requested is None and tensor.is_cuda and _looks(device.index):
        call = described(op.name, args, kwargs)
        if call is not None and (winner := _winner(op, device.index, call)):
            return winner
    return _select(op, device.type, device.index, requested, own)


@functools.cache
def _looks(index: int | None) -> bool:
    """True if the sizes of a product may decide on its backend."""
    return bool(profile.of_device(index).winners) or _is_untimed(index)


def _is_untimed(index: int | None) -> bool:
    """True if plain products are torch's on this device."""
    capability = capability_of("cuda", index)
    return capability is not None and capability[0] in UNTIMED and not profile.of_device(index).times


@functools.cache
def _winner(op: Op, index: int | None, call: ProductCall) -> str | None:
    """The backend of a product in place of the automatic one, if this install has it; the log says so."""
    default = _select(op, "cuda", index, None, False)
    winner, why = profile.of_device(index).winners.get(str(call)), f"faster than {default} in the profile of this GPU"
    if winner is None and _is_untimed(index) and call.is_plain():
        winner, why = "aten", f"{default} was not timed on this GPU: {profile.TUNE}"
    if winner is None or winner == default:
        return None
    if winner in why_not("cuda", capability_of("cuda", index), op.built):
        logger.debug("%s on cuda: %s (%s, %s, is not here)", call, default, winner, why)
        return None
    logger.debug("%s on cuda: %s (%s)", call, winner, why)
    return winner


_recorded: dict[ProductCall, None] | None = None


@contextlib.contextmanager
def recorded_products() -> Iterator[dict[ProductCall, None]]:
    """The products that run within the block, each once, in order."""
    global _recorded
    previous, _recorded = _recorded, {}
    try:
        with nodes.refused():
            yield _recorded
    finally:
        _recorded = previous


def choice_on(op: Op, device: torch.device, requested: str | None = None) -> Choice:
    """:func:`choose` for tensors on a device of this machine."""
    return choose(op.name, device.type, capability_of(device.type, device.index), op.built, requested)


@functools.cache
def _select(op: Op, device_type: str, index: int | None, requested: str | None, own: bool) -> str:
    choice = choose(op.name, device_type, capability_of(device_type, index), op.built, requested, own)
    logger.debug("%s on %s: %s (%s)", op.name, device_type, choice.backend, choice.reason)
    if op.name == "gemm" and choice.backend == "cuda" and requested is None:
        measured = profile.of_device(index)
        if measured.plans:
            _tell_planner(measured, torch.empty(0, device=torch.device("cuda", index)))
        if not _looks(index):  # the nodes call the CUDA kernels, whatever the sizes
            nodes.serve_gpu(index)
    if choice.slow:
        _warn_of_reference(op.name if device_type == "cuda" else "every such op", choice.reason)
    return choice.backend


def _tell_planner(measured: profile.Profile, on: torch.Tensor) -> None:
    for call, plan in measured.plans.values():
        set_plan(on, call, plan)
        logger.debug("%s on cuda: plan %s (by the profile of this GPU)", call, plan)


def set_plan(on: torch.Tensor, call: ProductCall, plan: list[int]) -> None:
    """Sets the plan of a product of the CUDA kernels on a device, in place of the planner's; ``[]`` takes it back."""
    ops = torch.ops.amp_kernels_emulated if requested_backend() == "emulate" else torch.ops.amp_kernels
    ops._set_gemm_plan(on, *call.planned(), plan)


@functools.cache
def _warn_of_reference(ops: str, reason: str) -> None:
    logger.warning("%s runs on the slow torch reference: %s", ops, reason)


def capability_of(device_type: str, index: int | None = None) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, the current one by default; ``None`` off CUDA."""
    return torch.cuda.get_device_capability(index) if device_type == "cuda" else None


def built(op: str, family: str, tensor_cores: bool) -> Built:
    """The implementations of an op in this install; touches no device.

    Args:
        op: its name, by which the C++ libraries register it, and by which ``_triton/<family>.py`` defines it.
        family: the module that it belongs to.
        tensor_cores: as in :class:`Built`.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return Built(
        cpu=has(f"amp_kernels::{op}", "CPU"),
        cuda=has(f"amp_kernels::{op}", "CUDA"),
        cuda_archs=tuple(arch for arch in load.cuda_archs() if not tensor_cores or not arch.startswith("7.")),
        triton=load.has_triton() and load.has_function(f"_triton/{family}", op),
        triton_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        aten=load.has_function(f"_aten/{family}", op),
        emulate=has(f"amp_kernels_emulated::{op}", "CPU"),
        tensor_cores=tensor_cores,
        absent=tuple(load.absent().items()),
    )
