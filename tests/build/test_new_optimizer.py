"""CONTRIBUTING's steps for a new optimizer: one declaration, two functions for Triton's kernels, one class and one row in
the test table. Shown with Adagrad (Duchi et al., JMLR 2011) in a copy of the package."""

import os
import re
from pathlib import Path

import pytest

from amp_kernels._updates.arguments import UpdateArguments

from ..helpers.processes import python
from .package_copy import copy_package

TESTS = Path(__file__).parents[1]

FILES = {
    "_updates": """
from .op import define_update
from .state import MAXIMIZE, STOCHASTIC, fma, rounded, sqrt


def _rule(p, moments, g, o):
    (total,) = moments
    if o.weight_decay != 0:
        g = fma(rounded(o.weight_decay), p, g)
    total = fma(g, g, total)
    return fma(rounded(-o.lr), g / (sqrt(total) + rounded(o.eps)), p), total


adagrad_ = define_update(
    "adagrad_",
    _rule,
    moments=("sum",),
    options={"lr": 0.1, "eps": 1e-10, "weight_decay": 0.01},
    flags=MAXIMIZE | STOCHASTIC,
)
""",
    "_triton": """
import triton
import triton.language as tl

from ._update import Rule


@triton.jit
def _derive(options, flags, step):
    lr, eps, weight_decay = options
    return lr.to(tl.float32), eps.to(tl.float32), weight_decay.to(tl.float32)


@triton.jit
def _apply(p, moments, g, scalars):
    lr, eps, decay = scalars
    g = tl.where(decay != 0.0, tl.fma(decay, p, g), g)
    total = tl.fma(g, g, moments[0])
    return tl.fma(-lr, tl.div_rn(g, tl.sqrt_rn(total) + eps), p), total


adagrad_ = Rule(_derive, _apply, scalars=3).launch
""",
    "optim": """
from __future__ import annotations

from .._updates.adagrad import adagrad_
from ._algorithm import Algorithm
from ._base import StandaloneOptimizer
from ._options import MixedPrecision, takes_options


class Adagrad(StandaloneOptimizer):
    _algorithm = Algorithm(adagrad_, shows_step=False)

    @takes_options
    def __init__(
        self, params, lr=1e-2, eps=1e-10, weight_decay=0.0, *, maximize=False, **options: Unpack[MixedPrecision]
    ):
        self._set_options(options, None, None, False)
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, maximize=maximize, capturable=False)
""",
}

ROW = """
from tests.ops.update_rules import TABLE, U, Rule


def exact(p, moments, g, o, kept):
    g, (total,) = g + o.weight_decay * p, moments
    size, total = g.abs() + p.abs(), total + g * g
    length = o.lr / (total.sqrt() + o.eps)
    weight = p - length * g
    return [(weight, 2 * U * weight.abs() + 12 * U * size * length), (total, 8 * U * size * size + 4 * U * total)]


TABLE["adagrad_"] = Rule(exact, [{"weight_decay": 0.0, "eps": 1e-3}, {"flags": 1}])
"""

STEPS = """
import copy
import torch
import amp_kernels as ak
from amp_kernels.optim.adagrad import Adagrad
from amp_kernels.cli.check import available_backends, check_backend
from amp_kernels._dispatch.library import REGISTRY

op = REGISTRY["adagrad_"]
assert op.family == "adagrad" and available_backends(op, "cpu") == ["triton"]
print(check_backend(op, "triton", "cpu"), "samples")

generator = torch.Generator().manual_seed(0)
start = [torch.randn(33, generator=generator), torch.randn(5, 7, generator=generator)]
theirs = [torch.nn.Parameter(w.clone()) for w in start]
ours = [torch.nn.Parameter(w.clone()) for w in start]
halves = [torch.nn.Parameter(w.bfloat16()) for w in start]
options = {"lr": 0.1, "weight_decay": 0.01}
optimizers = torch.optim.Adagrad(theirs, **options), Adagrad(ours, **options), Adagrad(halves, master_weights="split", **options)
scaler = ak.GradScaler("cpu", init_scale=8.0)
scaler.scale(torch.zeros(()))
for step in range(6):
    for t, o, h in zip(theirs, ours, halves):
        t.grad = torch.randn(t.shape, generator=generator)
        o.grad, h.grad = scaler.get_scale() * t.grad, t.grad.bfloat16()
        if step == 3:
            o.grad[0] = torch.inf
    optimizers[0].step() if step != 3 else None
    scaler.step(optimizers[1])
    scaler.update()
    optimizers[2].step()
    if step == 2:  # a checkpoint
        resumed = Adagrad(ours, **options)
        resumed.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        optimizers = optimizers[0], resumed, optimizers[2]
        scaler = ak.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
for t, o, h in zip(theirs, ours, halves):
    torch.testing.assert_close(o, t, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizers[1].state[o]["sum"], optimizers[0].state[t]["sum"], rtol=1e-5, atol=1e-6)
    assert h.dtype == torch.bfloat16 and (h.float() - t).abs().max() < 0.4
print("followed torch")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a package that has the optimizer, and the row of the test table as a module."""
    path = tmp_path_factory.mktemp("new_optimizer")
    copy_package(path)
    for room, text in FILES.items():
        (path / "amp_kernels" / room / "adagrad.py").write_text(text)
    (path / "row.py").write_text(ROW)
    return path


def run(folder, *command, **variables):
    return python(*command, cwd=folder, PYTHONPATH=f"{folder}{os.pathsep}{TESTS.parent}", **variables).stdout


def test_declaration_triton_and_class(folder):
    said = run(folder, "-c", STEPS, TRITON_INTERPRET="1").splitlines()
    assert said == ["16 samples", "followed torch"]


def test_the_shared_tests_run_over_it(folder):
    """The tests of the formula and of unchanged memory that need no compiled kernel."""
    file = str(TESTS / "ops" / "test_updates.py")
    chosen = "every_rule_has_a_row or (adagrad_ and (test_options or scale or own_options or nobody or skipped))"
    said = run(folder, "-m", "pytest", "-p", "amp_kernels", "-p", "row", "-p", "no:cacheprovider", "-k", chosen, file)
    passed = int(said.split(" passed")[0].split()[-1])
    assert passed > 25, said


def test_the_struct_of_the_compiled_ops_has_the_arguments_in_order():
    text = (TESTS.parent / "csrc" / "update" / "call.h").read_text()
    members = re.findall(r"^  \S.* (\w+) = .*\bin\.\w+\(.*\);$", text, re.MULTILINE)
    assert members == ["table", *UpdateArguments._fields]
