"""The benchmark harness on a GPU: graphs, the device's time apart from the host's, kernel names, the command itself."""

import json

import pytest
import torch

from bench import run
from bench.harness.case import Case
from bench.harness.measure import measure
from bench.harness.timer import Effort, rotation

from ..bench.doubling import doubling

pytestmark = pytest.mark.gpu


def doubling_on_gpu(**options) -> Case:
    functions = {"torch": lambda x: x * 2, "syncing": lambda x: x * 2 + x.sum().item() * 0}
    return doubling(1 << 20, "cuda", functions=functions, **options)


def rows_of(case: Case) -> dict[str, dict]:
    device = torch.device("cuda", 0)
    return {row["provider"]: row for row in measure(case, device, Effort(0.0, 0.05, 0.002, rounds=5))}


def test_short_kernels_are_replayed_from_a_graph_and_what_waits_stays_eager():
    generator = torch.cuda.default_generators[0]
    state = generator.get_state()
    drawn = torch.rand(9, device="cuda", generator=generator)
    rows = rows_of(doubling_on_gpu())
    assert [row["status"] for row in rows.values()] == ["ok", "ok"]
    assert (rows["torch"]["timing"], rows["syncing"]["timing"]) == ("graph", "eager")
    generator.set_state(state)
    # The capture that failed left no trace.
    assert torch.equal(torch.rand(9, device="cuda", generator=generator), drawn)


def test_host_and_device_time_come_apart():
    rows = rows_of(doubling_on_gpu(host_time=True))
    assert rows["torch"]["timing"] == "eager"
    assert {"host_us", "device_us"} <= set(rows["torch"])
    assert "host_us" in rows["syncing"]
    assert "device_us" not in rows["syncing"]


def test_kernels_have_names_and_inputs_exceed_the_l2_cache():
    rows = rows_of(doubling_on_gpu(kernels=True))
    assert any("elementwise" in name for name in rows["torch"]["kernels"])
    device = torch.device("cuda", 0)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    assert rotation(1 << 20, device) * (1 << 20) >= 2 * l2


def test_the_command_measures_ours_against_torch(tmp_path):
    ops = "update_scale,activation_backward,unscale,linear"
    assert run.main(["--quick", "--op", ops, "--memory", "2", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["status"] == "ok" for row in rows)
    assert {"torch", "amp_kernels"} <= {row["provider"] for row in rows}
    assert any(row["shape"].startswith("llama-1b / ") for row in rows)
