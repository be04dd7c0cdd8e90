"""Every optimizer with every option on the GPU: the same bits as on the CPU, no host sync, graphs, many and huge tensors."""

import math

import pytest
import torch

import amp_kernels as ak

from ..helpers.generators import normal
from . import launches

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: Tails, nothing, one element, several chunks, and memory in another order.
SHAPES = ((7, 5), (0, 3), (), (1031,), (257, 129), (6, 5, 4, 3), (70_003,), (66, 96), (3, 40, 44))

#: class, dtype of the parameters, options
OPTIMIZERS = {
    "adamw": (ak.optim.AdamW, F32, {"lr": 1e-2}),
    "adamw amsgrad": (ak.optim.AdamW, F32, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "adamw shadow": (ak.optim.AdamW, F32, {"lr": 1e-2, "shadow_dtype": BF16, "ema_decay": 0.9}),
    "adamw master": (ak.optim.AdamW, BF16, {"lr": 1e-2, "ema_decay": 0.9, "zero_grads": True}),
    "adamw split bf16": (ak.optim.AdamW, BF16, {"lr": 1e-2, "master_weights": "split", "state_dtype": BF16}),
    "adamw split fp16": (ak.optim.AdamW, F16, {"lr": 1e-2, "master_weights": "split", "ema_decay": 0.5}),
    "adamw stochastic": (ak.optim.AdamW, BF16, {"lr": 1e-2, "master_weights": "none", "seed": 7}),
    "adamw rne": (ak.optim.AdamW, F16, {"lr": 1e-2, "master_weights": "none_rne"}),
    "adam": (ak.optim.Adam, F32, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "sgd": (ak.optim.SGD, F32, {"lr": 1e-2}),
    "sgd momentum": (ak.optim.SGD, BF16, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd nesterov": (ak.optim.SGD, F16, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "master_weights": "split"}),
    "lion": (ak.optim.Lion, BF16, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion stochastic": (ak.optim.Lion, F16, {"lr": 1e-2, "master_weights": "none", "ema_decay": 0.9}),
    "lamb": (ak.optim.LAMB, F32, {"lr": 1e-2, "shadow_dtype": F16}),
    "adamw 8 bits": (ak.optim.AdamW, F32, {"lr": 1e-2, "state_dtype": "8bit", "amsgrad": True, "cautious": True}),
    "adamw 8 bits split24": (ak.optim.AdamW, BF16, {"lr": 1e-2, "master_weights": "split24", "state_dtype": "8bit"}),
    "lion 8 bits": (ak.optim.Lion, F16, {"lr": 1e-2, "master_weights": "none", "state_dtype": "8bit", "cautious": True}),
    "lamb 8 bits": (ak.optim.LAMB, F32, {"lr": 1e-2, "state_dtype": "8bit"}),
    "lamb split": (ak.optim.LAMB, BF16, {"lr": 1e-2, "master_weights": "split", "ema_decay": 0.9}),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", OPTIMIZERS)
BACKENDS = pytest.mark.parametrize("backend", ["cuda", "triton"])


def weights(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    values[5] = values[5].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(value.to(device)) for value in values]


def training(name: str, device: str):
    """Parameters, their optimizer in two groups, and a scaler."""
    kind, dtype, options = OPTIMIZERS[name]
    params = weights(dtype, device)
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]
    return params, kind(groups, **options), ak.GradScaler(device, init_scale=1024.0)


def take(params, optimizer, scaler, number: int, max_norm: float | None = None) -> None:
    """The step of this number; the third one overflows."""
    generator = torch.Generator().manual_seed(100 + number)
    scaler.scale(torch.ones((), device=params[0].device))
    for param in params:
        grad = 100 * torch.randn(param.shape, generator=generator)
        if number == 2 and param.numel() > 50_000:
            grad[-1] = torch.inf
        grad = grad.to(param.device, param.dtype)
        param.grad = torch.empty_like(param).copy_(grad)
    scaler.step(optimizer, max_norm=max_norm)
    scaler.update()


def results(params, optimizer) -> dict[str, torch.Tensor]:
    found = {f"parameter {i}": param.detach() for i, param in enumerate(params)}
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{key} {i}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    found |= {f"gradient {i}": param.grad for i, param in enumerate(params)}
    return {key: value.cpu() for key, value in found.items()}


@EVERY
@BACKENDS
def test_the_bits_are_those_of_the_cpu(name, backend):
    """Five steps, of which one overflows. LAMB's ratios come from norms, whose order of summation differs."""
    cpu, gpu = training(name, "cpu"), training(name, DEVICE)
    for number in range(5):
        take(*cpu, number)
        with ak.backend(backend):
            take(*gpu, number)
    expected, actual = results(*cpu[:2]), results(*gpu[:2])
    assert expected.keys() == actual.keys()
    tolerance = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2} if "lamb" in name else {}
    for key, value in expected.items():
        allowed = tolerance.get(value.dtype, 0.0)
        torch.testing.assert_close(actual[key], value, rtol=allowed, atol=allowed / 10, equal_nan=True, msg=key)
    assert gpu[2].get_scale() == cpu[2].get_scale() == 512.0


@EVERY
@BACKENDS
def test_a_clipped_step_does_not_wait(name, backend):
    params, optimizer, scaler = training(name, DEVICE)
    with ak.backend(backend):
        for number in range(2):  # state is created, kernels are loaded
            take(params, optimizer, scaler, number, max_norm=1.0)
        scaler.scale(torch.ones((), device=DEVICE))
        with launches.no_waits():
            for _ in range(3):
                scaler.step(optimizer, max_norm=1.0)
                scaler.update()
                optimizer.step()
    assert scaler.last_grad_norm.isfinite().item()


@EVERY
@BACKENDS
def test_a_captured_step_replays(name, backend):
    """The learning rate is a tensor that changes between replays; one replay overflows."""
    eager, captured = training(name, DEVICE), training(name, DEVICE)
    for _, optimizer, _ in (eager, captured):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=DEVICE)
            group["capturable"] = True
    with ak.backend(backend):
        for run in (eager, captured):
            for number in range(2):
                take(*run, number, max_norm=1.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured[2].step(captured[1], max_norm=1.0)
            captured[2].update()
        for number in range(4):
            for params, optimizer, _ in (eager, captured):
                for i, param in enumerate(params):
                    param.grad.fill_(1.0 + i + number)
                if number == 1:
                    params[-1].grad[-1] = torch.inf
                for group in optimizer.param_groups:
                    group["lr"].fill_(1e-3 * (1 + number))
            graph.replay()
            eager[2].step(eager[1], max_norm=1.0)
            eager[2].update()
    for (key, value), other in zip(results(*eager[:2]).items(), results(*captured[:2]).values(), strict=True):
        assert torch.equal(value, other), key
    assert captured[2].get_scale() == eager[2].get_scale()


@pytest.mark.parametrize("name", ["adamw", "adamw shadow", "adamw split bf16", "lion"])
def test_a_graphed_step_is_that_of_the_plain_loop(name):
    """``ak.graph_step`` from the first step on, with a schedule and an overflow."""
    kind, dtype, options = OPTIMIZERS[name]
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 8)
        model = ak.convert(torch.nn.Sequential(*layers)).to(DEVICE, dtype)
        optimizer = kind(model.parameters(), **{**options, "lr": torch.tensor(1e-2, device=DEVICE)})
        scaler = ak.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)

        def train(x, model=model, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=BF16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
            return loss

        step = ak.graph_step(train, model=model, optimizer=optimizer, scaler=scaler) if graphed else train
        losses = []
        for number in range(5):
            x = normal(32, 64, seed=number).to(DEVICE, dtype)
            losses.append(step(x * (torch.inf if number == 2 else 1.0)).clone())
            optimizer.param_groups[0]["lr"].mul_(0.5)
        found.append([*losses, *model.state_dict().values(), *results(list(model.parameters()), optimizer).values()])
        assert scaler.skipped_steps.item() == 1
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["adamw", "adamw split bf16", "sgd momentum", "lion", "lamb"])
def test_ten_thousand_tensors(name):
    """64 elements each: the same as one tensor of all (LAMB has one ratio each: the same as each alone)."""
    kind, dtype, options = OPTIMIZERS[name]
    generator = torch.Generator(DEVICE).manual_seed(0)
    whole = torch.randn(10_000, 64, generator=generator, device=DEVICE).to(dtype)
    grads = torch.randn(10_000, 64, generator=generator, device=DEVICE).to(dtype)
    rows = [torch.nn.Parameter(row.clone()) for row in whole]
    optimizer = kind(rows, **options)
    for _ in range(2):
        for row, grad in zip(rows, grads, strict=True):
            row.grad = grad
        optimizer.step()
    together = torch.stack([row.detach() for row in rows])
    for piece in [slice(0, 1), slice(9_999, 10_000)] if name == "lamb" else [slice(0, 10_000)]:
        one = torch.nn.Parameter(whole[piece].clone())
        alone = kind([one], **options)
        for _ in range(2):
            one.grad = grads[piece].clone()
            alone.step()
        torch.testing.assert_close(together[piece], one.detach(), rtol=1e-6 if name == "lamb" else 0, atol=0)


def test_one_pass_over_mixed_dtypes_and_groups():
    """fp32, fp16 and bf16 parameters with their own masters in three groups: still one launch of the update."""
    params = [torch.nn.Parameter(torch.randn(1000 + i, device=DEVICE).to((F32, F16, BF16)[i % 3])) for i in range(30)]
    groups = [{"params": params[i::3], "lr": 10.0**-i} for i in range(3)]
    optimizer = ak.optim.AdamW(groups)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    names = launches.kernels(optimizer.step)
    assert len(names) == 2, names  # what a step decides, and the step


@BACKENDS
def test_the_clipping_functions(backend):
    generator = torch.Generator(DEVICE).manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(n, device=DEVICE)) for n in (1, 1000, 70_003)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=DEVICE)
    exact = math.sqrt(sum(param.grad.double().square().sum().item() for param in params))
    largest = max(param.grad.abs().max().item() for param in params)
    with ak.backend(backend):
        total = ak.get_total_norm([param.grad for param in params])
        assert ak.get_total_norm([param.grad for param in params], math.inf).item() == largest
        with launches.no_waits():
            clipped = ak.clip_grad_norm_(params, 1.0)
    assert total.item() == pytest.approx(exact, rel=1e-6)
    assert clipped.item() == pytest.approx(exact, rel=1e-6)
    after = math.sqrt(sum(param.grad.double().square().sum().item() for param in params))
    assert after == pytest.approx(1.0, rel=1e-5)


def test_torchs_scaler_drives_our_optimizer_and_ours_drives_torchs():
    """Without a sync, and with the same result as ours drives ours."""

    def run(scaler_class, optimizer_class) -> list[torch.Tensor]:
        params = weights(F32, DEVICE)
        optimizer = optimizer_class(params, lr=1e-2, fused=True)
        scaler = scaler_class(DEVICE, init_scale=1024.0)
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            scaler.scale(torch.ones((), device=DEVICE))
            for param in params:
                grad = 100 * torch.randn(param.shape, generator=generator)
                param.grad = torch.empty_like(param).copy_(grad.to(DEVICE))
            if number == 1:
                params[0].grad[0] = torch.nan
            with launches.no_waits(number == 3):  # state is created, kernels are loaded
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() == 512.0
        return [param.detach() for param in params]

    wanted = run(ak.GradScaler, ak.optim.AdamW)
    for pair in ((torch.amp.GradScaler, ak.optim.AdamW), (ak.GradScaler, torch.optim.AdamW)):
        torch.testing.assert_close([*run(*pair)], [*wanted], rtol=1e-4, atol=1e-5)
