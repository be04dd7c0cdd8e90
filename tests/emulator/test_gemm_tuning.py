"""Plans that `tune` sets for products, on the emulator: the launch has the tile of the plan, and of the same product only."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import policy, profile
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._dispatch.product_call import ProductCall
from amp_kernels._raw.gemm import gemm_op, set_gemm_plan
from amp_kernels.cli import tune

from ..helpers.emulator import launches
from ..helpers.generators import normal

pytestmark = [
    pytest.mark.own_backend,
    pytest.mark.skipif(tune.planner() is None, reason="the package was built without pybind11"),
]

MACHINE = {"gpu": "Some GPU 80GB", "driver": "13000", "torch": "2.11.0", "amp_kernels": "0.1.0"}
A100 = {"sm_count": 108, "capability": 80}


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """The emulator's kernels, of a GPU without wgmma, in place of a GPU's; no profile."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "PLANNED", "emulate")
    monkeypatch.setattr(profile, "BACKENDS", ("emulate", "aten"))
    monkeypatch.setattr(policy, "choice_on", lambda op, device: policy.Choice("emulate", "for a test"))
    monkeypatch.setattr(tune, "WITHIN", 1e6)
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", "8.0")


#: Each differs from the first in one part of the key.
PLANNED = [
    ProductCall(40, 136, 72),
    ProductCall(136, 40, 72),
    ProductCall(40, 136, 80),
    ProductCall(40, 136, 72, 2),
    ProductCall(40, 136, 72, layout="TT"),
    ProductCall(40, 136, 72, layout="NN"),
    ProductCall(40, 136, 72, out="fp32"),
    ProductCall(40, 136, 72, op="gemm_accumulate_", out="fp32"),
    ProductCall(40, 136, 72, activation="gelu"),
    ProductCall(40, 136, 72, bias=True),
    ProductCall(40, 136, 72, residual=True),
    ProductCall(40, 136, 72, preact=True),
    ProductCall(40, 136, 72, op="gemm_dact", activation="gelu"),
    ProductCall(40, 136, 72, op="gemm_dact", activation="gelu", bias=True),
]


@pytest.mark.parametrize("call", PLANNED, ids=str)
def test_a_plan_is_what_the_kernels_run(call, emulated):
    """The blocks of a launch tell the tile."""
    grids = {}

    def timer(candidates):
        for name in sorted(candidates, reverse=True):  # plans, then the planner's own
            candidates[name]()
            grids[name] = launches()[0].grid if name != "aten" else 0
        return {name: [1.0 if name == fastest else 2.0] for name in candidates}

    tiles = {
        name: math.ceil(call.m / m) * math.ceil(call.n / n) * call.batch
        for name, m, n in (("128x256", 128, 256), ("128x128", 128, 128), ("64x64", 64, 64))
    }
    host = tune.planner()
    own = tune._name(host.plan_gemm(**call.request(), **A100), host.gemm_candidates()).removeprefix("sm80 ")
    fastest, *_ = (f"sm80 {name}" for name in tiles if name != own)
    found = tune.tuned([call], MACHINE, torch.device("cpu"), timer, A100)
    assert {name.removeprefix("sm80 "): grid for name, grid in grids.items()} == {
        "aten": 0,
        "emulate": tiles[own],
        **{name: blocks for name, blocks in tiles.items() if name != own},
    }
    assert found.plans[str(call)] == (call, [1, list(tiles).index(fastest.removeprefix("sm80 ")), 1, 0])
    assert found.winners == {}


def test_no_plan_splits_the_sums_of_a_fixed_order(emulated):
    a, b = normal(64, 2048).bfloat16(), normal(2048, 64, seed=1).bfloat16()
    product = ProductCall(64, 64, 2048, layout="NN", out="fp32").planned()

    def run(**options):
        out = gemm_op(a, b, out_dtype=torch.float32, **options)[0]
        return out, launches()[0].grid

    with ak.backend("emulate"):
        fixed, free = run(batch_invariant=True), run()
        try:
            set_gemm_plan(a, *product, [1, 0, 4, 0])
            still, split = run(batch_invariant=True), run()
            set_gemm_plan(a, *product, [1, 99, 1, 0])  # no such tile
            again = run()
        finally:
            set_gemm_plan(a, *product, [])
    assert fixed[1] == still[1] == 1
    assert torch.equal(still[0], fixed[0])
    assert split[1] == 4
    assert again[1] == free[1]
    assert torch.equal(again[0], free[0])


def test_a_plan_is_of_one_product_alone(emulated):
    """No other product of the list runs it: each differs from the first, or from another, in one part of the key."""
    plans = {call: tune.plans_of(call, A100) for call in PLANNED}
    on = torch.empty(0)

    def grids():
        found = []
        for call in PLANNED:
            args, kwargs = call.arguments(torch.device("cpu"))
            with ak.backend("emulate"):
                REGISTRY[call.op](*args, **kwargs)
            found.append(launches()[0].grid)
        return found

    usual = grids()
    for i, call in enumerate(PLANNED):
        with ak.backend("emulate"):
            policy.set_plan(on, call, next(iter(plans[call].values())))
            changed = grids()
            policy.set_plan(on, call, [])
        assert [j for j, pair in enumerate(zip(usual, changed, strict=True)) if pair[0] != pair[1]] == [i], call
    assert grids() == usual
