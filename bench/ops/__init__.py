"""The timed cases, by family of ops: `OPS` has the cases of each op by the name that ``--op`` takes."""

from collections.abc import Callable, Iterator

from ..harness.case import Case, Scope
from . import activation, adamw, cast, dropout, embedding, gemm, gradients, linear, loss, norm, softmax, update

OPS: dict[str, Callable[[Scope], Iterator[Case]]] = {
    "activation": activation.activation,
    "activation_backward": activation.activation_backward,
    "adamw": adamw.adamw,
    "cast": cast.cast,
    "check_and_norm": gradients.check_and_norm,
    "cross_entropy": loss.cross_entropy,
    "dropout_add": dropout.dropout_add,
    "embedding": embedding.embedding,
    "exponent_histogram": gradients.exponent_histogram,
    "gemm": gemm.gemm,
    "lamb": update.lamb,
    "layer_norm": norm.layer_norm,
    "linear": linear.linear,
    "linear_cross_entropy": loss.linear_cross_entropy,
    "lion": update.lion,
    "mlp": linear.mlp,
    "rms_norm": norm.rms_norm,
    "sgd": update.sgd,
    "softmax": softmax.softmax,
    "unscale": gradients.unscale,
    "update_scale": gradients.update_scale,
    "step": adamw.step,
}
