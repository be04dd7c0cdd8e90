"""Elements beyond 2^31 of what the Triton kernels read and write, in the interpreter: a place that is counted in 32 bits is one
before the tensor. Only the last program of each grid runs, so that of all memory only the last pages are ever touched; it must give
what its rows give alone. Run by test_interpreted.py."""

import pytest
import torch
from triton.runtime import interpreter

from amp_kernels._triton import (
    activation_backward,
    activation_forward,
    cast,
    column_sums,
    cross_entropy_rows,
    embedding_accumulate,
    norm_backward,
    norm_forward,
)

from ..helpers.generators import normal

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
COLUMNS = 48
ROWS = 2**31 // COLUMNS + 2


def last_of_a_grid(*bounds):
    """In place of ``range`` in the interpreter, where nothing but a grid is that long."""
    whole = range(*bounds)
    return whole[-1:] if len(whole) > 2**16 else whole


@pytest.fixture(autouse=True)
def last_programs(monkeypatch):
    monkeypatch.setattr(interpreter, "range", last_of_a_grid, raising=False)
    # A kernel's results are where they belong: these are no copies of a GPU's tensors.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    monkeypatch.setattr(norm_backward, "programs", lambda device, per_sm: ROWS)
    monkeypatch.setattr(cast._tables, "programs", lambda device, per_sm: ROWS)
    monkeypatch.setattr(column_sums, "PROGRAMS", ROWS)
    monkeypatch.setattr(column_sums, "_SLOTS", (2**14, 64))


class Matrices:
    """Matrices of so many rows, of which the last holds values; the same ones for any number of rows."""

    def __init__(self, rows: int):
        self.rows = rows
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, dtype=bf16, columns=COLUMNS):
        t = torch.empty(self.rows, columns, dtype=dtype)
        t[-1] = torch.randn(columns, generator=self.generator)
        return t

    def vector(self):
        return self(f32, 1)[:, 0]


def forward(make):
    vectors = normal(2, COLUMNS, seed=4)
    y, total, mean, rstd = norm_forward.norm_forward(make(), *vectors, make(), eps=1e-5, centred=True, out_dtype=f16)
    return y, total, mean, rstd


def gradient_of_norm(make):
    of_x, _, of_branch = norm_backward.norm_backward(
        make(), make(f16), make.vector(), make.vector(), None, make(), branch_dtype=f16
    )
    return of_x, of_branch


def loss(make):
    target, out, grad = make(f16), torch.empty(make.rows), torch.empty(make.rows, COLUMNS, dtype=bf16)
    cross_entropy_rows.cross_entropy_rows_(make(), target, None, make.vector(), out, grad)
    return out, grad


def casts(make):
    to = torch.empty(make.rows, COLUMNS, dtype=f16)
    cast.cast_([to], [make()])
    return to


CALLS = {
    "norm_forward": forward,
    "norm_backward": gradient_of_norm,
    "cross_entropy_rows": loss,
    "activation_forward": lambda make: activation_forward.activation_forward(make(), activation="gelu"),
    "activation_forward of a view": lambda make: activation_forward.activation_forward(
        make(bf16, COLUMNS + 8)[:, :COLUMNS], activation="silu"
    ),
    "swiglu": lambda make: activation_forward.activation_forward(make(bf16, 2 * COLUMNS), activation="swiglu"),
    "activation_backward": lambda make: activation_backward.activation_backward(make(), make(), activation="gelu")[0],
    "activation_backward with sums": lambda make: activation_backward.activation_backward(
        make(), make(), activation="gelu", bias_grad=True
    )[0],
    "swiglu's gradient": lambda make: activation_backward.activation_backward(
        make(), make(bf16, 2 * COLUMNS), activation="swiglu"
    )[0],
    "cast": casts,
}


def check(call):
    alone, far = (call(Matrices(rows)) for rows in (1, ROWS))
    for got, want in zip(far, alone, strict=True) if isinstance(far, tuple) else [(far, alone)]:
        assert torch.equal(got[-1], want[-1])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_last_row_is_that_row(call):
    check(call)


@pytest.mark.parametrize("name", ["norm_forward", "norm_backward"])
def test_rows_in_pieces(name, monkeypatch):
    for module in (norm_forward, norm_backward):
        monkeypatch.setattr(module, "block_of", lambda columns, limit: 32)
    check(CALLS[name])


def test_a_far_row_of_an_embedding():
    table, grad = torch.empty(ROWS, COLUMNS, dtype=bf16), torch.randint(-3, 4, (3, COLUMNS)).half()
    table[-1] = 1
    embedding_accumulate.embedding_accumulate_(table, grad, torch.full((3,), ROWS - 1), torch.arange(3))
    assert torch.equal(table[-1], (1 + grad.sum(0)).bfloat16())
