"""Tensor maps whose strides are not in order: cuda.h writes each stride as the one before it times the size of that dimension, or more,
and drivers are not known to check it. Here it is said which products rely on that, and that they need not."""

import pytest
import torch

import amp_kernels as ak

from ..ops import raw
from .gemm_cases import integers
from .preloaded import machine, set_chip

machine()
ROWS, MATRICES = "tensor map: rows overlap", "tensor map: matrices within rows"


def half(*shape: int) -> torch.Tensor:
    return integers(torch.Generator().manual_seed(sum(shape)), *shape).half()


def gemm(a, b, *others, **options):
    return lambda to: raw.gemm(to(a), to(b), *map(to, others), **options)


def residual(beside):
    a, b = half(72, 64), half(64, 200)
    return lambda to: raw.gemm(to(a), to(b), residual=to(beside))


def accumulated(m, n, k):
    a, b, c = half(k, m).t(), half(k, n), half(m, n).float()

    def run(to):
        out = to(c).clone()
        raw.gemm_accumulate_(out, to(a), to(b))
        return out

    return run


def derivative(activation):
    a, b, z = half(72, 64), half(64, 136), half(72, 272 if activation == "swiglu" else 136)
    return lambda to: raw.gemm_dact(to(a), to(b), to(z), activation=activation)[0]


# The product, and the rule that its maps break.
CASES = {
    "matrices": (lambda: gemm(half(80, 64), half(64, 144)), None),
    "columns first": (lambda: gemm(half(64, 80).t(), half(152, 64).t()), None),
    "rows apart": (lambda: gemm(half(80, 128)[:, :64], half(64, 160)), None),
    "a batch": (lambda: gemm(half(3, 72, 64), half(3, 64, 136)), None),
    "a batch that shares B": (lambda: gemm(half(3, 72, 64), half(64, 136).expand(3, 64, 136)), None),
    "a residual": (lambda: residual(half(72, 200)), None),
    "a derivative": (lambda: derivative("relu"), None),
    "swiglu": (lambda: gemm(half(72, 64), half(64, 256), activation="swiglu"), None),
    "swiglu, z kept": (lambda: gemm(half(72, 72), half(72, 256), activation="swiglu", preact=True), MATRICES),
    "swiglu's derivative": (lambda: derivative("swiglu"), MATRICES),
    "phases": (lambda: accumulated(72, 19, 4001), MATRICES),
    "a batch between rows": (lambda: gemm(half(72, 3, 64).transpose(0, 1), half(3, 64, 168)), MATRICES),
    "an operand of windows, which is copied": (
        lambda: gemm(half(648).as_strided((72, 80), (8, 1)), half(80, 136)),
        None,
    ),
    "a residual of windows": (lambda: residual(half(768).as_strided((72, 200), (8, 1))), ROWS),
}


def same_place(t: torch.Tensor) -> torch.Tensor:
    """On the device with the strides that it has, overlapping ones, too."""
    storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return storage.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize(("make", "broken"), CASES.values(), ids=CASES)
def test_maps_out_of_order(make, broken):
    """Refused, such a product is another kernel's, and the result the same. Refused first: what the driver took is remembered."""
    compute = make()
    with ak.backend("cpu"):
        want = compute(lambda t: t)
    it = set_chip(90, 2)
    it.seed = 0
    for refused in (True, False):
        before = {rule: it.calls(rule) for rule in (ROWS, MATRICES)}
        it.launched.clear()
        it.runtime.fake_refuse_overlaps(refused)
        try:
            got = compute(same_place)
        finally:
            it.runtime.fake_refuse_overlaps(False)
        for one, other in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (got, want)), strict=True):
            assert torch.equal(one.cpu(), other)
        kernel = "gemm_sm80_kernel" if broken and refused else "gemm_sm90_kernel"
        assert [name for name in it.launched if "_sm" in name and kernel not in name] == []
        assert any(kernel in name for name in it.launched)
        counted = {rule for rule in (ROWS, MATRICES) if it.calls(rule) > before[rule]}
        assert counted == ({broken} if broken and not refused else set())
