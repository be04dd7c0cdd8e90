"""StepMonitor on ranks: of norms and updates the rank's own, of scale and skips everyone's."""

import math

import pytest
import torch

import amp_kernels as ak

from .worlds import LAYOUTS, SCALE, give, make_model


def watched():
    model, reference = LAYOUTS["fsdp"](make_model()), make_model()
    optimizer, scaler = ak.optim.AdamW(model.parameters(), lr=1e-2), ak.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    norms = []
    with ak.numerics.StepMonitor(optimizer, scaler, every=1) as monitor:
        for step in range(3):
            give(model, reference, step, scaler.get_scale(), (1, 0) if step == 1 else None)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            norms.append(scaler.last_grad_norm.item())
            monitor.step(torch.tensor(float(step)), tokens=10)
    return monitor.records, norms


def test_a_rank_monitors_its_pieces_and_everyones_decisions(ranks):
    (mine, norms), (theirs, _) = ranks.run(watched, world=2)
    for step in (0, 2):
        own = [record[step]["grad_norm"] for record in (mine, theirs)]
        assert math.hypot(*own) == pytest.approx(norms[step], rel=1e-6)
        assert all(0 < record[step]["update_ratio"] < 1 for record in (mine, theirs))
    for records in (mine, theirs):
        assert [record["skipped"] for record in records] == [0.0, 1.0, 0.0]
        assert [record["scale"] for record in records] == [SCALE, SCALE, SCALE / 2]
    assert math.isfinite(mine[1]["grad_norm"])
    assert not math.isfinite(theirs[1]["grad_norm"])
