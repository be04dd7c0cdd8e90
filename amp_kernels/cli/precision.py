"""``python -m amp_kernels precision``: what each op reads, computes in and returns inside torch.autocast.

The rules of this package's ops beside torch's own, which hold for everything that has no kernel here. They are in the
dispatcher, not here: tests/registration/test_precision.py calls every op of the table and looks at the dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

#: The rules: what happens to inputs, and the dtype of the result.
RULES = {
    "lower": "inputs are cast to autocast's dtype, the result has it; sums are fp32",
    "fp32 inside": "inputs are read as they are and computed in fp32, the result has autocast's dtype",
    "fp32 result": "inputs are read as they are and computed in fp32, the result is fp32",
    "fp32": "inputs are cast to fp32, the result is fp32: a copy of every 16-bit input",
    "promote": "inputs are cast to the widest dtype among them, the result has it",
    "as it comes": "no rule: the result has the dtype of the input",
}


class Row(NamedTuple):
    """``ops`` by name, their rule by device."""

    ops: tuple[str, ...]
    cuda: str
    cpu: str
    note: str = ""


OURS = (
    Row(("linear", "matmul", "baddbmm", "addmm", "mlp"), "lower", "lower", "bias and activation in fp32, one rounding"),
    Row(("layer_norm", "rms_norm"), "fp32 inside", "fp32 inside", "reads an fp32 residual stream without a copy"),
    Row(("softmax", "log_softmax"), "fp32 inside", "fp32 inside", "with a mask, and no fp32 copy of the scores"),
    Row(("gelu", "silu", "swiglu"), "as it comes", "as it comes", "computed in fp32, one rounding"),
    Row(("dropout_add",), "as it comes", "as it comes", "of the residual, the sum in fp32"),
    Row(("embedding",), "as it comes", "as it comes", "the gradient is summed in fp32"),
    Row(("cross_entropy",), "fp32 result", "fp32 result", "nothing of the logits' size in fp32"),
    Row(("linear_cross_entropy",), "lower", "lower", "the loss is fp32"),
)

TORCHS = (
    Row(("linear", "matmul", "bmm", "mm", "addmm", "baddbmm"), "lower", "lower"),
    Row(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), "lower", "lower"),
    Row(("scaled_dot_product_attention",), "lower", "lower", "softmax in fp32 inside the fused kernels"),
    Row(("prelu",), "lower", "lower"),
    Row(("softmax", "log_softmax"), "fp32", "as it comes", "on CUDA fp16 is read as it is"),
    Row(("layer_norm", "group_norm"), "fp32", "as it comes"),
    Row(("rms_norm",), "fp32", "as it comes", "on CUDA as it comes before torch 2.12"),
    Row(("cross_entropy",), "fp32", "fp32", "log-probabilities in fp32 are stored"),
    Row(("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"), "fp32", "fp32"),
    Row(("binary_cross_entropy_with_logits",), "fp32", "fp32"),
    Row(("ctc_loss",), "as it comes", "fp32", "on CUDA it takes the fp32 of log_softmax"),
    Row(("exp", "log", "pow", "rsqrt", "logsumexp", "softplus"), "fp32", "as it comes"),
    Row(("sum", "cumsum"), "fp32 result", "as it comes"),
    Row(("prod",), "fp32 result", "fp32"),
    Row(("interpolate",), "fp32", "as it comes", "bilinear"),
    Row(("cat", "stack"), "promote", "promote"),
    Row(("embedding", "dropout", "batch_norm", "relu", "gelu", "silu", "tanh"), "as it comes", "as it comes"),
)


def table() -> list[tuple[str, ...]]:
    """The rows that :func:`run` prints and docs/guide/autocast.md quotes, as texts."""
    return [
        (f"{prefix}{', '.join(row.ops)}", row.cuda, row.cpu, row.note)
        for prefix, rows in (("ak: ", OURS), ("torch: ", TORCHS))
        for row in rows
    ]


def run() -> int:
    """Print the rules and who follows which. Returns the exit status, always 0."""
    rows = [("op", "CUDA", "CPU", ""), *table()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]).rstrip())
    print()
    for name, meaning in RULES.items():
        print(f"{name:12} {meaning}")
    return 0
