"""A NaN on one of two ranks: its rank names the module, the other one has none to name, and both skip the step alike."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import amp_kernels as ak
from amp_kernels.numerics import NonFiniteError, StepMonitor, find_nonfinite

from ..scaled_gradient import ScaledGradient

WORLD = 2


class Planted(torch.nn.Module):
    """Passes on what it gets; a NaN in its place, forward or backward, when told to."""

    forward_factor = backward_factor = 1.0

    def forward(self, x):
        return ScaledGradient.apply(x * self.forward_factor, self.backward_factor)


def work(where, bad_rank):
    """Three steps; in the second, ``bad_rank`` has the NaN: its reports, the monitor's records and the weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), Planted(), torch.nn.Linear(4, 1)))
    optimizer, scaler = ak.optim.SGD(model.parameters(), lr=0.1), ak.GradScaler("cpu", init_scale=8.0)
    reports = []
    # With a scaler, what is not finite in the backward alone is an overflow, which it handles.
    watch = find_nonfinite(model, scaler if where == "forward" else None)
    with StepMonitor(optimizer, scaler) as monitor, watch:
        for step in range(3):
            planted = math.nan if step == 1 and dist.get_rank() == bad_rank else 1.0
            setattr(model.module[1], f"{where}_factor", planted)
            loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
            scaler.scale(loss).backward()
            try:
                watch.check()
            except NonFiniteError as error:
                reports.append(str(error))
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss.detach())
            optimizer.zero_grad()
    return reports, monitor.records, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_nan_on_one_rank_is_named_there_and_skipped_by_all(ranks, where, bad_rank):
    found = ranks.run(work, where, bad_rank, world=WORLD)
    assert found[1 - bad_rank][0] == []
    (report,) = found[bad_rank][0]
    assert report.startswith(f"rank {bad_rank}, step 1: made in the {where} of 'module.1' (Planted)")
    for rank, (_, records, weights) in enumerate(found):
        assert [record["skipped"] for record in records] == [0, 1, 0]
        assert [record["scale"] for record in records] == [8.0, 8.0, 4.0]
        assert [math.isnan(record["grad_norm"]) for record in records] == [False, True, False]  # the ranks' mean
        lost = where == "forward" and rank == bad_rank
        assert [math.isnan(record["loss"]) for record in records] == [False, lost, False]
        assert all(map(math.isfinite, weights))
    assert found[0][2] == found[1][2]
