"""The planner's part of a profile: plans that `tune` chooses for products of the CUDA kernels, against a fake timer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from amp_kernels._dispatch import policy, profile
from amp_kernels._dispatch.product_call import ProductCall
from amp_kernels.cli import tune

pytestmark = pytest.mark.own_backend

MACHINE = {"gpu": "Some GPU 80GB", "driver": "13000", "torch": "2.11.0", "amp_kernels": "0.1.0"}
CALL = ProductCall(64, 32, 16)
GPU = {"sm_count": 132, "capability": 90}
PLAN, OTHER = [2, 0, 1, 0], [2, 1, 1, 0]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("samples", "plan", "winner"),
    [
        ({"cuda": 100, "x": 97, "y": 95, "aten": 100}, OTHER, None),
        ({"cuda": 100, "x": 99, "y": 105, "aten": 100}, None, None),  # within the margin
        ({"cuda": 100, "x": 95, "y": 105, "aten": 94}, PLAN, None),  # torch's is ahead of the planner's tile alone
        ({"cuda": 100, "x": 95, "y": 105, "aten": 90}, PLAN, "aten"),
        ({"cuda": 100, "x": 101, "y": 105, "aten": 90}, None, "aten"),
    ],
)
def test_a_plan_is_ahead_of_the_planners(samples, plan, winner):
    found = profile.Profile(MACHINE)
    found.add(CALL, "cuda", {name: [float(us)] * 3 for name, us in samples.items()}, {"x": PLAN, "y": OTHER})
    assert found.plans == ({str(CALL): (CALL, plan)} if plan else {})
    assert found.winners == ({str(CALL): winner} if winner else {})
    found.add(CALL, "cuda", {"cuda": [1.0], "aten": [1.0]})  # a new measurement replaces the old one
    assert (found.plans, found.winners) == ({}, {})


needs_host = pytest.mark.skipif(tune.planner() is None, reason="the package was built without pybind11")


@needs_host
def test_plans_are_the_models_fastest_but_the_planners_own():
    call = replace(CALL, m=8192, n=3072, k=768)
    found = tune.plans_of(call, GPU)
    host = tune.planner()
    of_name = {tune._name(p, host.gemm_candidates()): p for p in host.gemm_plans(**call.request(), **GPU)}
    own = host.plan_gemm(**call.request(), **GPU)
    assert 2 < len(found) <= tune.PLANS
    assert [tune._numbers(of_name[name]) for name in found] == list(found.values())
    assert tune._numbers(own) not in found.values()
    times = [of_name[name]["microseconds"] for name in found]
    assert times == sorted(times)
    assert times[-1] < tune.WITHIN * min(p["microseconds"] for p in of_name.values())
    # Operands that wgmma's kernel would copy first are for the other one.
    assert {kernel for kernel, *_ in tune.plans_of(replace(call, k=767), GPU).values()} == {1}


@needs_host
def test_names_of_plans_differ():
    host = tune.planner()
    for capability in (80, 90):
        plans = host.gemm_plans(64, 4096, 4096, capability=capability)
        assert len({tune._name(p, host.gemm_candidates()) for p in plans}) == len(plans) > 2


def test_the_planner_is_told_when_a_device_is_first_used(monkeypatch):
    told = []
    ops = SimpleNamespace(_set_gemm_plan=lambda on, *given: told.append(given))
    monkeypatch.setattr(torch.ops, "amp_kernels", ops)
    policy._tell_planner(profile.Profile(MACHINE, plans={"x": (CALL, PLAN)}), None)
    assert told == [(*CALL.planned(), PLAN)]


@needs_host
def test_a_geforce_has_half_of_the_multiply_adds():
    """Compute capability alone does not tell it from a workstation's chip."""
    host = tune.planner()
    shape, chip = (8192, 8192, 8192), {"sm_count": 128, "capability": 89}
    names = "NVIDIA RTX A6000", "NVIDIA GeForce RTX 4090"
    times = [host.plan_gemm(*shape, **chip, gpu=name)["microseconds"] for name in names]
    assert 1.8 < times[1] / times[0] < 2.1
    for capability in (80, 90):
        plans = [host.plan_gemm(*shape, capability=capability, gpu=name) for name in names]
        assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (ProductCall(8, 16, 24, 2), {"m_major_a": False, "n_major_b": False, "out_bytes": 2}),
        (ProductCall(8, 16, 24, 2, "TN", out="fp32"), {"m_major_a": True, "n_major_b": True, "out_bytes": 4}),
        (ProductCall(8, 16, 24, 2, "NN", "gemm_accumulate_"), {"m_major_a": False, "n_major_b": True, "out_bytes": 8}),
        (
            ProductCall(8, 16, 24, 2, "NT", "gemm_dact", activation="swiglu", bias=True),
            {
                "m_major_a": False,
                "n_major_b": False,
                "out_bytes": 2,
                "side_bytes": 2,
                "activation": "swiglu",
                "backward": True,
            }
            | {"column_sums": True, "plain": False},
        ),
        (ProductCall(8, 16, 24, 2, "NT", out="fp32", residual=True, preact=True),
            {"m_major_a": False, "n_major_b": False, "out_bytes": 4, "side_bytes": 6, "keeps_z": True, "plain": False}),
    ],
    ids=str,
)  # fmt: skip
def test_the_planner_is_asked_for_the_product(call, request_):
    usual = {
        "side_bytes": 0,
        "activation": "none",
        "keeps_z": False,
        "backward": False,
        "column_sums": False,
        "plain": True,
    }
    aligned = dict.fromkeys(("tma_a", "tma_b", "tma_output"), True)
    assert call.request() == {"m": 8, "n": 16, "k": 24, "batch": 2, **usual, **aligned, **request_}
