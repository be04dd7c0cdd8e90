"""StepMonitor against a run computed by hand, and what it writes."""

import json
import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels.numerics import StepMonitor

from ..helpers.ops import Ops


def train(monitor, optimizer, weight, scaler, slopes, after_backward=lambda: None):
    """Steps along the given slopes: the gradient of a step is its slope, for each of four weights."""
    for slope in slopes:
        optimizer.zero_grad()
        loss = (weight * slope).sum()
        scaler.scale(loss).backward()
        after_backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, tokens=100)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_by_hand(ours, enabled):
    """Weights 1, lr 0.5, slopes 1, inf, 0.5: losses 4, inf, 2 * 0.5; norms 2, inf, 1; updates 1/2 of the weights, none, 1/2."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = (ak.optim.SGD if ours else torch.optim.SGD)([weight], lr=0.5)
    scaler = (ak if ours else torch.amp).GradScaler("cpu", init_scale=8.0, enabled=enabled)
    with StepMonitor(optimizer, scaler, every=1) as monitor:
        train(monitor, optimizer, weight, scaler, [1.0, torch.inf, 0.5] if enabled else [1.0, 0.5])
    records = monitor.records
    finite = [record for record in records if math.isfinite(record["loss"])]
    assert [record["loss"] for record in finite] == [4.0, 1.0]
    assert [record["grad_norm"] for record in finite] == [2.0, 1.0]
    assert [record["update_ratio"] for record in finite] == [0.5, 0.5]
    assert [record["step"] for record in records] == list(range(len(records)))
    assert all(record["tokens_per_second"] > 0 for record in records)
    if enabled:
        assert [record["scale"] for record in records] == [8.0, 8.0, 4.0]  # what each step's gradients carried
        assert math.isinf(records[1]["grad_norm"])
        assert records[1]["update_ratio"] == 0.0
        assert [record["skipped"] for record in records] == (
            [0.0, 1.0, 0.0] if ours else [pytest.approx(math.nan, nan_ok=True)] * 3
        )
    else:
        assert {record["scale"] for record in records} == {1.0}
        assert {record["skipped"] for record in records} == {0.0}


@pytest.mark.parametrize("scaler", [ak.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_of_torch_by_hand(kind, scaler):
    """Slopes 2^-30 and 2^-20, then with an infinity: the step divided the gradients that it took and left the others. At the
    scale of 2^4 the first slope is lost, the second is not."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = kind([weight], lr=0.5, fused=True), scaler("cpu", init_scale=16.0, backoff_factor=0.75)
    slopes = torch.tensor([2.0**-30, 2.0**-20, 2.0**-20, 0.0])
    with StepMonitor(optimizer, scaler, every=1) as monitor:
        train(monitor, optimizer, weight, scaler, [slopes, slopes + torch.tensor([0.0, 0.0, 0.0, torch.inf]), slopes])
    assert [record["scale"] for record in monitor.records] == [16.0, 16.0, 12.0]
    taken, skipped, again = (record["grad_norm"] for record in monitor.records)
    assert taken == again == pytest.approx(2.0**-19.5)
    assert math.isinf(skipped)
    assert [record["flushed_share"] for record in monitor.records] == pytest.approx([1 / 3] * 3)


def test_groups_come_and_go_and_skips_of_before_do_not_count():
    """A group is added, and one is taken away: a step is measured on the parameters that there were before it."""
    weight, head = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu", init_scale=8.0)
    with StepMonitor(optimizer, scaler, every=1) as monitor:
        train(monitor, optimizer, weight, scaler, [torch.inf])
    with StepMonitor(optimizer, scaler, every=1) as monitor:
        optimizer.add_param_group({"params": [head]})
        train(monitor, optimizer, weight, scaler, [1.0] * 2)
        del optimizer.param_groups[1]
        train(monitor, optimizer, weight, scaler, [0.0])
    assert [record["skipped"] for record in monitor.records] == [0.0] * 3
    ratios = [record["update_ratio"] for record in monitor.records]
    assert ratios == pytest.approx([0.5, 1 / math.sqrt(4 * 0.5**2 + 6), 0.0])


@pytest.mark.parametrize("unscaled", [True, False])
def test_flushed_share_is_at_the_current_scale(unscaled):
    """And the norm is the unscaled one. Slopes of 2^-30 and 2^-20 at scale 2^4: the first is lost, the second not."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu", init_scale=16.0)
    slopes = torch.tensor([2.0**-30, 2.0**-20, 2.0**-20, 0.0])
    with StepMonitor(optimizer, scaler, every=1, unscaled=unscaled) as monitor:
        after_backward = (lambda: scaler.unscale_(optimizer)) if unscaled else (lambda: None)
        train(monitor, optimizer, weight, scaler, [slopes], after_backward)
    assert monitor.records[0]["flushed_share"] == pytest.approx(1 / 3)
    assert monitor.records[0]["grad_norm"] == pytest.approx(2.0**-19.5)


def test_every_and_epochs():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.0), ak.GradScaler("cpu", enabled=False)
    monitor = StepMonitor(optimizer, scaler, every=3)
    for _ in range(2):
        train(monitor, optimizer, weight, scaler, [1.0] * 4)
        monitor.epoch()
    measured = [not math.isnan(record["update_ratio"]) for record in monitor.records]
    assert measured == [True, False, False] * 2 + [True, False]
    assert [record["epoch"] for record in monitor.records] == [0] * 4 + [1] * 4
    never = StepMonitor(optimizer, scaler, every=0)
    train(never, optimizer, weight, scaler, [1.0])
    assert math.isnan(never.records[0]["update_ratio"])


def test_writes_lines_and_shows(tmp_path):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu", init_scale=8.0)
    shown = []
    with StepMonitor(optimizer, scaler, jsonl=tmp_path / "run.jsonl", show=shown.append) as monitor:
        train(monitor, optimizer, weight, scaler, [1.0, torch.inf])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [4.0, "inf"]
    assert 2**20 < lines[0]["peak_memory"] <= lines[1]["peak_memory"]
    assert lines[0]["precision"] == monitor.precision
    assert "precision" not in lines[1]
    assert shown == monitor.records
    with StepMonitor(optimizer, scaler, jsonl=tmp_path / "run.jsonl") as monitor:
        train(monitor, optimizer, weight, scaler, [1.0])
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3  # a resumed run goes on


def test_tensorboard_reads_what_was_written(tmp_path):
    """By TensorBoard's own reader: each figure a curve of its name over steps; what was not measured is left out."""
    reason = "needs tensorboard, which `make test` installs"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu", init_scale=8.0)
    with StepMonitor(optimizer, scaler, every=2, tensorboard=tmp_path) as monitor:
        train(monitor, optimizer, weight, scaler, [1.0, torch.inf, 0.5])
    read = reader.EventAccumulator(str(tmp_path)).Reload()
    assert "parameters: float32" in read.Tensors("precision/text_summary")[0].tensor_proto.string_val[0].decode()
    curves = {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert curves.pop("tokens_per_second")[2][0] == 2
    assert len(curves.pop("peak_memory")) == 3
    assert curves == {
        "loss": [(0, 4.0), (1, math.inf), (2, 1.0)],
        "scale": [(0, 8.0), (1, 8.0), (2, 4.0)],
        "skipped": [(0, 0.0), (1, 1.0), (2, 0.0)],
        "grad_norm": [(0, 2.0), (1, math.inf), (2, 1.0)],
        "update_ratio": [(0, 0.5), (2, 0.5)],
        "flushed_share": [(0, 0.0), (2, 0.0)],
    }


def test_no_host_sync():
    """Within a step nothing of the device is read: no ``.item()``."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu")
    monitor = StepMonitor(optimizer, scaler, every=1)
    train(monitor, optimizer, weight, scaler, [1.0])
    (weight * 2).sum().backward()
    with Ops() as ops:
        monitor.step(torch.tensor(1.0))
    assert ops.names
    assert not ops.host_reads()


def test_bad_arguments():
    with pytest.raises(ValueError, match="every is -1"):
        StepMonitor(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), every=-1)


def test_the_precision_of_a_run():
    weights = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    with StepMonitor(ak.optim.AdamW(weights, master_weights="split"), ak.GradScaler("cpu", enabled=False)) as monitor:
        pass
    expected = {
        "optimizer": "AdamW",
        "parameters": "bfloat16, float32",
        "loss_scaling": "none",
        "master_weights": "split",
    }
    assert expected.items() <= monitor.precision.items()
    with StepMonitor(torch.optim.SGD(weights), ak.GradScaler("cpu")) as monitor:
        assert monitor.precision["loss_scaling"] == "GradScaler"
