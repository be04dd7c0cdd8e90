"""The model of csrc/tuning/gemm_cost.h: held against products timed on an H200, and its plans against changes of its rates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from bench.gemm_shapes import CUDA, Shape
from bench.measured import H200
from bench.plan import CHIPS, floor_us, plan, request

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

TILES = _host.gemm_candidates()["sm90"]
CHIP = CHIPS["H200"]
TIMED = [timed for timed in H200 if timed.shape.aligned]
SUITE = [*(s for s in CUDA if s.aligned), *(timed.shape for timed in TIMED)]
# The linear layers of transformers: forward, input gradient, weight gradient.
LINEAR = [
    shape
    for rows, width in itertools.product((8192, 32768), (768, 1024, 1600, 4096))
    for n, k in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    for shape in (Shape(rows, n, k, "NT"), Shape(rows, k, n, "NN"), Shape(n, k, rows, "TN", "fp32"))
]


def warm(timed) -> dict:
    return {"dram": 1e12} if timed.in_l2 else {}


# Rows, columns and blocks of a cluster that the prototype had, some of them with both.
PROTOTYPE = [
    {"m": m, "n": n, "cluster_m": cluster, "cluster_n": 1, "consumers": min(2, m // 64), "pingpong": False}
    for m, n in [(128, n) for n in (64, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)]
    + [(256, 128), *((64, n) for n in (32, 48, 64, 96, 128, 256))]
    for cluster in (1, 2)
]


def prototype_us(timed) -> float:
    """The model's time with the best of the tiles, and splits, that the prototype had."""
    shape, options = timed.shape, request(timed.shape) | warm(timed)
    narrow = 64 if options["n_major_b"] else 8  # columns of a load
    tiles = [t for t in PROTOTYPE if t["n"] // t["cluster_m"] % narrow == 0]
    splits = [s for s in (1, 2, 4, 8, 16) if s == 1 or (shape.result == "16" and shape.k // 64 // s >= 4)]
    return min(
        _host.gemm_sm90_microseconds(t, s, False, shape.m, shape.n, shape.k, **options) for t in tiles for s in splits
    )


def test_times_are_those_measured():
    errors = {t.shape.name: math.log(prototype_us(t) / t.prototype) for t in TIMED if t.prototype}
    assert len(errors) >= 19
    assert math.sqrt(sum(e * e for e in errors.values()) / len(errors)) <= 0.10
    assert max(map(abs, errors.values())) <= 0.2, errors


def test_no_plan_is_far_from_the_roofline_where_cublas_is_not():
    for timed in TIMED:
        floor = floor_us(timed.shape, CHIP)
        if timed.in_l2 or floor / timed.cublas < 0.9:
            continue
        predicted = plan(timed.shape, CHIP)["microseconds"]
        assert floor / predicted >= 0.9, (timed.shape.name, predicted, floor)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_nothing_is_faster_than_memory_and_tensor_cores(chip):
    """At the rates that the model works with: the whole of the tensor cores at its clock."""
    rates = _host.gemm_rates() | chip.request
    cores = chip.request["sm_count"] * {90: 4096, 80: 2048}[chip.request["capability"]] * rates["clock"] * 1e6
    at_most = replace(chip, flops=cores)
    for shape, bias in itertools.product(CUDA, (False, True)):
        assert plan(shape, chip, bias)["microseconds"] >= floor_us(shape, at_most), shape.name


def test_small_errors_of_a_rate_lead_to_no_tile_that_nobody_timed():
    flips = []
    for shape, bias in itertools.product([*SUITE, *LINEAR], (False, True)):
        if shape.result not in ("16", "fp32", "fp32+") or (bias and shape.result != "16"):
            continue
        options = {**request(shape, bias), **CHIP.request}
        if not TILES[_host.plan_gemm(shape.m, shape.n, shape.k, **options)["tile"]]["timed"]:
            continue
        for (rate, value), factor in itertools.product(_host.gemm_rates().items(), (0.8, 1.2)):
            changed = _host.plan_gemm(shape.m, shape.n, shape.k, **{**options, rate: value * factor})
            if not TILES[changed["tile"]]["timed"]:
                flips.append((shape.name, bias, rate, factor))
    assert not flips


def test_every_tile_that_is_compiled_is_the_choice_for_something():
    kinds = ({}, {"plain": False}, {"activation": "gelu", "side_bytes": 2}, {"activation": "swiglu"})
    used = {
        plan["tile"]
        for shape, kind in itertools.product([*SUITE, *LINEAR, Shape(8, 4096, 4096, "NT")], kinds)
        if (plan := _host.plan_gemm(shape.m, shape.n, shape.k, **request(shape) | kind))["kernel"] == "sm90"
    }
    assert used == set(range(len(TILES)))


def test_the_instances_are_few():
    """At most 300, of two dtypes: by layouts, and outputs of 16 and, where they leave in boxes, 32 bits."""
    layouts = [2 if t["n"] // t["cluster_m"] % 64 else 4 for t in TILES]
    assert 2 * sum(n * (1 if t["n"] % 64 else 2) for n, t in zip(layouts, TILES, strict=True)) <= 300


def test_an_epilogue_costs_its_instructions_where_nothing_hides_it():
    shape = (32768, 3072, 768)
    cooperative, pingpong = (
        next(t for t in TILES if (t["m"], t["n"], t["pingpong"]) == size)
        for size in ((128, 256, False), (128, 128, True))
    )

    def extra(tile: dict, k: int) -> float:
        times = [
            _host.gemm_sm90_microseconds(tile, 1, False, *shape[:2], k, activation=a, plain=False, in_registers=False)
            for a in ("relu", "gelu")
        ]
        return times[1] - times[0]

    assert extra(cooperative, 768) == pytest.approx(extra(cooperative, 4096), rel=0.02)
    assert extra(pingpong, 4096) < 0.1 * extra(cooperative, 4096)


def test_a_rate_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="unknown argument"):
        _host.plan_gemm(8, 8, 8, l3=1.0)
