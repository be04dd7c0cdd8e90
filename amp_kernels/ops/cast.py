"""``cast_``: a list of tensors copied into another one, fp32 to 16 bits and back, in one pass and one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import KERNEL_DTYPES
from .._dispatch import nodes
from .._dispatch.library import PLAIN, Sample, define
from .._raw._stochastic import round_stochastic, rounding_bits


def _reference(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], *, seed: int | None = None, step: Tensor | None = None
) -> None:
    for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if seed is None or destination.dtype == torch.float32 or destination.is_meta:
            destination.copy_(source)
        else:
            count = torch.zeros((), device=source.device) if step is None else step.reshape(())
            random = rounding_bits(seed, count, index, source.numel())
            lists.flat(destination).copy_(round_stochastic(lists.flat(source).float(), destination.dtype, random))


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(37,), (3, 5), (), (0, 4), (1000,)]

    def call(pairs: Sequence[tuple[torch.dtype, torch.dtype]], **options) -> Sample:
        sources = [torch.randn(s, generator=generator).to(device, d) for _, d in pairs for s in shapes]
        destinations = [torch.zeros(s, dtype=d, device=device) for d, _ in pairs for s in shapes]
        return (destinations, sources), options

    pairs = [(to, of) for to in KERNEL_DTYPES for of in KERNEL_DTYPES]
    yield call(pairs)
    yield call(pairs, seed=2**40 + 3)
    yield call(pairs[:3], seed=5, step=torch.tensor(7.0, device=device))
    transposed = torch.randn(8, 6, generator=generator).to(device).t()
    yield ([torch.zeros(8, 6, dtype=torch.bfloat16, device=device).t()], [transposed]), {"seed": 1}
    extremes = torch.tensor([65519.0, 65520.0, 1e-7, -(2.0**-25), 3.4e38, -torch.inf, 0.0, -0.0], device=device)
    yield ([torch.ones(8, dtype=d, device=device) for d in KERNEL_DTYPES], [extremes] * 3), {}


op = define(
    "cast_(Tensor(a!)[] destinations, Tensor[] sources, *, int? seed=None, Tensor? step=None) -> ()",
    _reference,
    samples=samples,
)


def _plainly_right(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """A quick yes to the commonest lists: everything that :func:`_check` asks, in as few questions as possible."""
    if not (type(destinations) is type(sources) is list) or len(sources) != len(destinations) or not destinations:
        return False
    device = getattr(destinations[0], "device", None)
    return all(
        type(d) in PLAIN
        and type(s) in PLAIN
        and d.layout is s.layout is torch.strided
        and d.dtype in KERNEL_DTYPES
        and s.dtype in KERNEL_DTYPES
        and d.is_contiguous()
        and s.is_contiguous()
        and d.shape == s.shape
        and d.device == s.device == device
        for d, s in zip(destinations, sources, strict=True)
    )


def _check(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for name, tensors in (("destinations", destinations), ("sources", sources)):
        lists.check_list("cast_", name, tensors, KERNEL_DTYPES)
    if len(sources) != len(destinations):
        raise ValueError(f"cast_: there are {len(destinations)} destinations and {len(sources)} sources")
    for i, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if source.shape != destination.shape or not lists.same_order(source, destination):
            raise ValueError(
                f"cast_: destinations[{i}] is {lists.describe(destination)} and sources[{i}] "
                f"{lists.describe(source)}; accepted: one shape and the same strides"
            )
    if sources[0].device != destinations[0].device:
        raise ValueError(
            f"cast_: sources are on {sources[0].device} and destinations on {destinations[0].device}; "
            "one call takes one device"
        )


def cast_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], *, seed: int | None = None, step: Tensor | None = None
) -> None:
    """Copy each source into its destination, widened or rounded to that one's dtype. No host sync.

    ``torch._foreach_copy_`` for dtypes mixed freely, in one launch on a GPU, with stochastic rounding on request: up in
    magnitude with a probability equal to the fraction that is cut off, so that the mean of many casts is the value. The
    random bits are those of Philox4x32-10 (Salmon et al., SC 2011) for seed, step, position in the list and element, on
    every device alike.

    Args:
        destinations: non-empty list of float16, bfloat16 or float32 tensors of one device, dense (any strides that
            cover their memory once); overwritten.
        sources: as many, of the same dtypes, device, shapes and strides.
        seed: 0 to 2^63 - 1 rounds stochastically to 16 bits; ``None`` to nearest, ties to even.
        step: one float32 element on that device, read there: a count that gives each call other bits, also in a CUDA
            graph. ``None`` is 0.

    Autograd does not follow it, as it does not follow an optimizer's step.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the lists do not match or are empty, a tensor is sparse, not dense or on another device, a
            destination shares memory with another tensor, ``seed`` is out of range, or ``step`` comes without ``seed``.

    Examples:
        >>> master, weights = [torch.tensor([1.001, 2.0])], [torch.empty(2, dtype=torch.bfloat16)]
        >>> ak.cast_(weights, master)
        >>> weights
        [tensor([1., 2.], dtype=torch.bfloat16)]
    """
    if seed is None and step is None and nodes.may_serve() and nodes.cast_lists(destinations, sources):
        return
    destinations = destinations if isinstance(destinations, Tensor) else list(destinations)
    sources = sources if isinstance(sources, Tensor) else list(sources)
    if not _plainly_right(destinations, sources):
        _check(destinations, sources)
    shared = lists.overlap(destinations, sources)
    if shared is not None:
        i, j = shared
        other = f"destinations[{j}]" if j < len(destinations) else f"sources[{j - len(destinations)}]"
        raise ValueError(f"cast_: destinations[{i}] and {other} share memory; accepted: destinations of their own")
    if seed is not None:
        lists.check_number("cast_", "seed", seed, 0, 2**63 - 1)
    if step is not None:
        if seed is None:
            raise ValueError("cast_: step was given without seed, and only stochastic rounding reads it")
        lists.check_scalar("cast_", "step", step, destinations[0].device)
    op(destinations, sources, seed=seed, step=step)
