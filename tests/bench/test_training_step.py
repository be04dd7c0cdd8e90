"""The traced training step: its casts at the sizes of GPT-2, and the rates that price it."""

from collections import Counter

import pytest
import torch

import amp_kernels as ak
from bench.prediction import loss
from bench.prediction.chips import CHIPS
from bench.prediction.price import COPIES, concatenated, copied_bytes, facts, seconds, traces, whole
from bench.prediction.trace import trace
from bench.training.gpt import CONTEXT
from bench.training.gpt import GPT2_MODELS as MODELS

pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")


@pytest.mark.parametrize(("name", "with_casts_of_weights"), [("gpt2-124m", 0.2), ("gpt2-1.5b", 0.4)])
def test_casts_of_a_converted_step(name, with_casts_of_weights):
    """Eager AMP's bytes of casts fall to a fifth; without shadows, by as much as there are activations beside weights."""
    config = MODELS[name]

    def casts(converted, **options):
        return whole(facts, config, traces(config, converted, **options))["casts"]

    eager, shadowed, without = casts(False), casts(True), casts(True, shadowed=False)
    assert shadowed <= 0.2 * eager
    assert shadowed < without <= with_casts_of_weights * eager


def test_a_converted_step_casts_gradients_of_the_stream_alone():
    """The gradient of the fp32 stream where it enters a branch, and nothing else: no weight, no logits."""
    one, two = traces(MODELS["gpt2-124m"], True)
    cast = [op for op in two.ops if op.name in COPIES and len(set(op.dtypes)) > 1]
    stream = (MODELS["gpt2-124m"].batch, CONTEXT, MODELS["gpt2-124m"].width)
    assert {(tuple(op.dtypes), op.shapes[0]) for op in cast} == {((torch.float32, torch.bfloat16), stream)}
    assert len(cast) == 4  # of two branches in two layers
    assert copied_bytes(one.ops) < copied_bytes(two.ops)


@pytest.mark.parametrize("name", MODELS)
def test_norms_that_add_leave_no_cast(name):
    """Nor do they copy attention's gradients; the memory peak is that of the converted step."""
    config = MODELS[name]
    fused = traces(config, True, fused=True)
    eager, converted, found = (
        whole(facts, config, each) for each in (traces(config, False), traces(config, True), fused)
    )
    assert found["casts"] == 0
    assert found["copies"] <= 0.01 * eager["copies"]
    copies = Counter((op.name, op.shapes[0]) for op in fused[1].ops if op.name in COPIES)
    assert copies.pop(("cat", (config.width,))) == 2  # in two layers, of the bias's sums
    assert {name for name, _ in copies} == {"copy_"}  # the loss puts its gradient's chunks together
    assert found["first_peak"] <= 1.001 * converted["first_peak"]


def test_a_product_of_segments_is_priced_as_that_of_their_concatenation():
    ops = [op for op in traces(MODELS["gpt2-124m"], True, fused=True)[0].ops if op.name == "ak::segmented_gemm"]
    (dx, dw), chip = map(concatenated, ops), CHIPS["H200"]
    tokens, width = MODELS["gpt2-124m"].batch * CONTEXT, MODELS["gpt2-124m"].width
    assert dx.shapes == [(tokens, 3 * width), (3 * width, width)]
    assert dw.shapes == [(3 * width, tokens), (tokens, width)]
    assert (dx.strides[0], dw.strides[0]) == ((3 * width, 1), (1, 3 * width))
    assert dx.dtypes == [torch.bfloat16] * 3
    assert dw.dtypes == [torch.bfloat16] * 2 + [torch.float32]
    assert [seconds(op, chip) for op in ops] == [seconds(op, chip) for op in (dx, dw)]


def test_a_trace_keeps_no_tensor_alive():
    def build():
        def step(under_autocast):
            for _ in range(10):
                ak.layer_norm(torch.empty(1000, 1000), (1000,))  # 4 MB, and its result

        return step

    assert trace(build).peak < 3 * 4_100_000


def test_the_loss_is_priced_as_it_runs():
    """Its chunks and products are those of the traced step."""
    layer = loss.heads()[0]
    ops = traces(MODELS["gpt2-124m"], True)[0].ops
    assert layer.chunks == [op.shapes[0][0] for op in ops if op.name == "ak::cross_entropy_rows_"]
    products = [op for op in ops if op.name.startswith("ak::gemm") and layer.classes in sum(op.shapes, ())]
    ours = sum(sum(loss.products_us(layer.products(rows, True), CHIPS["H200"])) for rows in layer.chunks)
    assert len(products) == 3 * len(layer.chunks)
    assert sum(seconds(op, CHIPS["H200"]) for op in products) * 1e6 == pytest.approx(ours)
