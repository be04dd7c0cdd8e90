"""Predictions say that they are some, and the page in docs/ is what the program prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.update_scale import update_scale_
from amp_kernels.testing.emulator import launches
from bench import predict, predict_page
from bench.ops.gemm_shapes import Shape
from bench.prediction import measured, tables, tile_times
from bench.prediction.chips import CHIPS
from bench.prediction.measured import STEPS
from bench.prediction.price import steps, traces
from bench.training.gpt import GPT2_MODELS as MODELS

pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ROOT = Path(__file__).parents[2]
H200 = CHIPS["H200"]


def test_the_page_is_up_to_date_and_calls_every_table_a_prediction(capsys):
    page = predict_page.page()
    assert (ROOT / "docs" / "predictions.md").read_text() == page, (
        "python -m bench.predict --page > docs/predictions.md"
    )
    model, *tables = page.split("\n## ")[1:]
    assert model.startswith("The model\n")
    for section in tables:
        assert section.split("\n\n")[1].startswith(("PREDICTION for H200", "PREDICTION of a training step on H200"))
    predict.main([])
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert [block.startswith("PREDICTION for H200") for block in blocks] == [True] * 3


def test_measured_times_stand_beside_the_gpu_and_the_problem_they_are_of(capsys):
    predict.main(["4096x4096x4096", "4096x4096x4096:NT:bias", "4096x4096x4096:NN", "512x512x512"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[-1] for row in rows] == ["204.1", "168.6", "204.8", "4.0"]  # a bias: the floor is last
    predict.main(["--chip", "H100", "4096x4096x4096"])
    assert "204.1" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        predict.main(["4096x4096"])
    assert "accepted: MxNxK" in capsys.readouterr().err


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def measured_run(tmp_path):
    """Rows of one product, its accumulating twin, one that was wrong, one with another plan, a step and training steps; times of tiles."""
    told = {"date": "2026-01-02T03:04:05+00:00", "device": "NVIDIA H200"}
    large = "sm90 128x256 cluster 2x1, 2 consumers"
    pingpong = "sm90 128x128 cluster 1x2, 2 consumers, pingpong"
    ok = {"provider": "amp_kernels", "status": "ok", **told}
    product = {"op": "gemm", "shape": "4096x4096x4096 NT", "dtype": "bf16"}
    rows = [
        {**product, **ok, "p50_us": 340.0, "plan": large},
        {**product, **ok, "p50_us": 200.0, "floor_us": 190.0, "provider": "torch"},
        {**product, **ok, "p50_us": 8.0, "dtype": "fp16"},
        {**product, **ok, "p50_us": 9.0, "shape": "2048x2048x2048 NT", "status": "wrong"},
        {**product, **ok, "p50_us": 255.0, "shape": "65536x1024x1024 NT bias+gelu", "plan": pingpong},
        {**product, **ok, "p50_us": 170.0, "shape": "65536x1024x1024 NT", "plan": pingpong},
        {**product, **ok, "p50_us": 11.0, "shape": "4096x4096x4096 TN", "plan": pingpong},
        {**product, **ok, "p50_us": 12.0, "shape": "4096x4096x4096 TT", "plan": pingpong},
        {**ok, "op": "step", "shape": "llama-1b", "dtype": "fp32", "p50_us": 2e4, "device_us": 1e4},
    ]
    step = {"model": "gpt2-124m", "batch": 32, "dtype": "bf16", "peak_gib": 12.0, **told}
    torchs = {**step, "provider": "torch", "ms": 91.0, "dtype": "fp16"}
    write(tmp_path, "rows", rows)
    write(tmp_path, "gpt2", [{**step, "provider": "amp_kernels", "ms": 70.0}, torchs])
    tile = "4096,4096,4096,TN,16,none,1,128x256 2x1,1,0,210.5\n"
    (tmp_path / tile_times.FILE).write_text(f"# of a test\n{','.join(tile_times.COLUMNS)}\n{tile}")
    measured.use(tmp_path)
    yield
    measured.use(measured.H200)


def test_measured_times_of_this_package_stand_beside_the_prediction(measured_run, monkeypatch):
    shapes = [Shape(4096, 4096, 4096, "NT"), Shape(4096, 4096, 4096, "NN"), Shape(2048, 2048, 2048, "NT")]
    hit, other_layout, wrong = tables.products(shapes, H200)[1:]
    assert hit[3] == "340.0"
    assert float(hit[4]) == pytest.approx(340 / float(hit[2]), abs=0.006)
    assert other_layout[3:5] == wrong[3:5] == tables.products(shapes, CHIPS["H100"])[1][3:5] == ("", "")
    other_plan, tile = tables.products([Shape(4096, 4096, 4096, layout) for layout in ("TT", "TN")], H200)[1:]
    assert (other_plan[3], tile[3]) == ("", "210.5")
    assert tables.ratios().keys() == {"4096x4096x4096 NT", "4096x4096x4096 TN", "65536x1024x1024 NT"}
    for timed, ratio in ((("none",), ""), (("none", "gelu"), "1.50 x")):  # an epilogue of new code, and one as it was
        monkeypatch.setattr(tables, "TIMED", timed)
        gelu = next(row for row in tables.epilogues(H200) if row[0] == "65536x1024x1024 NT")
        assert gelu[4] == ratio
    first, second = tables.steps(H200)[1:3]
    assert (first[:2], first[4], second[4]) == (("llama-1b", "fp32"), "10.000", "")
    assert tables.trained("gpt2-124m", "converted") == (0.07, 12.0)
    assert tables.trained("gpt2-124m", "torch eager") == STEPS["gpt2-124m", "torch eager"]


def test_speedups_compare_one_run_and_today_s_plan(tmp_path):
    nn, tt = ({"op": "gemm", "shape": f"4096x4096x4096 {layout}", "dtype": "bf16"} for layout in ("NN", "TT"))
    told = {"status": "ok", "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00", "commit": "a"}
    ours, cublas = {**told, "provider": "amp_kernels", "p20_us": 200.0}, {**told, "provider": "torch", "p20_us": 210.0}
    large, small = "sm90 128x256 cluster 2x1, 2 consumers", "sm90 64x128 cluster 1x1, 1 consumers, 2 splits"
    nt, tn = ({**nn, "shape": f"4096x4096x4096 {layout}"} for layout in ("NT", "TN"))
    gone = {**ours, "shape": "2048x2048x2048 NT", "plan": "sm90 128x128 cluster 4x1, 2 consumers"}
    write(
        tmp_path,
        "rows",
        [
            *({**product, **cublas} for product in (nn, nt, tt)),
            {**nn, **ours, "plan": large},
            {**nt, **ours, "plan": small},
            {**tt, **ours, "plan": large, "commit": "b"},
            {**tn, **ours, "plan": large},
            {**nn, **gone},
            {**nn, **cublas, "shape": "2048x2048x2048 NT"},
        ],
    )
    measured.use(tmp_path)
    try:
        found = tables.speedups(H200)
        assert found.keys() == {"4096x4096x4096 NN", "4096x4096x4096 NT"}
        assert found["4096x4096x4096 NN"] == pytest.approx(1.05)  # today's plan was timed
        shape = Shape(4096, 4096, 4096, "NT")
        slower = tables.model_us(shape, H200, small) / tables.model_us(shape, H200, large)
        assert slower > 1.1
        assert found["4096x4096x4096 NT"] == pytest.approx(1.05 * slower)
    finally:
        measured.use(measured.H200)


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_those_measured(name):
    found = steps(MODELS[name], H200)
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
    seconds = steps(MODELS["gpt2-124m"], H200)["torch eager"].seconds
    shares = {"gemm": 34, "copy, cast": 19, "norm, loss": 18, "element-wise": 17, "attention": 9, "optimizer": 2}
    total = sum(seconds.values())
    assert {k: 100 * seconds[k] / total for k in shares} == pytest.approx(shares, abs=4)


def test_ops_priced_as_ours_have_cuda_kernels():
    glue = "".join(path.read_text() for path in (ROOT / "csrc").rglob("glue*.cpp"))
    names = {op.name for each in traces(MODELS["gpt2-124m"], True) for op in each.ops if op.name.startswith("ak::")}
    assert "ak::gemm" in names
    assert not [name for name in names if f'"{name.removeprefix("ak::")}"' not in glue]


@pytest.mark.skipif(not REGISTRY["adamw_"].built.emulate, reason="the emulated library is not built")
def test_launches_carry_the_bytes_that_predictions_count():
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(187)]
    optimizer = ak.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones(8)
    state = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32), torch.tensor(1, dtype=torch.int32)
    calls = (
        lambda: check_and_norm([p.grad for p in params]),
        lambda: update_scale_(*state, [torch.tensor(0.0)]),
        optimizer.step,
    )
    seen = {}
    with ak.backend("emulate"):
        for call in calls:
            call()
            seen |= {launch.name: launch.arguments for launch in launches()}
    assert seen == tables.STEP_ARGUMENTS
    tuned = (ROOT / "csrc" / "update" / "rules" / "adamw.cu").read_text()
    for constant, name in (("kPrepareTensors", "update_prepare"), ("kTensors", "adamw_")):
        assert f" {constant} = {tables.UPDATE_TENSORS[name]}" in tuned
