"""judge_units_ against the decision for one unit in plain Python, over units of every size, and steps that follow one another."""

import math
import random

import pytest
import torch

import amp_kernels._raw.judge_units as module

EACH = pytest.mark.parametrize(
    "op",
    [torch.ops.amp_kernels.judge_units_.default, module.op.emulated, module.op.reference],
    ids=["compiled", "emulate", "reference"],
)


def judge(stat, norm, found, rule):
    """The factor, or 2 if nothing may change, and the statistics after it."""
    max_norm, check, zscore, decay, warmup, skips_spikes, _ = rule
    steps, skips, in_a_row, seen, mean, var = stat
    limit = math.inf
    if zscore and not found and math.isfinite(norm):
        seen += 1
        if seen <= warmup:
            d = norm - mean
            mean += d / seen
            var += (d * (norm - mean) - var) / seen
        else:
            sigma = math.sqrt(var)
            z = (norm - mean) / (sigma + 1e-6 * mean) if mean > 0 else 0.0
            entered = norm
            if z > zscore:
                limit, entered = mean + zscore**2 * sigma / z, mean + zscore * sigma
            mean = decay * mean + (1 - decay) * entered
            var = decay * var + (1 - decay) * (entered - mean) ** 2
    if (found and check) or (limit < math.inf and skips_spikes):
        return 2.0, (steps, skips + 1, in_a_row + 1, seen, mean, var)
    bound = min(limit, max_norm if max_norm >= 0 else math.inf)
    factor = 1.0
    if bound < math.inf or max_norm >= 0:
        factor = (
            min(1.0, bound / (norm + 1e-6)) if math.isfinite(norm) else (bound / norm if bound < norm else math.nan)
        )
    return factor, (steps + 1, skips, 0.0, seen, mean, var)


def rules_of(draw, units):
    return [
        (
            draw.choice((-1.0, 0.0, 0.5, 40.0, math.inf)),
            draw.choice((0.0, 1.0)),
            draw.choice((0.0, 1.0, 2.5)),
            draw.choice((0.0, 0.9)),
            draw.choice((2.0, 4.0)),
            draw.choice((0.0, 1.0)),
            draw.choice((1.0, 1.0, 0.0)),
        )
        for _ in range(units)
    ]


@EACH
@pytest.mark.parametrize("sizes", [[1], [0, 3, 0, 1, 70], [33, 32, 31, 1, 1, 1, 0], [1] * 300, [2000, 0]], ids=str)
def test_decisions_follow_the_rule(op, sizes):
    draw = random.Random(len(sizes))
    n, units, rules = sum(sizes), len(sizes), rules_of(draw, len(sizes))
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    elsewhere = [draw.random() < 0.2 for _ in range(n)]
    entries = torch.tensor([~row if away else row for row, away in zip(rows.tolist(), elsewhere, strict=True)])
    ends = torch.tensor(sizes).cumsum(0)
    statistics, expected = torch.zeros(units, 6, dtype=torch.float64), [(0.0,) * 6] * units
    for step in range(9):
        level = 30.0 if step == 7 else 1.0
        sums = torch.tensor([level * draw.uniform(0.5, 2.0) for _ in range(n)])
        flags = torch.tensor([draw.choice((0.0,) * 60 + (1.0, -1.0)) for _ in range(n)])
        sums[(flags > 0) & (torch.arange(n) % 2 == 0)] = torch.inf
        earlier = torch.tensor([draw.choice((0.0,) * 9 + (1.0,)) for _ in range(units)]) if step % 2 else None
        factors, results = op(sums, flags, entries, ends, torch.tensor(rules, dtype=torch.float64), statistics, earlier)
        begin = 0
        for unit, end in enumerate(ends.tolist()):
            own = rows[begin:end]
            counted = [row for row, away in zip(own.tolist(), elsewhere[begin:end], strict=True) if not away]
            begin = end
            there, nonfinite = bool((flags[own] >= 0).any()), bool((flags[own] > 0).any())
            if there and rules[unit][-1]:
                norm = math.sqrt(sum(sums[row].item() for row in counted if flags[row] >= 0))
                found = nonfinite or (earlier is not None and earlier[unit] > 0)
                factor, expected[unit] = judge(expected[unit], norm, found, rules[unit])
                wanted = norm, float(factor == 2.0), float(nonfinite)
            else:
                factor, wanted = 2.0, (0.0, 0.0, 0.0)
            torch.testing.assert_close(results[:, unit].tolist(), list(wanted), rtol=1e-6, atol=0)
            for got in factors[own].tolist():
                torch.testing.assert_close(got, factor, rtol=3e-6, atol=0, equal_nan=True)
            torch.testing.assert_close(statistics[unit].tolist(), list(expected[unit]), rtol=1e-5, atol=1e-6)


@EACH
def test_a_lasting_change_is_flagged_for_a_while(op):
    """With ZClip's own averages it is flagged for ever."""
    generator = torch.Generator().manual_seed(3)
    rules = torch.tensor([(-1.0, 0.0, 2.5, 0.97, 25.0, 0.0, 1.0)], dtype=torch.float64)
    statistics, one = torch.zeros(1, 6, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    clipped = []
    for step in range(400):
        norm = (1.0 if step < 100 else 10.0) * (1.0 + 0.1 * torch.randn(1, generator=generator))
        factors, _ = op(norm.square(), torch.zeros(1), 0 * one, one, rules, statistics)
        clipped.append(bool(factors < 1))
    assert not any(clipped[:25])
    assert sum(clipped[:100]) <= 6
    assert 10 <= sum(clipped[100:]) <= 120
    assert sum(clipped[300:]) <= 6


@pytest.mark.skipif(not module.op.built.cpu, reason="the C++ library is not built")
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ends", [1, 4], "ends\\[1\\] is 4"),
        ("ends", [-1, 3], "ends\\[0\\] is -1"),
        ("ends", [1, 2], "ends\\[1\\] is 2"),
        ("rows", [0, 1, 3], "rows\\[2\\] is 3"),
        ("rows", [0, ~3, 2], "rows\\[1\\] is -4"),
        ("rows", [0, ~0, 2], "rows\\[1\\] is -1"),
    ],
)
def test_places_beyond_the_tensors_are_refused(name, values, message):
    """On the CPU; kernels of a GPU skip them."""
    rule = torch.tensor([(1.0, 1.0, 0.0, 0.9, 2.0, 0.0, 1.0)] * 2, dtype=torch.float64)
    places = {"rows": torch.arange(3), "ends": torch.tensor([1, 3]), name: torch.tensor(values)}
    statistics = torch.zeros(2, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.amp_kernels.judge_units_(torch.ones(3), torch.zeros(3), *places.values(), rule, statistics)
    assert not statistics.any()
    if values != [0, ~0, 2]:  # there the emulator reports two writes of one place
        module.op.emulated(torch.ones(3), torch.zeros(3), *places.values(), rule, statistics)
