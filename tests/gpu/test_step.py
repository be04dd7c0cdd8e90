"""A whole training step on the GPU: no host sync, capturable, and the same as on the CPU."""

import pytest
import torch

import amp_kernels as ak

pytestmark = pytest.mark.gpu


def make(device="cuda", seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(device)
    model = ak.convert(model)
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = ak.GradScaler(device, init_scale=1024.0)
    x = torch.randn(32, 64).to(device)
    y = torch.randint(8, (32,)).to(device)
    return model, optimizer, scaler, x, y


def step(model, optimizer, scaler, x, y):
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(x.device.type, dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return loss


def test_no_host_sync():
    training = make()
    step(*training)  # first call: state is created, kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(*training)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_capture_replays_the_same_training():
    eager, captured = make(), make()
    for training in (eager, captured):
        for _ in range(3):
            step(*training)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        step(*captured)
    for _ in range(5):
        graph.replay()
        step(*eager)
    for expected, actual in zip(eager[0].parameters(), captured[0].parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_overflow_skips_and_backs_off():
    model, optimizer, scaler, x, y = make()
    step(model, optimizer, scaler, x, y)
    before = [p.detach().clone() for p in model.parameters()]
    scale = scaler.get_scale()
    step(model, optimizer, scaler, x * float("inf"), y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == scale / 2


def test_training_follows_the_cpu():
    gpu, cpu = make("cuda"), make("cpu")
    for _ in range(20):
        losses = step(*gpu).item(), step(*cpu).item()
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
