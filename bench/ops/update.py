"""lamb_, lion_, muon_ and sgd_: the updates over a parameter list in FP32, through ak.optim, against torch's fused SGD and its
Muon. torch has no LAMB and no Lion: its side is written in torch's own multi-tensor operations, the way torch.optim does it
without a fused kernel. A step of Muon includes the matrix products."""

import itertools
from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak

from ..harness.case import Call, Case, Scope, Tensors
from . import lists
from .providers import compared

# The check takes two steps, since only the second reads the state that the first wrote, and the second turns against the
# first, or the sign of Lion's moment would never matter.
STEPS, SECOND = 2, -0.05

LR, WEIGHT_DECAY = 1e-2, 0.1
LAMB_BETAS, EPS, LION_BETAS = (0.9, 0.999), 1e-6, (0.9, 0.99)
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


def _cases(
    op: str,
    scope: Scope,
    *,
    bytes_per_param: int,
    flops: Callable[[list[lists.Shape]], int],
    torch_step: Callable[[Tensors], Callable[[], None]],
    our_step: Callable[[Tensors], Callable[[], None]],
    reference: Callable[[torch.Tensor, Tensors], torch.Tensor],
    bound: float = 1e-6,
    takes: Callable[[lists.Shape], bool] = lambda shape: True,
) -> Iterator[Case]:
    """One case a list, of the shapes that the optimizer takes. The steps are made from parameters that carry gradients;
    `reference(param, grads)` takes a step of one parameter in float64 with each of the gradients."""
    for name, shapes in lists.chosen(scope).items():
        shapes = list(filter(takes, shapes))
        count = lists.numel(shapes)
        yield compared(
            op,
            scope.device,
            lambda inputs: _prepare(inputs, our_step),
            {"torch": lambda inputs: _prepare(inputs, torch_step)},
            shape=name,
            dtype="fp32",
            bytes=bytes_per_param * count,
            flops=flops(shapes),
            inputs=lambda generator, shapes=shapes: [lists.draw(shapes, torch.float32, generator) for _ in range(2)],
            reference=lambda inputs: {
                "params": ([reference(p.double(), gradients(g.double())) for p, g in zip(*inputs, strict=True)], bound)
            },
            check_calls=STEPS,
        )


def gradients(grad: torch.Tensor) -> Tensors:
    """The gradients of the check's steps."""
    return [grad, SECOND * grad]


def _prepare(inputs: list[Tensors], make: Callable[[Tensors], Callable[[], None]]) -> Call:
    params, grads = inputs
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    step = make(params)
    calls = itertools.count()

    def call():
        step()
        if next(calls) == 0:
            torch._foreach_mul_(grads, SECOND)
        return {"params": params}

    return call


def lamb(scope: Scope) -> Iterator[Case]:
    options = {"lr": LR, "betas": LAMB_BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    yield from _cases(
        "lamb_",
        scope,
        # The trust ratio needs norms of the whole tensor before a weight moves: weight, gradient and moments are read
        # and the moments written; then weight and moments are read once more and the weight is written.
        bytes_per_param=40,
        flops=lambda shapes: 24 * lists.numel(shapes),
        torch_step=torch_lamb,
        our_step=lambda params: ak.optim.LAMB(params, **options).step,
        reference=exact_lamb,
    )


def torch_lamb(params: Tensors) -> Callable[[], None]:
    grads = [param.grad for param in params]
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
    powers = torch.ones(2, dtype=torch.float64, device=params[0].device)  # of the betas, on the device for CUDA graphs
    betas = torch.tensor(LAMB_BETAS, dtype=torch.float64, device=params[0].device)

    def step():
        powers.mul_(betas)
        correction1, correction2 = (1 - powers).float().unbind()
        torch._foreach_lerp_(exp_avgs, grads, 1 - LAMB_BETAS[0])
        torch._foreach_mul_(exp_avg_sqs, LAMB_BETAS[1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - LAMB_BETAS[1])
        denominator = torch._foreach_div(exp_avg_sqs, correction2)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, EPS)
        update = torch._foreach_div(exp_avgs, correction1)
        torch._foreach_div_(update, denominator)
        torch._foreach_add_(update, params, alpha=WEIGHT_DECAY)
        ratio = torch.stack(torch._foreach_norm(params)) / torch.stack(torch._foreach_norm(update))
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0) * -LR  # 1 where a norm is 0
        torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update)

    return step


def exact_lamb(p: torch.Tensor, grads: Tensors) -> torch.Tensor:
    """You et al., ICLR 2020, with the identity as the scaling function and bias correction."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, g in enumerate(grads, start=1):
        m = LAMB_BETAS[0] * m + (1 - LAMB_BETAS[0]) * g
        v = LAMB_BETAS[1] * v + (1 - LAMB_BETAS[1]) * g * g
        update = (m / (1 - LAMB_BETAS[0] ** step)) / ((v / (1 - LAMB_BETAS[1] ** step)).sqrt() + EPS) + WEIGHT_DECAY * p
        p = p - LR * p.norm() / update.norm() * update
    return p


def lion(scope: Scope) -> Iterator[Case]:
    yield from _cases(
        "lion_",
        scope,
        bytes_per_param=20,  # reads weight, gradient, moment; writes weight, moment
        flops=lambda shapes: 8 * lists.numel(shapes),
        torch_step=torch_lion,
        our_step=lambda params: ak.optim.Lion(params, lr=LR, betas=LION_BETAS, weight_decay=WEIGHT_DECAY).step,
        reference=exact_lion,
    )


def torch_lion(params: Tensors) -> Callable[[], None]:
    grads, moments = [param.grad for param in params], [torch.zeros_like(param) for param in params]

    def step():
        direction = torch._foreach_lerp(grads, moments, LION_BETAS[0])
        torch._foreach_sign_(direction)
        torch._foreach_mul_(params, 1 - LR * WEIGHT_DECAY)
        torch._foreach_add_(params, direction, alpha=-LR)
        torch._foreach_lerp_(moments, grads, 1 - LION_BETAS[1])

    return step


def exact_lion(p: torch.Tensor, grads: Tensors) -> torch.Tensor:
    moment = torch.zeros_like(p)
    for g in grads:
        p = p * (1 - LR * WEIGHT_DECAY) - LR * (LION_BETAS[0] * moment + (1 - LION_BETAS[0]) * g).sign()
        moment = LION_BETAS[1] * moment + (1 - LION_BETAS[1]) * g
    return p


def sgd(scope: Scope) -> Iterator[Case]:
    yield from _cases(
        "sgd_",
        scope,
        bytes_per_param=20,  # reads weight, gradient, momentum; writes weight, momentum
        flops=lambda shapes: 6 * lists.numel(shapes),
        torch_step=lambda params: torch.optim.SGD(params, fused=True, **SGD).step,
        our_step=lambda params: ak.optim.SGD(params, **SGD).step,
        reference=exact_sgd,
    )


def exact_sgd(p: torch.Tensor, grads: Tensors) -> torch.Tensor:
    """In the first step the momentum buffer is the gradient itself."""
    momentum = torch.zeros_like(p)
    for g in grads:
        momentum = SGD["momentum"] * momentum + g + SGD["weight_decay"] * p
        p = p - SGD["lr"] * momentum
    return p


def muon(scope: Scope) -> Iterator[Case]:
    """All matrices but the embedding. Weights of unit size move by some 1e-3 of themselves, of which 16-bit products lose up to
    3e-2."""
    yield from _cases(
        "muon_",
        scope,
        bytes_per_param=24,  # reads gradient, momentum, weight; writes momentum, weight; iterates out and in
        flops=lambda shapes: sum(15 * min(s) ** 2 * max(s) + 5 * min(s) ** 3 for s in shapes),  # symmetric products
        torch_step=lambda params: torch.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY).step,
        our_step=lambda params: ak.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY).step,
        reference=exact_muon,
        bound=1e-3,
        takes=lambda shape: len(shape) == 2 and max(shape) < 50_000,
    )


def exact_muon(p: torch.Tensor, grads: Tensors, ratio: float | None = None) -> torch.Tensor:
    """Jordan et al., 2024; the learning rate is multiplied by `ratio`, by default that of the paper."""
    a, b, c = 3.4445, -4.775, 2.0315
    ratio = max(1.0, p.shape[0] / p.shape[1]) ** 0.5 if ratio is None else ratio
    momentum = torch.zeros_like(p)
    for g in grads:
        momentum = 0.95 * momentum + 0.05 * g
        x = 0.95 * momentum + 0.05 * g
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        p = p * (1 - LR * WEIGHT_DECAY) - LR * ratio * x
    return p


CASES = (lamb, lion, muon, sgd)
