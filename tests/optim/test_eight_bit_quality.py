"""Training with moments in 8 bits: on the problems where other 8-bit formats fail, no update is much larger than with fp32 moments,
and losses stay where they are."""

import pytest
import torch

import amp_kernels as ak

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
LR = 1e-2


def quadratic():
    """Curvatures of six decades beside one another, in every block of 32."""
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(64, 64, generator=generator)
    curvature = 10.0 ** -(torch.arange(64 * 64) % 6).float().view(64, 64)
    for _ in range(400):
        noise = 1 + 0.1 * torch.randn(64, 64, generator=generator)
        yield (
            lambda x, noise=noise: curvature * (x - wanted) * noise,
            lambda x: (curvature * (x - wanted).square()).sum() / 2,
        )


def rare_rows():
    """An embedding of 512 rows, of which the k-th is seen with a probability of about 1 / k, with columns of four decades."""
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(512, 64, generator=generator)
    scale = 10.0 ** -(torch.arange(64) % 5).float()
    rows = 1.0 / torch.arange(1, 513)
    for _ in range(400):
        seen = torch.zeros(512, 1).index_fill_(0, torch.multinomial(rows, 16, True, generator=generator), 1.0)
        yield (
            lambda x, seen=seen: seen * scale * (x - wanted),
            lambda x: (rows[:, None] * scale * (x - wanted).square()).sum(),
        )


def falling():
    """A gradient of 1e-3 after a phase of 1: second moments must follow it down."""
    for step in range(1500):
        size = 1.0 if step < 50 else 1e-3
        yield lambda x, size=size: torch.full_like(x, size), lambda x: torch.zeros(())


PROBLEMS = {"quadratic": (quadratic, 64), "rare rows": (rare_rows, 512), "falling": (falling, 64)}


def largest_update(problem, name, **options):
    """The largest update over the learning rate, and the loss at the end."""
    make, rows = PROBLEMS[problem]
    x = torch.nn.Parameter(torch.zeros(rows, 64))
    optimizer = getattr(ak.optim, name)([x], lr=LR, weight_decay=0.0, **options)
    largest = 0.0
    for gradient, loss in make():  # noqa: B007 (the last one is read)
        before = x.detach().clone()
        x.grad = gradient(before)
        optimizer.step()
        largest = max(largest, ((x.detach() - before).abs().max() / LR).item())
    return largest, loss(x.detach()).item()


@pytest.mark.parametrize(
    ("problem", "name"), [*((it, "AdamW") for it in PROBLEMS), ("quadratic", "LAMB"), ("rare rows", "LAMB")]
)
def test_no_update_is_much_larger(problem, name):
    wanted, usual = largest_update(problem, name)
    found, loss = largest_update(problem, name, state_dtype="8bit")
    assert found <= 3 * wanted
    assert loss <= 1.5 * usual + 1e-6
