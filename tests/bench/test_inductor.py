"""Inductor's schedule of a compiled step: a layer of the converted model moves no byte twice that one kernel could move once."""

import pytest

from bench.training.gpt import CONTEXT, GPT2Config

inductor = pytest.importorskip("bench.prediction.inductor", reason="Triton is not installed", exc_type=ImportError)
CONFIG = GPT2Config(width=768, heads=12, layers=2, batch=8)
ELEMENTS = CONFIG.batch * CONTEXT * CONFIG.width  # of the residual stream
WEIGHTS = 12 * CONFIG.width**2


def layer(converted):
    """For forward and backward: bytes of a layer, its kernels and its ops."""
    for one, two in zip(*(inductor.schedules(CONFIG, layers, converted) for layers in (1, 2)), strict=True):
        yield two.bytes - one.bytes, (two.kernels - one.kernels).total(), two.ops - one.ops


@pytest.mark.exhaustive
def test_a_layer_of_the_converted_model():
    (forward, kernels, ops), (backward, back_kernels, back_ops) = layer(True)
    assert ops == {"amp_kernels.gemm": 4, "bench.attention": 1}
    assert back_ops == {"amp_kernels.gemm": 7, "amp_kernels.gemm_dact": 1, "bench.attention_backward": 1}
    # A norm reads branch and stream, and writes the stream, itself in 16 bits, and its rows in fp32 for the backward.
    # Weights are cast. In the backward a norm reads and writes the stream's gradient and reads those rows and a gradient in
    # 16 bits, of which it writes one; the sums of three biases read theirs, and those of q, k and v are put together.
    assert forward <= 1.02 * (2 * (2 + 4 + 4 + 2 + 4) * ELEMENTS + (4 + 2) * WEIGHTS)
    assert backward <= 1.02 * (2 * (4 + 4 + 4 + 2 + 2) + (2 + 2 + 6) + 12) * ELEMENTS
    assert kernels == 2 + 4
    assert back_kernels == 2 + 3 * 2 + 1
    theirs = [moved for moved, *_ in layer(False)]
    assert forward + backward < 0.61 * sum(theirs)
