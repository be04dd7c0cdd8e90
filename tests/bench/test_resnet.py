"""ResNet-50's step: the model is that of the paper, and all take the same one."""

import json

import pytest

from bench import resnet


def test_the_model():
    counts = [p.numel() for p in resnet.resnet50().parameters()]
    assert sum(counts) == 25_557_032  # torchvision's, too
    assert len(counts) == 161


def test_all_take_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setattr(resnet, "STAGES", ((4, 1), (8, 1)))
    options = ["--device", "cpu", "--batch", "3", "--size", "32", "--steps", "1", "--rounds", "1", "--out"]
    assert resnet.main([*options, str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "resnet.jsonl").read_text().splitlines()]
    both = [(dtype, name) for dtype in ("bf16", "fp16") for name in ("torch", "amp_kernels")]
    assert [(row["dtype"], row["provider"]) for row in rows] == [("fp32", "torch"), ("tf32", "torch"), *both]
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=2e-2)
        assert row["images_per_s"] == pytest.approx(3e3 / row["ms"])
    assert rows[0]["losses"][0] != rows[0]["losses"][2]
