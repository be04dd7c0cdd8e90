"""``python -m amp_kernels precision``: the dtypes that each op reads, computes in and returns inside torch.autocast.

The table lists this package's ops, and torch's for everything that has no kernel here. The rules are in the dispatcher, not here:
tests/registration/test_precision.py calls every op of the table and checks the dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

#: The rules for casting inputs and for the dtype of the result.
RULES = {
    "lower": "inputs are cast to autocast's dtype, the result has it; sums are fp32",
    "fp32 inside": "inputs are not cast; computed in fp32, the result has autocast's dtype",
    "fp32 result": "inputs are not cast; computed in fp32, the result is fp32",
    "fp32": "inputs are cast to fp32 (a copy of every 16-bit input), the result is fp32",
    "promote": "inputs are cast to the widest dtype among them, the result has it",
    "input dtype kept": "no rule: the result has the input dtype",
}


class Row(NamedTuple):
    """Ops and their rule on each device."""

    ops: tuple[str, ...]
    cuda: str
    cpu: str
    note: str = ""


OURS = (
    Row(
        ("linear", "matmul", "grouped_mm", "baddbmm", "addmm", "mlp"),
        "lower",
        "lower",
        "bias and activation in fp32, one rounding",
    ),
    Row(("layer_norm", "rms_norm"), "fp32 inside", "fp32 inside", "reads an fp32 residual stream without a copy"),
    Row(("rotary",), "fp32 inside", "fp32 inside", "takes the norms of queries and keys; no fp32 copies of them"),
    Row(("gelu", "silu", "swiglu"), "input dtype kept", "input dtype kept", "computed in fp32, one rounding"),
    Row(("embedding",), "input dtype kept", "input dtype kept", "the gradient is summed in fp32"),
    Row(("cross_entropy",), "fp32 result", "fp32 result", "allocates no fp32 tensor as large as the logits"),
    Row(("linear_cross_entropy",), "lower", "lower", "the loss is fp32"),
)

TORCHS = (
    Row(("linear", "matmul", "bmm", "mm", "addmm", "baddbmm"), "lower", "lower"),
    Row(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), "lower", "lower"),
    Row(("scaled_dot_product_attention",), "lower", "lower", "softmax in fp32 inside the fused kernels"),
    Row(("prelu",), "lower", "lower"),
    Row(("softmax", "log_softmax"), "fp32", "input dtype kept", "on CUDA fp16 is read without a cast"),
    Row(("layer_norm", "group_norm"), "fp32", "input dtype kept"),
    Row(("rms_norm",), "fp32", "input dtype kept", "on CUDA the input dtype is kept before torch 2.12"),
    Row(("cross_entropy",), "fp32", "fp32", "stores fp32 log-probabilities"),
    Row(("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"), "fp32", "fp32"),
    Row(("binary_cross_entropy_with_logits",), "fp32", "fp32"),
    Row(("ctc_loss",), "input dtype kept", "fp32", "on CUDA it reads the fp32 result of log_softmax"),
    Row(("exp", "log", "pow", "rsqrt", "logsumexp", "softplus"), "fp32", "input dtype kept"),
    Row(("sum", "cumsum"), "fp32 result", "input dtype kept"),
    Row(("prod",), "fp32 result", "fp32"),
    Row(("interpolate",), "fp32", "input dtype kept", "bilinear"),
    Row(("cat", "stack"), "promote", "promote"),
    Row(("embedding", "dropout", "batch_norm", "relu", "gelu", "silu", "tanh"), "input dtype kept", "input dtype kept"),
)


def table() -> list[tuple[str, ...]]:
    """The rows that :func:`run` prints and docs/guide/autocast.md quotes."""
    return [
        (f"{prefix}{', '.join(row.ops)}", row.cuda, row.cpu, row.note)
        for prefix, rows in (("ak: ", OURS), ("torch: ", TORCHS))
        for row in rows
    ]


def run() -> int:
    """Print the rule of each op and the meaning of each rule. Returns the exit status, always 0."""
    rows = [("op", "CUDA", "CPU", ""), *table()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip())
    print()
    for name, meaning in RULES.items():
        print(f"{name:16} {meaning}")
    return 0
