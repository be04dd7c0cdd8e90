"""Other libraries, timed where they are installed and have kernels for the device.

Of AdamW only the weights are compared: each library keeps its moments in a form of its own. In a whole step none of them clips,
and only Apex checks and takes the norm, so they get gradients that are clipped already. Each row names its passes (`pipeline`).
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Peer:
    """A library: its module, its distribution if that is named otherwise, the command that installs it, and if it has CPU kernels."""

    module: str
    install: str
    distribution: str = ""
    on_cpu: bool = False


PEERS = {
    "apex": Peer(
        "apex",
        "git clone https://github.com/NVIDIA/apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ./apex",
    ),
    "transformer_engine": Peer(
        "transformer_engine", "pip install --no-build-isolation 'transformer_engine[pytorch]'", "transformer-engine"
    ),
    "liger": Peer("liger_kernel", "pip install liger-kernel", "liger-kernel"),
    "quack": Peer("quack", "pip install quack-kernels", "quack-kernels"),
    "verl": Peer("verl", "pip install verl"),
    "trl": Peer("trl", "pip install trl"),
    "flashoptim": Peer("flashoptim", "pip install flashoptim"),
    "bitsandbytes": Peer("bitsandbytes", "pip install bitsandbytes", on_cpu=True),
    "torchao": Peer("torchao", "pip install torchao", on_cpu=True),
    "optimi": Peer("optimi", "pip install torch-optimi", "torch-optimi", on_cpu=True),
    "dion": Peer(
        "dion", "git clone https://github.com/microsoft/dion && export PYTHONPATH=$PWD/dion:$PYTHONPATH", on_cpu=True
    ),
}


def why_absent(name: str) -> str | None:
    """The reason why a peer cannot be imported, or None."""
    module = PEERS[name].module if name in PEERS else name
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # built for another torch, for instance: the ways to fail are the peer's own
        return f"does not import: {type(error).__name__}: {error}".splitlines()[0]
    return None


def skipped(name: str, device: torch.device) -> str | None:
    """The reason why a peer is not timed on this device, or None."""
    if device.type == "cpu" and name in PEERS and not PEERS[name].on_cpu:
        return "has no kernels for a CPU"
    return why_absent(name)


def version(name: str) -> str | None:
    """Installed version of a peer, "unknown" if it carries none, None if it is absent or does not import."""
    if why_absent(name) is not None:
        return None
    peer = PEERS.get(name, Peer(name, ""))
    try:
        return importlib.metadata.version(peer.distribution or peer.module)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def functions(op: str, device: torch.device) -> dict[str, Callable]:
    """The peers that have an op on this device, as functions with torch's arguments; without those whose version lacks it."""
    found = {}
    for name, (module, attribute, make) in FUNCTIONS[op].items():
        if skipped(name, device) is None:
            with contextlib.suppress(ImportError, AttributeError):
                found[name] = make(getattr(importlib.import_module(module), attribute))
    return found


NORM_EPS = 1e-5


def _bias(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(weight) if bias is None else bias


def _mean_of_rows(f) -> Callable:
    """Apex's loss of each row. Its ``padding_idx`` is a class that counts nothing: none is."""
    return lambda logits, target: f.apply(logits, target, 0.0, -1, False).mean()


def _with_liger(f) -> Callable:
    def mlp(x, weight1, bias1, weight2, bias2):
        return F.linear(f.apply(*F.linear(x, weight1, bias1).chunk(2, -1)), weight2, bias2)

    return mlp


# By op and peer: where its function is, and what gives it the arguments of torch's. QuACK's layer norm has a forward alone, and
# an fp32 weight: a case with a backward reports that it failed. Its linear_cross_entropy asks for a weight in the dtype of
# the rows. verl's head always computes entropies, too. TRL's has 16-bit logits, in chunks as large as its trainers'. The cross
# entropies of Liger and Transformer Engine are left out: they write the gradient over the logits, which the next call reads.
# Apex's GELU is the tanh approximation, within the bounds of 16 bits.
FUNCTIONS: dict[str, dict[str, tuple[str, str, Callable]]] = {
    "layer_norm": {
        "apex": (
            "apex.normalization.fused_layer_norm",
            "mixed_dtype_fused_layer_norm_affine",
            lambda f: lambda x, weight, bias=None: f(x, weight, _bias(weight, bias), weight.shape, NORM_EPS),
        ),
        "liger": (
            "liger_kernel.ops.layer_norm",
            "LigerLayerNormFunction",
            lambda f: lambda x, weight, bias=None: f.apply(x, weight, _bias(weight, bias), NORM_EPS),
        ),
        "quack": ("quack.layernorm", "layernorm", lambda f: lambda x, weight: f(x, weight.float(), eps=NORM_EPS)),
    },
    "rms_norm": {
        "apex": (
            "apex.normalization.fused_layer_norm",
            "mixed_dtype_fused_rms_norm_affine",
            lambda f: lambda x, weight: f(x, weight, weight.shape, NORM_EPS),
        ),
        "liger": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", lambda f: lambda x, weight: f.apply(x, weight, NORM_EPS)),
        "quack": ("quack", "rmsnorm", lambda f: lambda x, weight: f(x, weight, eps=NORM_EPS)),
    },
    "cross_entropy": {
        "apex": ("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss", _mean_of_rows),
        "quack": ("quack.cross_entropy", "cross_entropy", lambda f: f),
    },
    "linear_cross_entropy": {
        "liger": (
            "liger_kernel.ops.fused_linear_cross_entropy",
            "LigerFusedLinearCrossEntropyFunction",
            lambda f: lambda x, weight, target: f.apply(x, weight, target)[0],
        ),
        "quack": (
            "quack.linear_cross_entropy",
            "chunked_linear_cross_entropy",
            lambda f: lambda x, weight, target: f(x, weight.to(x.dtype), target),
        ),
    },
    "linear_log_probs": {
        "liger": (
            "liger_kernel.ops",
            "LigerFusedLinearScaledCrossEntropyFunction",
            lambda f: lambda x, weight, target: -f.apply(x, weight, target, 1.0, -100, 1, False),
        ),
        "verl": (
            "verl.utils.kernel.linear_cross_entropy",
            "linear_cross_entropy",
            lambda f: lambda x, weight, target: f(x, weight, target, 1.0)[0],
        ),
        "trl": (
            "trl.kernels",
            "ChunkedLogProbFunction",
            lambda f: lambda x, weight, target: f.apply(x, weight, None, target, 1.0, 32768, None, 1.0, ())[0],
        ),
    },
    "swiglu": {
        "liger": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction", lambda f: lambda x: f.apply(*x.chunk(2, -1)))
    },
    "mlp gelu": {"apex": ("apex.fused_dense.fused_dense", "fused_dense_gelu_dense_function", lambda f: f)},
    "mlp swiglu": {"liger": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction", _with_liger)},
    "embedding": {
        "liger": (
            "liger_kernel.ops.experimental.embedding",
            "LigerEmbeddingFunction",
            lambda f: lambda table, indices: f.apply(table, indices),
        )
    },
}  # fmt: skip


def torch_linear_cross_entropy() -> dict[str, Callable]:
    """torch's own fused function, which 2.13 has."""
    if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return {}
    options = torch.nn.LinearCrossEntropyOptions()  # without any it is the two operations
    return {
        "torch:fused": lambda x, weight, target: F.linear_cross_entropy(x, weight.to(x.dtype), target, options=options)
    }


class _Fp32Logits(torch.autograd.Function):
    """torch's product with fp32 results of 16-bit operands, which has no derivative of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ weight, grad.t() @ x


def torch_log_probs(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of fp32 logits by torch's functions, on a GPU."""
    return _Fp32Logits.apply(x, weight).log_softmax(1).gather(1, target[:, None])[:, 0]
