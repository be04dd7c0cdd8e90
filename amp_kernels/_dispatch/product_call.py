"""A product as the policy and its profiles know it: sizes, layouts, dtypes and epilogue, without values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ARGUMENTS = {
    "gemm": ("a", "b", "bias", "residual"),
    "gemm_dact": ("a", "b", "preact"),
    "gemm_accumulate_": ("c", "a", "b"),
}


@dataclass(frozen=True)
class ProductCall:
    """One call of a GEMM op: ``[m, k] @ [k, n]``, ``batch`` of them.

    ``layout``: a letter for a and one for b, N for row-major and T for column-major, both dense and 16-byte aligned. ``out``: the
    dtype of the result, of a ``gemm_accumulate_`` always fp32. ``bias``, ``residual`` and ``preact`` say what the epilogue takes
    or returns; with ``gemm_dact``, ``bias`` stands for ``bias_grad``.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    layout: str = "NT"
    op: str = "gemm"
    dtype: str = "bf16"
    out: str = "bf16"
    activation: str = "none"
    bias: bool = False
    residual: bool = False
    preact: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a value that no call has."""
        accepted = {
            "layout": ("NN", "NT", "TN", "TT"),
            "op": tuple(_ARGUMENTS),
            "dtype": ("fp16", "bf16"),
            "out": tuple(DTYPES),
            "activation": ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu"),
        }
        for name, values in accepted.items():
            if getattr(self, name) not in values:
                raise ValueError(f"a product's {name} is {getattr(self, name)!r}; accepted: {', '.join(values)}")
        for name in ("m", "n", "k", "batch"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"a product's {name} is {getattr(self, name)!r}; accepted: whole numbers from 1 on")

    def __str__(self) -> str:
        """The call in one line, other for each call: what a profile stores."""
        shape = f"{self.batch} x " * (self.batch > 1) + f"{self.m}x{self.n}x{self.k} {self.layout}"
        epilogue = [self.activation] if self.activation != "none" else []
        epilogue += [name for name in ("bias", "residual", "preact") if getattr(self, name)]
        return " ".join([self.op, shape, f"{self.dtype}->{self.out}", *epilogue])

    def is_plain(self) -> bool:
        """True for a ``gemm`` without an epilogue, in the dtype of its operands, of matrices that tensor maps take."""
        of = self.request()
        aligned = of["tma_a"] and of["tma_b"] and of["tma_output"]
        return self.op == "gemm" and of["plain"] and self.activation == "none" and self.out == self.dtype and aligned

    def arguments(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random arguments of such a call."""
        batch = (self.batch,) if self.batch > 1 else ()
        gated = self.activation == "swiglu"

        def normal(rows: int, columns: int, layout: str = "N", dtype: str = self.dtype) -> torch.Tensor:
            shape = (rows, columns) if layout == "N" else (columns, rows)
            drawn = torch.randn(*batch, *shape, device=device, dtype=DTYPES[dtype])
            return drawn if layout == "N" else drawn.mT

        a, b = normal(self.m, self.k, self.layout[0]), normal(self.k, self.n, self.layout[1])
        if self.op == "gemm_accumulate_":
            return (normal(self.m, self.n, dtype="fp32"), a, b), {}
        options = {"activation": self.activation, "out_dtype": DTYPES[self.out]}
        if self.op == "gemm_dact":
            return (a, b, normal(self.m, self.n * (1 + gated))), options | {"bias_grad": self.bias}
        bias = torch.randn(self.n, device=device, dtype=a.dtype) if self.bias else None
        residual = normal(self.m, self.n // (1 + gated)) if self.residual else None
        return (a, b, bias, residual), options | {"preact": self.preact}

    def request(self) -> dict[str, Any]:
        """The product as the planner's model takes it: keywords of ``_host.plan_gemm``."""
        backward, out_bytes = self.op == "gemm_dact", DTYPES[self.out].itemsize
        columns = self.n * (2 if backward else 0.5) if self.activation == "swiglu" else self.n
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "m_major_a": self.layout[0] == "T",
            "n_major_b": self.layout[1] == "N",
            "tma_a": (self.k if self.layout[0] == "N" else self.m) % 8 == 0,
            "tma_b": (self.n if self.layout[1] == "N" else self.k) % 8 == 0,
            "tma_output": columns * out_bytes % 16 == 0,
            "out_bytes": 8 if self.op == "gemm_accumulate_" else out_bytes,
            "side_bytes": 2 * (self.residual + backward) + out_bytes * self.preact,
            "activation": self.activation,
            "keeps_z": self.preact,
            "backward": backward,
            "column_sums": backward and self.bias,
            "plain": not (self.bias or self.residual or self.preact or backward),
        }

    def planned(self) -> tuple[list[int], str]:
        """The product as ``_set_gemm_plan`` takes it: its numbers by :data:`PLANNED`, and the activation."""
        of = self.request()
        of |= {"bias": self.bias and not of["backward"], "residual": self.residual}
        return [int(of[name]) for name in PLANNED], self.activation


#: The numbers of a product in the order of ``set_gemm_plan`` (csrc/gemm/glue.cpp), which gives them their names in GemmKey.
PLANNED = (
    *("m", "n", "k", "batch", "m_major_a", "n_major_b", "out_bytes"),
    *("bias", "residual", "keeps_z", "backward", "column_sums"),
)
FIELDS = tuple(field.name for field in fields(ProductCall))


def described(op: str, args: tuple, kwargs: dict) -> ProductCall | None:
    """The call of an op with these arguments; ``None`` for one that :class:`ProductCall` cannot say: other products than those of
    ``gemm``, other strides, no elements, sizes that a traced program leaves open."""
    if op not in _ARGUMENTS:
        return None
    given = dict(zip(_ARGUMENTS[op], args, strict=False)) | kwargs
    a, b = given["a"], given["b"]
    if any(isinstance(size, torch.SymInt) for size in (*a.shape, *b.shape)):
        return None
    layout = _layout(a) + _layout(b)
    if len(layout) < 2 or not a.numel() or not b.numel():
        return None
    return ProductCall(
        m=a.shape[-2],
        n=b.shape[-1],
        k=a.shape[-1],
        batch=a.shape[0] if a.ndim == 3 else 1,
        layout=layout,
        op=op,
        dtype=_NAMES[a.dtype],
        out=_NAMES[torch.float32 if op == "gemm_accumulate_" else given.get("out_dtype") or a.dtype],
        activation=given.get("activation", "none"),
        bias=given.get("bias") is not None or given.get("bias_grad", False),
        residual=given.get("residual") is not None and given.get("beta", 1.0) != 0,
        preact=given.get("preact") is True,
    )


def _layout(t: torch.Tensor) -> str:
    dense = "N" if t.is_contiguous() else "T" if t.mT.is_contiguous() else ""
    line = t.shape[-1] if dense == "N" else t.shape[-2]
    # The tensors that a traced program will get are assumed to be aligned.
    return dense if line % 8 or isinstance(t, (FakeTensor, FunctionalTensor)) or t.data_ptr() % 16 == 0 else ""
