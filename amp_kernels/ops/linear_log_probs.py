"""``linear_log_probs``: the log-probabilities of tokens, and entropies, from a language model's last layer in fp32.

The sums of a product of 16-bit operands are fp32; a logit that is rounded to 16 bits is the largest error of a log-probability, 7.8e-3
in bf16. Here a chunk's logits stay fp32 (``_head.py``). The forward keeps three numbers of each row: the largest logit ``m``, ``S``, the
sum of ``exp(x - m)``, and ``U``, that of ``(x - m) exp(x - m)``. So ``l = (x_y - m) - log S`` is never above 0 and ``H = log S - U / S``
never below. The backward computes the logits once more and reads them once (``cross_entropy_rows_``), for

    dz_j = (g_l ([j = y] - p_j) - g_h p_j (x_j - m - U / S)) / T,    p_j = exp(x_j - m) / S,

which is made in fp32 and rounded once to 16 bits, for both of its products.

float64 and torch.func transforms take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, overload

import torch
from torch import Tensor

from .._checks.lists import FLOATS, HALF_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._dispatch import autocast
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from .._raw import cross_entropy_rows
from .._sharding.dtensor import refuse_dtensors
from . import _loss, _main_grad
from ._autograd import needs_gradient, under_transform
from ._head import Gradients, Head, check_head, chunk_and_blocks, finished, fp16_scale, plain_logits
from ._linear import gradient_dtype
from ._products import working_dtype
from ._shadows import fresh_shadow, with_shadow
from ._tensors import cast, flat, reshaped

_OP = "linear_log_probs"
_MOST_OF_ENTROPY = 16.0  # |p (log p + H)| is at most 3.0 at 152,064 classes, and grows with their logarithm


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, target, temperature, shadow, ignore_index, entropy, dtype, chunk, blocks):
        ctx.set_materialize_grads(False)
        _main_grad.refuse_data_parallel(weight)
        if blocks:
            _main_grad.prepare(bias)
        w = cast(weight, dtype) if shadow is None else shadow
        ctx.options = ignore_index, chunk, blocks
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        head = Head(cast(x, dtype), w, bias, chunk, blocks, torch.float32)
        *results, statistics = _forward(head, target, temperature, ignore_index, entropy)
        ctx.save_for_backward(head.x, w, bias, target, temperature, statistics)
        return tuple(results)

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        _loss.once(_OP)
        return *gradients_of(ctx, grad_log_probs, grad_entropy), *(None,) * 8


def gradients_of(
    ctx: torch.autograd.function.FunctionCtx,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    reduce: Callable[[Tensor], None] | None = None,
) -> Gradients:
    """The gradients of input, weight and bias. ``reduce`` sums that of the input, in fp32, over the ranks that hold other classes."""
    x, w, bias, target, temperature, statistics = ctx.saved_tensors
    ignore_index, chunk, blocks = ctx.options
    # The kernel's gradient is that of -l.
    factors = [None if g is None else sign * g.float() for sign, g in ((-1, grad_log_probs), (1, grad_entropy))]
    if temperature is not None:
        factors = [None if f is None else f / temperature for f in factors]
    factor, entropy_factor = factors
    factor = torch.zeros_like(entropy_factor) if factor is None else factor
    head, ignored = Head(x, w, bias, chunk, blocks, torch.float32), target == ignore_index
    x_dtype, unscale = torch.float32 if reduce else ctx.dtypes[0], factor.new_ones(())
    if x.dtype == torch.float16 and not blocks and x.shape[0]:
        size = factor.abs() if entropy_factor is None else factor.abs() + _MOST_OF_ENTROPY * entropy_factor.abs()
        scale, unscale = fp16_scale(size, ignored)
        factor, x_dtype = factor * scale, torch.float32
        entropy_factor = None if entropy_factor is None else entropy_factor * scale

    def make(rows, logits, dz):
        more = {"known": statistics[:, rows], "ignore_index": ignore_index}
        if temperature is not None:
            more["temperature"] = temperature[rows]
        if entropy_factor is not None:
            more["entropy_factor"] = entropy_factor[rows]
        cross_entropy_rows.op(logits, target[rows], None, factor[rows], None, dz, **more)

    gradients = head.gradients(ctx, ignored, x_dtype, make)
    if reduce is not None and gradients[0] is not None:
        reduce(gradients[0])
    return gradients if blocks else finished(ctx, gradients, unscale)


def _forward(
    head: Head, target: Tensor, temperature: Tensor | None, ignore_index: int, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The log-probabilities, the entropies and the statistics of rows, always written by the same kernel: equal bits with and without
    entropies and gradients."""
    loss = torch.empty(head.x.shape[0], dtype=torch.float32, device=head.x.device)
    statistics = loss.new_empty(3 if entropy else 2, loss.shape[0])
    fill_statistics(head, target, temperature, ignore_index, statistics, loss)
    entropies = statistics[1].log() - statistics[2] / statistics[1] if entropy else None
    return 0.0 - loss, entropies, statistics


def fill_statistics(
    head: Head,
    target: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    statistics: Tensor,
    loss: Tensor,
    look: Callable[[slice, Tensor], None] | None = None,
) -> None:
    """Writes what ``cross_entropy_rows_`` has to tell of the head's rows; ``look`` sees each chunk's logits."""
    for rows, logits in head.chunks():
        more = {"statistics": statistics[:, rows], "ignore_index": ignore_index}
        if temperature is not None:
            more["temperature"] = temperature[rows]
        cross_entropy_rows.op(logits, target[rows], None, None, loss[rows], None, **more)
        if look is not None:
            look(rows, logits)
        del logits


def _composed(x, weight, target, bias, temperature, ignore_index, entropy, dtype) -> tuple[Tensor, Tensor | None]:
    ignored = target == ignore_index
    logits = plain_logits(x.masked_fill(ignored[:, None], 0), weight, bias, dtype, _result_dtype(dtype))
    if temperature is not None:
        logits = logits / temperature.masked_fill(ignored, 1)[:, None]
    log_p = logits.log_softmax(1)
    log_probs = log_p.gather(1, target.masked_fill(ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0)
    if not entropy:
        return log_probs, None
    terms = log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)
    return log_probs, (0.0 - terms.sum(1)).masked_fill(ignored, 0)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _linear_log_probs(
    input,
    linear_weight,
    target,
    linear_bias=None,
    temperature=None,
    shadow=None,
    *,
    entropy=False,
    ignore_index=-100,
    chunk_size=None,
    compute_dtype=None,
    batch_invariant=0,
):
    dtype = working_dtype(_OP, compute_dtype, input=input, linear_weight=linear_weight)
    check_call(
        _OP,
        input,
        linear_weight,
        target,
        linear_bias,
        temperature,
        shadow,
        dtype,
        compute_dtype is not None,
        chunk_size,
    )
    x, y, classes = flat(input), target.reshape(-1).to(torch.int64), linear_weight.shape[0]
    if temperature is not None:
        temperature = temperature.detach().to(_result_dtype(dtype)).expand(target.shape).reshape(-1)
    with _loss.names_class(_OP, target, classes, ignore_index):
        if dtype == torch.float64 or under_transform():
            bias = linear_bias
            results = _composed(x, linear_weight, y, bias, temperature, ignore_index, entropy, dtype)
        else:
            chunk, blocks = chunk_and_blocks(_OP, x, linear_weight, dtype, batch_invariant, chunk_size, torch.float32)
            if needs_gradient(x, linear_weight, linear_bias):
                arguments = x, linear_weight, linear_bias, y, temperature, shadow, ignore_index, entropy
                results = autocast.apply(_LinearLogProbs, *arguments, dtype, chunk, blocks)
            else:
                w = cast(linear_weight, dtype) if shadow is None else shadow
                head = Head(cast(x, dtype), w, linear_bias, chunk, blocks, torch.float32)
                results = _forward(head, y, temperature, ignore_index, entropy)[:2]
    return tuple(None if result is None else reshaped(result, target.shape) for result in results)


def check_call(op, input, linear_weight, target, linear_bias, temperature, shadow, dtype, autocast, chunk_size) -> None:
    check_head(op, input, linear_weight, linear_bias, shadow, dtype, autocast, chunk_size)
    check_tensor(op, "target", target, (torch.int64, torch.uint8))
    _loss.check_target(op, target, (*input.shape[:-1], linear_weight.shape[0]), input.ndim - 1, None, -100)
    if temperature is not None:
        check_tensor(op, "temperature", temperature, FLOATS)
        if temperature.shape not in ((), target.shape):
            raise ValueError(
                f"{op}: temperature has shape {list(temperature.shape)}; accepted: {_TEMPERATURE} {list(target.shape)}"
            )
        if needs_gradient(temperature):
            raise ValueError(f"{op}: temperature requires a gradient, and has none; accepted: temperature.detach()")
    tensors = {"linear_weight": linear_weight, "target": target, "linear_bias": linear_bias}
    check_same_device(op, input=input, **tensors, temperature=temperature, shadow=shadow)


_TEMPERATURE = "a finite number above 0, or a tensor of such, of no dimension or of the target's shape,"


def temperature_of(op: str, temperature: float | Tensor, target: Tensor, like: Tensor) -> Tensor | None:
    """A temperature as the op takes it: ``None`` for 1."""
    if isinstance(temperature, Tensor):
        return temperature
    try:
        valid = not isinstance(temperature, bool) and 2.0**-126 <= temperature < 2.0**128
        error = TypeError if isinstance(temperature, bool) else ValueError
    except TypeError:
        valid, error = False, TypeError
    if not valid:
        raise error(f"{op}: temperature is {temperature!r}; accepted: {_TEMPERATURE} {list(target.shape)}")
    return (
        None if temperature == 1 else torch.full((), temperature, dtype=_result_dtype(like.dtype), device=like.device)
    )


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device, grad=True)
    for dtype in FLOATS:
        target = torch.randint(5, (2, 3), generator=normal.generator).to(device)
        target[0, 1] = -100
        args = normal(2, 3, 4, dtype=dtype), normal(5, 4, dtype=dtype), target
        yield args, {"chunk_size": 4}
        temperature = normal(2, 3, dtype=torch.float32, grad=False).abs() + 0.5
        yield (*args, normal(5, dtype=dtype), temperature), {"chunk_size": 2, "entropy": True}
        frozen = (t.detach() for t in args)
        yield (*frozen, None, temperature[0, 0]), {"entropy": True}
    for dtype in HALF_DTYPES:
        x, w = normal(6, 4, dtype=torch.float32), normal(5, 4, dtype=torch.float32)
        options = {"compute_dtype": dtype, "entropy": True}
        yield (x, w, target.view(-1), normal(5, dtype=torch.float32)), options
        yield (x.detach(), w.detach(), target.view(-1), None, None, w.detach().to(dtype)), options
        yield (normal(6, 4, dtype=dtype), normal(5, 4, dtype=dtype), target.view(-1)), {"batch_invariant": 1}


op = define(
    "linear_log_probs(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, "
    "Tensor? temperature=None, Tensor? shadow=None, *, bool entropy=False, int ignore_index=-100, int? chunk_size=None, "
    "ScalarType? compute_dtype=None, int batch_invariant=0) -> (Tensor, Tensor)",
    _linear_log_probs,
    samples=samples,
    composite=True,
)

autocast.lower_precision(op, with_shadow(5))


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal[False] = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal[True],
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of ``target`` under ``softmax((input @ linear_weight^T + linear_bias) / temperature)``, and its entropies,
    without the logits of all rows in memory and without rounding them.

    Operands are 16 bits, as in :func:`amp_kernels.linear_cross_entropy`; logits, log-probabilities and entropies are fp32, so that
    the ratio ``exp(log_prob - log_prob_of_the_sampler)`` of policy-gradient training is not that of two roundings.

    Args:
        input: ``[..., in_features]``.
        linear_weight: ``[classes, in_features]``.
        target: class ids of shape ``[...]``, int64 or uint8.
        linear_bias: ``[classes]``, as in :func:`amp_kernels.linear_cross_entropy`.
        temperature: a number above 0, a tensor without dimensions, which the host does not read, or one per row, in the shape of
            ``target``. It divides the logits, as samplers do, and has no gradient. Values of a tensor are not checked.
        entropy: also return the entropies of the rows, in nats.
        ignore_index: rows of this class have log-probability, entropy and gradients of 0, whatever they and their temperature hold.
        chunk_size: rows whose logits exist at a time, as in :func:`amp_kernels.linear_cross_entropy`, on a CPU fewer by default.

    Returns:
        The log-probabilities, or ``(log_probs, entropies)``, of the shape of ``target``, in fp32, inside and outside of torch.autocast
        (fp64 operands: fp64). Log-probabilities are never above 0, entropies never below. Each has a gradient.

    The bits are the same with and without gradients and entropies: the first ratio of a policy to itself is exactly 1. A logit of
    ``-inf`` is a class without probability; as a target its log-probability is ``-inf``; a row of nothing else is NaN. Without
    gradients nothing is kept; with gradients the input, the 16-bit weight and three numbers a row, and backward computes the logits once
    more, without a product for a weight that is frozen. The weight's gradient is summed over chunks in fp32 and rounded once, or goes
    to ``main_grad`` (:func:`amp_kernels.nn.accumulate_fp32`). In fp16 the gradients of the logits are scaled by a power of two that the
    device chooses, but within :func:`amp_kernels.batch_invariant`. Not differentiable twice, but in float64.

    Raises:
        TypeError: a dtype or layout is not accepted, or a tensor is a DTensor; outside autocast dtypes are not mixed.
        ValueError: a shape, device or option is not accepted, or a class is out of range (CPU, RuntimeError in a compiled program; NaN on
            a GPU).

    Examples:
        >>> hidden, head = torch.randn(2, 3, 8), torch.zeros(1000, 8, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     log_probs, entropy = ak.linear_log_probs(hidden, head, torch.zeros(2, 3, dtype=torch.int64), entropy=True)
        >>> log_probs.dtype, round(log_probs[0, 0].item(), 4), round(entropy[0, 0].item(), 4)  # -log(1000), log(1000)
        (torch.float32, -6.9078, 6.9078)
    """
    check_tensors(_OP, input=input, linear_weight=linear_weight, target=target)
    check_tensors(_OP, optional=True, linear_bias=linear_bias)
    if not isinstance(entropy, bool):
        raise TypeError(f"{_OP}: entropy is {entropy!r}; accepted: True, False")
    temperature = temperature_of(_OP, temperature, target, input)
    args = input, linear_weight, target, linear_bias, temperature
    options = {
        "entropy": entropy,
        "ignore_index": ignore_index,
        "chunk_size": chunk_size,
        "batch_invariant": k_blocks(),
    }
    if autocast.eager(input, linear_weight, target):
        dtype = autocast.dtype_on(input.device.type)
        results = _linear_log_probs(*args, fresh_shadow(linear_weight, dtype), compute_dtype=dtype, **options)
    else:
        refuse_dtensors(
            _OP,
            "plain tensors, such as each rank's rows, to_local()",
            input=input,
            linear_weight=linear_weight,
            target=target,
        )
        results = op(*args, **options)
    return results if entropy else results[0]
