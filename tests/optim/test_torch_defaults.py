"""torch.set_default_device and torch.set_default_dtype are the user's: nothing inside a step may depend on them."""

import pytest
import torch

import amp_kernels as ak


def train(make, dtype=torch.float32):
    model = ak.nn.Linear(3, 2, device="cpu", dtype=dtype)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    optimizer, scaler = make(model.parameters()), ak.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict())
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3, device="cpu", dtype=dtype)).sum()).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())
    assert (scaler.skipped_steps.item(), scaler.last_step_skipped) == (0, False)
    return model.weight.detach()


MAKERS = {
    "adamw": lambda p: ak.optim.AdamW(p, lr=0.1, shadow_dtype=torch.bfloat16),
    "sgd": lambda p: ak.optim.SGD(p, lr=0.1),
    "momentum": lambda p: ak.optim.SGD(p, lr=0.1, momentum=0.9, master_weights="split"),
    "tensor lr": lambda p: ak.optim.AdamW(p, lr=torch.full((), 0.1, dtype=torch.float32, device="cpu")),
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@EACH
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_device(make, backend, dtype):
    """As with set_default_device("cuda"): what the host reads must stay on the CPU. On meta any slip is an error."""
    with ak.backend(backend):
        expected = train(make, dtype)
        with torch.device("meta"):
            assert torch.equal(train(make, dtype), expected)


@EACH
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype(make, default):
    expected = train(make)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(train(make), expected)
    finally:
        torch.set_default_dtype(torch.float32)
