"""The choice of GEMM kernel, tile and splits (csrc/gemm/plan.h): every shape gets a plan that its kernel accepts."""

from __future__ import annotations

import itertools
import random

import pytest

from ..gpu import gemm_cases

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

CANDIDATES = _host.gemm_candidates()
SIZES = (1, 8, 13, 64, 65, 576, 1000, 4096, 50257)
SHARED_LIMIT = 232_448  # bytes a block may have on sm_90


def shared_bytes(tile: dict, stages: int, float_output: bool) -> int:
    """Bytes that one block needs: alignment, stages of A and B, a staging buffer and a mailbox for each consumer, barriers."""
    boxes, rows = 2 * 64 * 128, 64 * (2 * tile["n"] + 16)
    staging = boxes if float_output or tile["n"] % 64 == 0 else max(boxes, rows)
    return (
        1024
        + stages * (tile["m"] + tile["n"]) * 128
        + tile["consumers"] * staging
        + 16 * stages
        + 96 * tile["consumers"]
    )


@pytest.mark.parametrize("tile", CANDIDATES["sm90"], ids=lambda t: f"{t['m']}x{t['n']}{'p' if t['pingpong'] else ''}")
def test_every_wgmma_tile_fits_the_hardware(tile):
    rows = tile["m"] if tile["pingpong"] else tile["m"] // tile["consumers"]
    assert rows % 64 == 0
    assert rows * (1 if tile["pingpong"] else tile["consumers"]) == tile["m"]
    assert tile["n"] % 16 == 0
    assert 16 <= tile["n"] <= 256
    assert tile["m"] <= 256
    assert tile["cluster_m"] * tile["cluster_n"] in (1, 2)
    assert shared_bytes(tile, 3, float_output=tile["n"] % 64 == 0) <= SHARED_LIMIT, "fewer than three stages"
    accumulators = rows * tile["n"] // 128
    registers = {1: 255, 2: 240, 3: 160}[tile["consumers"]]
    assert accumulators + 24 <= registers, "no room beside the accumulators"


def requests():
    for m, n, k in itertools.product(SIZES, repeat=3):
        for m_major_a, n_major_b in ((False, False), (False, True), (True, True)):
            # The contiguous dimension decides the alignment.
            lines = (m if m_major_a else k, n if n_major_b else k)
            yield {
                "m": m,
                "n": n,
                "k": k,
                "m_major_a": m_major_a,
                "n_major_b": n_major_b,
                "tma_a": lines[0] % 8 == 0,
                "tma_b": lines[1] % 8 == 0,
                "odd_operands": any(size % 2 for size in lines),
                "tma_output": n % 8 == 0,
                "ld_a": lines[0],
                "ld_b": lines[1],
            }


EPILOGUES = (
    {},
    {"activation": "gelu", "keeps_z": True, "side_bytes": 2},
    {"activation": "swiglu"},
    {"activation": "swiglu", "backward": True, "column_sums": True, "side_bytes": 4},
    {"out_bytes": 8},
)


def assert_legal(plan: dict, request: dict) -> None:
    assert plan["splits"] >= 1
    assert plan["splits"] == 1 or -(-request["k"] // 64) // plan["splits"] >= 4, "a split with hardly any work"
    aligned = request["tma_a"] and request["tma_b"]
    if plan["in_phases"]:
        assert not aligned
        assert request["m_major_a"]
        assert request["n_major_b"]
        assert request["activation"] == "none"
        assert request["k"] > 8
    if plan["kernel"] == "sm80":
        assert not aligned
        assert not plan["repacked"]
        assert plan["tile"] < len(CANDIDATES["sm80"])
        assert not plan["swapped"]
        return
    assert plan["kernel"] == "sm90"
    assert plan["repacked"] == (not aligned and not plan["in_phases"])
    tile = CANDIDATES["sm90"][plan["tile"]]
    n_major_b = request["m_major_a"] if plan["swapped"] else request["n_major_b"]
    columns = tile["n"] // tile["cluster_m"]
    assert not n_major_b or columns in (16, 32) or columns % 64 == 0, "no swizzle pattern has rows of so many columns"
    in_rows = not plan["swapped"] and (request["out_bytes"] == 2 or tile["n"] % 64 == 0)
    plain = request["activation"] == "none" and request["side_bytes"] == 0
    assert tile["takes_epilogue"] or (plain and in_rows), "no registers for an epilogue"
    swiglu = request.get("activation") == "swiglu"
    if plan["swapped"]:
        assert not swiglu
        assert not request.get("column_sums")
    if swiglu and not request.get("backward"):
        assert tile["n"] % 128 == 0
        assert not n_major_b or request["n"] % 16 == 0, "the second half begins at a multiple of 16 bytes"


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: "-".join(map(str, e.values())) or "plain")
def test_every_shape_gets_a_legal_plan(epilogue):
    for request in requests():
        if epilogue.get("activation") == "swiglu" and request["n"] % 2:
            continue
        request = {"activation": "none", "side_bytes": 0, "out_bytes": 2, **request, **epilogue}
        for batch in (1, 48):
            plan = _host.plan_gemm(**request, batch=batch)
            halved = request["activation"] == "swiglu" and not request.get("backward")
            if halved and request["n_major_b"] and request["n"] % 16 and plan["kernel"] == "sm80":
                continue  # the one case where aligned operands do not suffice
            assert_legal(plan, request)
            assert plan == _host.plan_gemm(**request, batch=batch)


@pytest.mark.parametrize(("capability", "kernel"), [(90, "sm90"), (80, "sm80"), (120, "sm80")])
def test_batch_invariant_plans_keep_the_order_of_k(capability, kernel):
    """Over 10^4 shapes: one kernel, no split and no phases for any number of rows and batches, and copies by layout alone."""
    draw = random.Random(0)
    for _ in range(10_000 // 8):
        n, k = (
            draw.choice((draw.randint(1, 300), 8 * draw.randint(1, 2000), draw.randint(1, 60_000))) for _ in range(2)
        )
        lies = {
            **dict(zip(("m_major_a", "n_major_b"), draw.choices((True, False), k=2), strict=True)),
            **dict(zip(("tma_a", "tma_b"), draw.choices((True, True, False), k=2), strict=True)),
            "chained": draw.random() < 0.2,
        }
        lies["odd_operands"] = not (lies["tma_a"] and lies["tma_b"])
        if lies["chained"]:
            lies |= {"m_major_a": True, "n_major_b": True, "out_bytes": 8}
        plans = [
            _host.plan_gemm(m, n, k, batch=batch, batch_invariant=True, capability=capability, **lies)
            for m, batch in ((1, 1), (3, 9), (16, 1), (65, 1), (512, 2), (4096, 1), (30_011, 1), (65_536, 1))
        ]
        assert {(plan["kernel"], plan["splits"], plan["in_phases"]) for plan in plans} == {(kernel, 1, False)}
        assert len({plan["repacked"] for plan in plans}) == 1


def test_batch_invariant_plans_cost_little():
    """One chain over k in the best tile for the rows there are: by the model at least 0.90 of the free plan from 1,024 rows on, forward
    and gradient of the input, and 0.85 for a weight whose tiles fill the chip."""
    layers = ((768, 768), (2304, 768), (3072, 768), (768, 3072), (4096, 4096), (14336, 4096), (4096, 14336))
    for m in (1024, 2048, 16384):
        for n, k in layers:
            free, fixed = (_host.plan_gemm(m, n, k, batch_invariant=fixed)["microseconds"] for fixed in (False, True))
            assert free >= 0.90 * fixed, (m, n, k)
    weight = {"m_major_a": True, "n_major_b": True, "out_bytes": 8}
    for tokens in (4096, 16384):
        for m, n in ((2304, 768), (1024, 1024), (4096, 1024), (2048, 2048), (4096, 4096), (14336, 4096), (50304, 768)):
            free = _host.plan_gemm(m, n, tokens, **weight)["microseconds"]
            fixed = _host.plan_gemm(m, n, tokens, **weight, batch_invariant=True, chained=True)["microseconds"]
            assert free >= 0.85 * fixed, (m, n, tokens, free / fixed)


def test_splits_and_swaps_come_where_they_help():
    assert _host.plan_gemm(3072, 768, 65536, m_major_a=True, n_major_b=True, out_bytes=8)["splits"] > 1
    assert _host.plan_gemm(8192, 8192, 8192)["splits"] == 1
    few_rows = _host.plan_gemm(8, 4096, 4096)
    assert few_rows["swapped"]
    assert CANDIDATES["sm90"][few_rows["tile"]]["n"] <= 32
    assert not _host.plan_gemm(4096, 4096, 4096)["swapped"]


def test_activations_run_under_the_products_where_k_is_short():
    plan = _host.plan_gemm(65536, 3072, 768, activation="gelu")
    assert CANDIDATES["sm90"][plan["tile"]]["pingpong"]


@pytest.mark.parametrize(
    ("capability", "built", "kernel"),
    [
        (90, {}, "sm90"),
        (90, {"sm90": False}, "sm80"),
        (90, {"sm90": False, "sm80": False}, "none"),
        (80, {}, "sm80"),
        (120, {}, "sm80"),
        (75, {}, "none"),
    ],
)
def test_kernel_follows_the_chip_and_the_build(capability, built, kernel):
    assert _host.plan_gemm(512, 512, 512, capability=capability, **built)["kernel"] == kernel


def test_unaligned_operands_are_copied_where_that_pays():
    odd = {"tma_a": False, "tma_b": False, "odd_operands": True, "tma_output": False}
    large, small = _host.plan_gemm(4097, 4097, 4097, **odd), _host.plan_gemm(9, 9, 9, **odd)
    assert (large["kernel"], large["repacked"]) == ("sm90", True)
    assert (small["kernel"], small["repacked"]) == ("sm80", False)
    assert _host.plan_gemm(4097, 4097, 4097, **odd, sm90=False)["kernel"] == "sm80"
    lies_anywhere = _host.plan_gemm(16384, 50257, 768, tma_output=False)
    assert (lies_anywhere["kernel"], lies_anywhere["repacked"]) == ("sm90", False)


def test_a_copy_is_paid_for():
    """Each operand that is copied is read and written once more, at the memory's rate."""
    shape = (8192, 4096, 4096)
    times = {
        (a, b): _host.plan_gemm(*shape, tma_a=a, tma_b=b, odd_operands=not (a and b))["microseconds"]
        for a, b in itertools.product((True, False), repeat=2)
    }
    launch = _host.gemm_rates()["start"] / _host.gemm_rates()["clock"]
    for (a, b), time in times.items():
        copied = 4 * 4096 * ((not a) * 8192 + (not b) * 4096) / _host.gemm_rates()["dram"]
        assert time == pytest.approx(times[True, True] + copied + (not (a and b)) * launch)


A100 = {"capability": 80, "sm_count": 108, "clock": 1410.0, "dram": 1.8e6}


@pytest.mark.parametrize("chip", [{}, A100], ids=["H200", "A100"])
def test_a_long_k_of_odd_lines_goes_in_phases(chip):
    """The gradient of a convolution's weight: at most two thirds of the time of a copy or of odd accesses, on an H200 half."""
    request = {"m_major_a": True, "n_major_b": True, "tma_b": False, "odd_operands": True, "out_bytes": 8, **chip}
    phased = _host.plan_gemm(64, 147, 802816, **request, ld_a=64, ld_b=147)
    other = _host.plan_gemm(64, 147, 802816, **request)
    assert phased["in_phases"]
    assert not phased["repacked"]
    assert not other["in_phases"]
    assert phased["microseconds"] < 0.66 * other["microseconds"]
    dram = chip.get("dram", _host.gemm_rates()["dram"])
    assert phased["microseconds"] < 1.4 * 2 * (64 + 147) * 802816 / dram, "far from the memory's rate"


def test_phases_are_for_results_that_are_smaller_than_the_operands():
    odd = {"m_major_a": True, "n_major_b": True, "tma_a": False, "tma_b": False, "odd_operands": True}
    for m, n, k in itertools.product((9, 147, 1001), (11, 999), (33, 4100, 40_007)):
        plan = _host.plan_gemm(m, n, k, **odd, ld_a=m, ld_b=n)
        if plan["in_phases"]:
            assert 4 * 8 * m * n < 2 * k * (m + n), (m, n, k)
    assert not _host.plan_gemm(4097, 4097, 4097, **odd, ld_a=4097, ld_b=4097)["in_phases"]
    assert not _host.plan_gemm(64, 147, 802816, **odd, ld_a=64, ld_b=147, batch=2)["in_phases"]
    assert not _host.plan_gemm(64, 147, 802816, **odd, ld_a=64, ld_b=147, batch_invariant=True)["in_phases"]


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        _host.plan_gemm(8, 8, 8, activation="tanh")


SIZES_OF_CASES = (8, 24, 72, 136, 264, 392, 776, 1544, 2568, 3080, 5128)
LAYOUTS = list(itertools.product((False, True), repeat=2))


def test_the_gpu_tests_take_every_plan():
    """Each tile, swapped or not, in splits or not, in phases or not, that some shape is given on an H200."""

    def chosen(case):
        plan = _host.plan_gemm(**case.request)
        return plan["kernel"], plan["tile"], plan["swapped"], plan["splits"] > 1, plan["in_phases"]

    covered = {chosen(case) for case in gemm_cases.CASES}
    for m, n, k in itertools.product(SIZES_OF_CASES, SIZES_OF_CASES, (72, 1096, 4104)):
        for kind, layout in itertools.product(gemm_cases.KINDS, LAYOUTS):
            case = gemm_cases.GemmCase(kind, m, n, k, *layout)
            assert chosen(case) in covered, case


def edges_of_c(case: gemm_cases.GemmCase) -> set[tuple]:
    plan = _host.plan_gemm(**case.request)
    return gemm_cases.edges_of_c(case, plan, CANDIDATES[plan["kernel"]][plan["tile"]])


def test_the_gpu_tests_take_tiles_outside_c():
    covered = set().union(*map(edges_of_c, gemm_cases.CASES))
    odd = tuple(size + 1 for size in SIZES_OF_CASES)
    for m, n, k in itertools.product(SIZES_OF_CASES, SIZES_OF_CASES + odd, (72, 1096, 4104)):
        for kind, layout in itertools.product(gemm_cases.KINDS, LAYOUTS):
            case = gemm_cases.GemmCase(kind, m, n - n % 2 if kind == "swiglu" else n, k, *layout)
            assert edges_of_c(case) <= covered, case


TRIANGLES = CANDIDATES["triangles"]


@pytest.mark.parametrize("tile", TRIANGLES, ids=lambda t: f"{t['m']}x{t['n']}")
def test_every_tile_of_a_symmetric_product_fits_the_hardware(tile):
    rows = tile["m"] if tile["pingpong"] else tile["m"] // tile["consumers"]
    assert rows % 64 == 0
    assert tile["n"] % 16 == 0
    assert shared_bytes({**tile, "n": 64}, 0, False) + 3 * (tile["m"] + tile["n"]) * 128 <= SHARED_LIMIT
    assert rows * tile["n"] // 128 + 64 <= {1: 255, 2: 240}[tile["consumers"]], "no room for the epilogue"


def tiles_of_triangle(tile: dict, n: int) -> int:
    """Tiles with an element on or below the diagonal, by counting; the last rows of tiles may lie out of bounds."""
    origins = itertools.product(range(0, n, tile["m"]), range(0, n + tile["m"], tile["n"]))
    return sum(column < row + tile["m"] for row, column in origins)


def symmetric_plan(n: int, k: int, batch: int = 1, by_columns: bool = False) -> dict:
    lies = {"m_major_a": by_columns, "n_major_b": by_columns}
    return _host.plan_gemm(n, n, k, batch=batch, symmetric=True, **lies)


def test_lone_symmetric_products_fill_whole_rounds_of_the_chip():
    """Against the full product, by the model: 1.5 at 2,048, where 136 tiles of 128 x 128 need two rounds; 1.8 from 3,072 on."""
    for n, tiles, gain in (
        (1024, 132, 1.15),
        (2048, 132, 1.5),
        (3072, 132, 1.8),
        (3584, 2 * 132, 1.8),
        (4096, 4 * 132, 1.9),
    ):
        plan = symmetric_plan(n, n)
        assert tiles_of_triangle(TRIANGLES[plan["tile"]], n) <= tiles, n
        assert _host.plan_gemm(n, n, n)["microseconds"] >= gain * plan["microseconds"], n


def test_batches_of_symmetric_products_overlap_their_stores():
    for n in (768, 1024, 2048, 3072, 4096):
        assert TRIANGLES[symmetric_plan(n, n, batch=12)["tile"]]["pingpong"], n


def test_symmetric_products_by_columns_take_boxes_of_64():
    for batch, n, k in itertools.product((1, 12), (72, 1024, 2048, 3072), (72, 4096)):
        assert TRIANGLES[symmetric_plan(n, k, batch, by_columns=True)["tile"]]["n"] % 64 == 0


def test_the_gpu_tests_take_every_tile_of_symmetric_products():
    taken = {(symmetric_plan(n, 72, batch, by)["tile"], by) for batch, n, by in gemm_cases.SYMMETRIC}
    assert {tile for tile, by_columns in taken if not by_columns} == set(range(len(TRIANGLES)))
    assert {tile for tile, by_columns in taken if by_columns} == {
        i for i, t in enumerate(TRIANGLES) if t["n"] % 64 == 0
    }
