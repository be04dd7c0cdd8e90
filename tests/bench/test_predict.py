"""Predictions say that they are some, and the page in docs/ is what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import predict, predict_page
from bench.gemm_shapes import Shape

pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "predictions.md").read_text() == predict_page.page(), (
        "python -m bench.predict --page > docs/predictions.md"
    )


def test_every_table_is_called_a_prediction(capsys):
    page = predict_page.page()
    for section in page.split("\n## ")[1:]:
        assert section.split("\n\n")[1].startswith("PREDICTION for H200")
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
