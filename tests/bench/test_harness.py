"""The harness judges others, so its promises are tested: nothing wrong is timed, turns are taken, figures add up."""

import pytest
import torch

from bench.harness import environment, roofline
from bench.harness import measure as harness
from bench.harness.case import WithFacts
from bench.harness.check import Mismatch, worst_error
from bench.harness.measure import measure
from bench.harness.memory import held_bytes
from bench.harness.roofline import Roofline
from bench.harness.timer import Effort, quantiles
from bench.ops import layouts, lists

from .doubling import doubling

CPU = torch.device("cpu")
EFFORT = Effort(settle=0.0, warmup=0.0, sample=0.0, rounds=3)


def case(**providers):
    return doubling(functions=providers)


def double(x):
    return 2 * x


def rows_of(case, **options):
    return {row["provider"]: row for row in measure(case, CPU, EFFORT, **options)}


def test_a_wrong_or_failing_provider_is_announced_reported_and_never_timed():
    heard, calls = [], []

    def wrong(x):
        calls.append(1)
        return 2.001 * x

    def broken(x):
        assert heard[-1].startswith("broken, check")
        raise RuntimeError("no kernel\nfor this")

    rows = rows_of(case(torch=double, wrong=wrong, broken=broken), note=heard.append)
    assert rows["torch"]["status"] == "ok"
    assert rows["torch"]["p50_us"] > 0
    assert rows["wrong"]["status"] == "wrong"
    assert "relative error 5.0" in rows["wrong"]["reason"]
    assert rows["broken"]["reason"] == "RuntimeError: no kernel"
    assert len(calls) == 1  # the check, and no more
    assert not {"p50_us", "speedup"} & (set(rows["wrong"]) | set(rows["broken"]))
    checks = ["torch, check", "wrong, check", "broken, check"]
    assert heard == ["reference", *checks, "torch, warm-up", "timing in turns"]


def test_the_reference_is_computed_before_a_provider_changes_its_inputs():
    assert rows_of(case(torch=lambda x: x.mul_(2)))["torch"]["status"] == "ok"


def test_providers_take_turns():
    order = []
    names = ("torch", "b", "c")
    measure(case(**{name: lambda x, name=name: (order.append(name), 2 * x)[1] for name in names}), CPU, EFFORT)
    assert order[-9:] == ["torch", "b", "c"] * 3


def test_facts_kernels_and_the_hosts_share_come_with_the_row():
    timed = case(torch=double, amp_kernels=double)
    plain = timed.providers["amp_kernels"]
    timed.providers["amp_kernels"] = lambda x: WithFacts(plain(x), lambda: {"plan": "128x256"})
    timed.kernels = timed.host_time = True
    rows = rows_of(timed)
    assert rows["amp_kernels"]["plan"] == "128x256"
    assert "plan" not in rows["torch"]
    assert "aten::mul" in rows["torch"]["kernels"]
    assert rows["torch"]["host_us"] > 0


def test_speedup_is_the_median_of_ratios_within_a_round(monkeypatch):
    """Baseline 1, 10 and 2 s, b 0.5, 2 and 2 s: ratios 2, 5 and 1. The ratio of the medians would be 2 / 2 = 1."""
    samples = {"torch": iter([1.0, 10.0, 2.0]), "b": iter([0.5, 2.0, 2.0])}

    class Fake:
        kind = "eager"

        def __init__(self, case, name, device, effort):
            self.name = name

        def sample(self):
            return next(samples[self.name])

    monkeypatch.setattr(harness, "_timer", Fake)
    rows = rows_of(case(torch=double, b=double))
    assert (rows["b"]["speedup"], rows["torch"]["speedup"], rows["b"]["p50_us"]) == (2.0, 1.0, 2e6)


def test_quantiles_interpolate():
    assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == (2.0, 3.5, 5.0)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)


# ---- the check


def test_one_wrong_row_of_a_large_matrix_is_seen():
    want = torch.randn(4096, 64, dtype=torch.float64)
    got = want.clone()
    got[1000, 3] += 1.0  # hidden in the norm of the whole: 1 / 512
    with pytest.raises(Mismatch, match=r"out\[0\]: relative error 1\.\d+e-01"):
        worst_error({"out": got}, {"out": (want, 4e-3)})


def test_one_wrong_vector_of_a_long_list_is_seen():
    want = [torch.randn(64, dtype=torch.float64) for _ in range(1000)] + [torch.randn(8, 8, dtype=torch.float64)]
    got = [tensor.clone() for tensor in want]
    worst_error({"out": got}, {"out": (want, 1e-6)})
    got[700][3] += 0.1
    with pytest.raises(Mismatch, match=r"out\[0\]: relative error 1\.\d+e-02"):
        worst_error({"out": got}, {"out": (want, 1e-6)})
    got[700] = want[700]
    got[1000] = 1.1 * want[1000]
    with pytest.raises(Mismatch, match=r"out\[1000\]: relative error"):
        worst_error({"out": got}, {"out": (want, 1e-6)})


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"out": torch.full((4,), float("nan"))}, "relative error nan"),
        ({"out": torch.ones(2, 2)}, "has shape"),
        ({"out": [torch.ones(4), torch.ones(4)]}, "2 tensors instead of 1"),
        ({"extra": torch.ones(4)}, "no result 'out'"),
        ({"out": torch.ones(4), "extra": torch.zeros(4)}, r"extra\[0\]: relative error 1"),
        (
            {"out": torch.ones(4), "flag": torch.ones(())},
            r"flag\[0\]: relative error 1",
        ),  # absolute: the reference is 0
    ],
)
def test_results_unlike_the_reference_are_mismatches(got, message):
    one, zero = torch.ones(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    want = {"out": (one, 1e-3), "extra": (one, 1e-3), "flag": (zero, 0.0)}
    with pytest.raises(Mismatch, match=message):
        worst_error(got, want)
    assert worst_error({"out": one, "flag": zero.float()}, want) == 0.0


def test_an_error_is_relative_to_its_row_and_rows_have_some_elements():
    """Rounding a large element is no error beside small ones, and a convolution of 1 x 1 has no rows of one element."""
    want = torch.full((4, 32, 1, 1), 1e-3)
    want[2] = 10.0
    want[2, 0] = 100.0
    rounded = want.bfloat16()
    assert worst_error({"y": rounded}, {"y": (want.double(), 2.0**-8)}) <= 2.0**-8
    rounded[0, :8] = 3.0  # in a small row: seen, in units of an average one
    with pytest.raises(Mismatch, match="relative error"):
        worst_error({"y": rounded}, {"y": (want.double(), 2.0**-8)})


# ---- lists of parameters, and the layouts that they are kept in


HELD = dict(zip((layout.name for layout in layouts.LAYOUTS), (12, 14, 14, 12, 8, 6.06, 5.06), strict=True))
EVERY_LAYOUT = pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=lambda layout: layout.name)


@EVERY_LAYOUT
def test_bytes_are_counted_from_what_is_stored(layout):
    """Everything an update reads and writes once: gradient, weight, master or remainder, shadow, two moments."""
    param = layout.param.itemsize
    moments = 2 * (33 / 32 if layout.in_8_bits else layout.options.get("state_dtype", torch.float32).itemsize)
    master = {"fp32": 4, "split": 2, "split24": 1}.get(layout.options.get("master_weights"), 0)
    read = param + (0 if master == 4 else param) + master + moments  # a full master makes reading the weight needless
    written = param + master + moments + (2 if layout.shadow else 0)
    assert layout.update_bytes == read + written
    assert layout.step_bytes == layout.update_bytes + param  # one more read of the gradients
    adamw = layouts.OurAdamW(layout, layouts.draw(layout, [(1024, 32), (64,)], torch.Generator()))
    assert held_bytes(adamw.params, adamw.optimizer) == param * (1024 * 32 + 64)  # without gradients
    adamw.optimizer.step()
    assert HELD[layout.name] <= held_bytes(adamw.params, adamw.optimizer) / (1024 * 32 + 64) < HELD[layout.name] + 0.1


@EVERY_LAYOUT
def test_the_optimizer_reference_tells_a_wrong_update_from_a_right_one(layout):
    def inputs():
        return layouts.draw(layout, lists.tiny(), torch.Generator().manual_seed(0))

    def two_steps(**change):
        adamw = layouts.TorchAdamW(layout, inputs())
        adamw.optimizer.param_groups[0].update(change)
        for _ in range(layouts.STEPS):
            adamw.optimizer.step()
            adamw.cast()
        return adamw.results

    want = layouts.reference(layout, inputs(), None)
    worst_error(two_steps(), want)
    lr, decay = (1.3, 10.0) if layout.in_8_bits else (1.05, 1.0)  # of libraries whose codes are coarse
    for change in ({"lr": lr * layouts.LR}, {"betas": (0.91, 0.999)}, {"weight_decay": decay}):
        with pytest.raises(Mismatch):
            worst_error(two_steps(**change), want)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(None, 60 / 3), (30, 60 / 3), (40, 60 / 3), (20, 60 / 4), (0, 60 / 4), (24, 24 / 3 + 36 / 4)],
)
def test_reads_beyond_as_many_writes_have_the_rate_of_two_reads_to_a_write(written, seconds):
    """36 bytes are read and 24 written: 12 and 12 move as in a copy, 24 and 12 at the other rate."""
    ceilings = Roofline(3.0, 4.0, {"fp32": 2.0})
    assert ceilings.floor_seconds(60, 0, "fp32", written) == pytest.approx(seconds)
    assert ceilings.floor_seconds(60, 100, "fp32", written) == 50.0


@pytest.mark.parametrize(
    ("device", "count_bytes", "flops", "share", "cached"),
    [
        ("cpu", 1000, 0, 0.5, True),
        ("cpu", 1001, 0, 0.5, False),
        ("cpu", 1001, 0, 7.1, True),  # a cache that the system does not tell
        ("cpu", 1000, 10**4, 0.5, False),  # arithmetic bounds it
        ("cuda", 1000, 0, 1.1, False),  # inputs rotate
    ],
)
def test_sets_that_stay_in_a_cpus_cache_have_no_share_of_its_memory(
    monkeypatch, device, count_bytes, flops, share, cached
):
    monkeypatch.setattr(roofline, "cache_bytes", lambda: 1000)
    ceilings = Roofline(3.0, 4.0, {"fp32": 2.0})
    assert ceilings.in_cache(torch.device(device), count_bytes, flops, "fp32", share) is cached


@pytest.mark.parametrize("count", [1, 2])
def test_one_thread_is_advised_where_there_are_more(monkeypatch, threads, count):
    monkeypatch.setattr(environment.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    threads(count)
    assert ("OMP_NUM_THREADS" in environment.load_warning(CPU)) is (count > 1)
