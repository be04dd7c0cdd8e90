"""Predictions say that they are some, and the page in docs/ is what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import predict, predict_page
from bench.gemm_shapes import Shape
from bench.measured import STEPS
from bench.plan import CHIPS
from bench.step_models import MODELS
from bench.step_price import fused, steps
from bench.step_trace import Op

pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "predictions.md").read_text() == predict_page.page(), (
        "python -m bench.predict --page > docs/predictions.md"
    )


def test_every_table_is_called_a_prediction(capsys):
    page = predict_page.page()
    for section in page.split("\n## ")[1:]:
        assert section.split("\n\n")[1].startswith(("PREDICTION for H200", "PREDICTION of a training step on H200"))
    predict.main([])
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 3
    assert all(block.startswith("PREDICTION for H200") for block in blocks)


def test_measured_times_stand_beside_the_gpu_and_the_problem_they_are_of(capsys):
    predict.main(["4096x4096x4096", "4096x4096x4096:NT:bias", "4096x4096x4096:NN", "512x512x512"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.endswith(end) for row, end in zip(rows, ("174", "", "", "3, L2"), strict=True)] == [True] * 4
    assert not rows[1].endswith("174")
    predict.main(["--chip", "H100", "4096x4096x4096"])
    assert "174" not in capsys.readouterr().out


def test_chips_differ_where_they_should():
    large, streamed = (dict.fromkeys(predict.CHIPS, 0.0) for _ in range(2))
    for chip in predict.CHIPS:
        large[chip] = predict.plan(Shape(8192, 8192, 8192, "NT"), predict.CHIPS[chip])["microseconds"]
        streamed[chip] = predict.plan(Shape(8192, 16, 4096, "NT"), predict.CHIPS[chip])["microseconds"]
    assert large["H100"] == pytest.approx(large["H200"], rel=0.02)
    assert large["A100"] > 2 * large["H100"]
    assert streamed["H100"] == pytest.approx(streamed["H200"] * 4.25 / 2.96, rel=0.1)


def test_what_is_no_shape_is_refused(capsys):
    with pytest.raises(SystemExit):
        predict.main(["4096x4096"])
    assert "accepted: MxNxK" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2-1.5b"])
def test_training_steps_are_those_measured(name):
    found = steps(MODELS[name], CHIPS["H200"])
    for (model, way), (seconds, gib) in STEPS.items():
        if model == name:
            assert found[way].total == pytest.approx(seconds, rel=0.1), way
            if way == "torch eager":
                assert found[way].peak_bytes / 2**30 == pytest.approx(gib, rel=0.03)
    # No logits of all rows; nothing is slower but products, whose epilogues cost.
    ours, torchs = found["converted"], found["torch eager"]
    assert ours.peak_bytes < (0.55 if name == "gpt2-124m" else 1) * torchs.peak_bytes
    assert ours.total < torchs.total
    assert {k for k, v in ours.seconds.items() if v > torchs.seconds[k]} <= {"gemm"}


def test_families_of_the_measured_step():
    """GPT-2 124M, eager: 34 % products, 19 copies and casts, 18 norms and loss, 17 element-wise, 9 attention, 2 the optimizer."""
    seconds = steps(MODELS["gpt2-124m"], CHIPS["H200"])["torch eager"].seconds
    shares = {"gemm": 34, "copy, cast": 19, "norm, loss": 18, "element-wise": 17, "attention": 9, "optimizer": 2}
    total = sum(seconds.values())
    assert {k: 100 * seconds[k] / total for k in shares} == pytest.approx(shares, abs=4)


def test_what_a_compiler_fuses_is_read_and_written_once():
    def op(name: str, reads: list, writes: list) -> Op:
        return Op(name, [], [], [(i, 8) for i in reads], [(i, 8) for i in writes], [], [], {})

    ops = [
        op("add", [1, 2], [3]),
        op("gelu", [3], [4]),
        op("mm", [4], [5]),
        op("add", [5, 3], [6]),
        op("mul", [6], [7]),
        op("mm", [7], [8]),
    ]
    first, product, second, last = fused(ops)
    assert (dict(first.reads).keys(), dict(first.writes).keys()) == ({1, 2}, {3, 4})
    assert (dict(second.reads).keys(), dict(second.writes).keys()) == ({5, 3}, {7})
    assert (product.name, last.name) == ("mm", "mm")
