"""torch.set_default_device and torch.set_default_dtype are the user's: nothing inside a step may depend on them."""

import itertools

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


def public_functions():
    """All results of other calls in a training loop, on tensors with explicit dtypes."""
    f32, bf16 = torch.float32, torch.bfloat16
    x, weight = torch.linspace(-1, 1, 24, dtype=f32).view(4, 6), torch.linspace(-1, 1, 36, dtype=f32).view(6, 6)
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (f32, bf16)]
    for p in params:
        p.grad = torch.full_like(p, 3.0)
    yield ak.get_total_norm([p.grad for p in params])
    yield ak.clip_grad_norm_(params, 1.0)
    yield ak.clip_grad_norm_(params[:1], 1.0, torch.inf)
    yield from (p.grad for p in params)
    for optimizer in (torch.optim.SGD(params, lr=0.1), ak.optim.LAMB(params, max_grad_norm=1.0, ema_decay=0.5)):
        scaler = ak.GradScaler("cpu", max_consecutive_skips=5)
        for bad in (0, 1):
            scaler.scale(torch.ones((), dtype=f32))
            for p in params:
                p.grad = torch.full_like(p, torch.inf if bad else 8.0)
            if bad:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            yield from (scaler.skipped_steps, *(p.detach().clone() for p in params))
    weight.requires_grad_()
    with torch.autocast("cpu", bf16):
        out = ak.mlp(ak.linear(x, weight, activation="gelu"), weight, None, weight, activation="silu")
        out = ak.addmm(ak.matmul(out, weight), out, weight)
    out.sum().backward()
    yield from (out.detach(), weight.grad)
    rows, classes = x.detach().repeat(65, 1)[:257], torch.arange(257) % 6
    probabilities = torch.full((257, 6), 1 / 6, dtype=f32)
    for dtype, reduction in itertools.product((f32, torch.float16), ("mean", "sum")):
        for target in (classes, probabilities.to(dtype)):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (rows, weight, weight[0])]
            loss = ak.cross_entropy(leaves[0], target, reduction=reduction)
            fused = ak.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], reduction=reduction)
            (loss + fused).backward()
            yield from (loss.detach(), fused.detach(), *(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_default_dtype(default):
    expected = [train(make) for make in MAKERS.values()] + list(public_functions())
    torch.set_default_dtype(default)
    try:
        found = [train(make) for make in MAKERS.values()] + list(public_functions())
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
