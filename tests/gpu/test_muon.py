"""Muon on the GPU: beside the CPU, without host syncs, launches that do not grow with the matrices, and as a graph."""

import pytest
import torch

import amp_kernels as ak

from . import launches

pytestmark = pytest.mark.gpu

DEVICE, BF16, F32 = "cuda", torch.bfloat16, torch.float32
SHAPES = [(256, 384), (384, 256), (256, 384), (129, 65), (4, 96, 128), (40,), (8, 1)]
OPTIONS = [(F32, {"shadow_dtype": BF16}), (BF16, {"master_weights": "split", "state_dtype": BF16}), (BF16, {})]


def trained(device, dtype, options, count, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]
    muon, adamw = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    groups = [{"params": muon}, *([{"params": adamw, "algorithm": "adamw"}] if adamw else [])]
    optimizer = ak.optim.Muon(groups, lr=0.02, max_grad_norm=1.0, skip_nonfinite=True, **options)
    for number in range(count):
        for p in params:
            grad = torch.randn(p.shape, generator=generator)
            if number == 2:
                grad.view(-1)[-1] = torch.inf
            p.grad = grad.to(device, dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(("dtype", "options"), OPTIONS)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_five_steps_beside_the_cpu(dtype, options, backend):
    """The momentum has the CPU's bits up to the clip factor; iterates may be products of another precision."""
    with ak.backend(backend):
        ours, optimizer = trained(DEVICE, dtype, options, 5)
    theirs, reference = trained("cpu", dtype, options, 5)
    start, _ = trained("cpu", dtype, options, 0)
    for p, q, s in zip(ours, theirs, start, strict=True):
        state, wanted = optimizer.state[p], reference.state[q]
        name = "momentum_buffer" if p.dim() > 1 else "exp_avg"
        torch.testing.assert_close(state[name].cpu(), wanted[name], rtol=2.0**-7, atol=1e-7)
        moved = (q.float() - s.float()).norm()
        assert (p.cpu().float() - q.float()).norm() <= 5e-2 * moved + (
            2.0**-8 * q.float().norm() if dtype == BF16 else 0
        )


def test_no_host_sync_and_no_memory_kept():
    _, optimizer = trained(DEVICE, F32, {}, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with launches.no_waits():
        optimizer.step()
    assert torch.cuda.memory_allocated() == before


def test_launches_do_not_grow_with_the_matrices_of_a_shape():
    counts = []
    for many in (2, 12):
        _, optimizer = trained(DEVICE, F32, {}, 3, shapes=[(256, 384)] * many)
        counts.append(len(launches.kernels(optimizer.step)))
    assert counts[0] == counts[1]


def test_a_graphed_step_is_that_of_the_plain_loop():
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(DEVICE)
        hidden, *others = model.parameters()
        groups = [{"params": [hidden]}, {"params": others, "algorithm": "adamw"}]
        optimizer = ak.optim.Muon(groups, lr=torch.tensor(1e-2, device=DEVICE))

        def train(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = ak.graph_step(train, model=model, optimizer=optimizer) if graphed else train
        for number in range(5):
            step(torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE))
            optimizer.param_groups[0]["lr"].mul_(0.5)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
