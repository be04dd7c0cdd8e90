"""The harness judges others, so its promises are tested: nothing wrong is timed, turns are taken, figures add up."""

import json

import pytest
import torch

from bench import harness, layouts, lists, run
from bench.harness import Case, Effort, Mismatch, measure, quantiles, worst_error

CPU = torch.device("cpu")
EFFORT = Effort(warmup=0.0, sample=0.0, rounds=3)


def case(**providers) -> Case:
    """Doubling a vector; providers are functions of it."""
    return Case(
        op="double",
        shape="64",
        dtype="fp32",
        bytes=512,
        flops=64,
        inputs=lambda generator: torch.randn(64, generator=generator),
        providers={name: lambda x, f=f: lambda: {"out": f(x)} for name, f in providers.items()},
        reference=lambda x: {"out": (2 * x.double(), 1e-6)},
    )


def rows_of(case, **options):
    return {row["provider"]: row for row in measure(case, CPU, EFFORT, **options)}


def test_a_wrong_or_failing_provider_is_reported_and_never_timed():
    calls = []

    def wrong(x):
        calls.append(1)
        return 2.001 * x

    def broken(x):
        raise RuntimeError("no kernel\nfor this")

    rows = rows_of(case(torch=lambda x: 2 * x, wrong=wrong, broken=broken))
    assert rows["torch"]["status"] == "ok"
    assert rows["torch"]["p50_us"] > 0
    assert rows["wrong"]["status"] == "wrong"
    assert "relative error 5.0" in rows["wrong"]["reason"]
    assert rows["broken"]["reason"] == "RuntimeError: no kernel"
    assert len(calls) == 1  # the check, and no more
    assert not {"p50_us", "speedup"} & (set(rows["wrong"]) | set(rows["broken"]))


def test_the_check_compares_with_inputs_as_they_were():
    """An in-place provider changes its inputs: the reference must be computed before it runs."""
    rows = rows_of(case(torch=lambda x: x.mul_(2)))
    assert rows["torch"]["status"] == "ok"


def test_providers_take_turns():
    order = []
    names = ("torch", "b", "c")
    timed = case(**{name: lambda x, name=name: (order.append(name), 2 * x)[1] for name in names})
    measure(timed, CPU, EFFORT)
    assert order[-9:] == ["torch", "b", "c"] * 3


def test_only_chosen_providers_run_and_a_backend_suffix_belongs_to_its_provider():
    timed = case(**{"torch": lambda x: 2 * x, "amp_kernels": lambda x: 2 * x, "amp_kernels:triton": lambda x: x + x})
    assert list(rows_of(timed, chosen={"amp_kernels"})) == ["amp_kernels", "amp_kernels:triton"]
    assert "speedup" not in rows_of(timed, chosen={"amp_kernels"})["amp_kernels"]


def test_speedup_is_the_median_of_ratios_within_a_round(monkeypatch):
    """Baseline 1, 10 and 2 s, b 0.5, 2 and 2 s: ratios 2, 5 and 1. The ratio of the medians would be 2 / 2 = 1."""
    samples = {"torch": iter([1.0, 10.0, 2.0]), "b": iter([0.5, 2.0, 2.0])}

    class Fake:
        kind = "eager"

        def __init__(self, case, name, device, effort):
            self.name = name

        def sample(self):
            return next(samples[self.name])

    monkeypatch.setattr(harness, "Timer", Fake)
    rows = rows_of(case(torch=lambda x: 2 * x, b=lambda x: 2 * x))
    assert rows["b"]["speedup"] == 2.0
    assert rows["torch"]["speedup"] == 1.0
    assert rows["b"]["p50_us"] == 2e6


def test_quantiles_interpolate():
    assert quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == (2.0, 3.5, 5.0)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)


def test_one_wrong_row_of_a_large_matrix_is_seen():
    want = torch.randn(4096, 64, dtype=torch.float64)
    got = want.clone()
    got[1000, 3] += 1.0  # hidden in the norm of the whole: 1 / 512
    assert (got - want).norm() / want.norm() < 4e-3
    with pytest.raises(Mismatch, match=r"out\[0\]: relative error 1\.\d+e-01"):
        worst_error({"out": got}, {"out": (want, 4e-3)})


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"out": torch.full((4,), float("nan"))}, "relative error nan"),
        ({"out": torch.ones(2, 2)}, "has shape"),
        ({"out": [torch.ones(4), torch.ones(4)]}, "2 tensors instead of 1"),
        ({"extra": torch.ones(4)}, "no result 'out'"),
        ({"out": torch.ones(4), "extra": torch.zeros(4)}, r"extra\[0\]: relative error 1"),
    ],
)
def test_what_is_not_the_reference_is_a_mismatch(got, message):
    one = torch.ones(4, dtype=torch.float64)
    with pytest.raises(Mismatch, match=message):
        worst_error(got, {"out": (one, 1e-3), "extra": (one, 1e-3)})


def test_a_zero_reference_takes_the_absolute_error():
    zero = torch.zeros((), dtype=torch.float64)
    assert worst_error({"flag": torch.zeros(())}, {"flag": (zero, 0.0)}) == 0.0
    with pytest.raises(Mismatch):
        worst_error({"flag": torch.ones(())}, {"flag": (zero, 0.0)})


@pytest.mark.parametrize(
    ("name", "tensors", "count"), [("resnet-50", 161, 25_557_032), ("llama-1b", 146, 1_235_814_400)]
)
def test_lists_are_those_of_the_models(name, tensors, count):
    shapes = lists.LISTS[name]()
    assert len(shapes) == tensors
    assert lists.numel(shapes) == count


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=lambda layout: layout.name)
def test_update_bytes_are_counted_from_what_is_stored(layout):
    """Everything an update reads and writes once: gradient, weight, master or remainder, shadow, two moments."""
    param = layout.param.itemsize
    moments = 2 * (layout.options.get("state_dtype") or torch.float32).itemsize
    master = {"fp32": 4, "split": 2}.get(layout.options.get("master_weights"), 0)
    read = param + (0 if master == 4 else param) + master + moments  # a full master makes reading the weight needless
    written = param + master + moments + (2 if layout.shadow else 0)
    assert layout.update_bytes == read + written


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=lambda layout: layout.name)
def test_the_optimizer_reference_tells_a_wrong_update_from_a_right_one(layout):
    def inputs():
        return layouts.draw(layout, lists.tiny(), torch.Generator().manual_seed(0))

    def two_steps(**change):
        adamw = layouts.TorchAdamW(layout, inputs())
        adamw.optimizer.param_groups[0].update(change)
        for _ in range(layouts.STEPS):
            adamw.optimizer.step()
            adamw.cast()
        return adamw.results()

    want = layouts.reference(layout, inputs(), None)
    worst_error(two_steps(), want)
    for change in ({"lr": 1.05 * layouts.LR}, {"betas": (0.91, 0.999)}, {"weight_decay": 1.0}):
        with pytest.raises(Mismatch):
            worst_error(two_steps(**change), want)


def test_the_command_writes_rows_table_and_plot(tmp_path, capsys):
    options = ["--device", "cpu", "--quick", "--op", "check_and_norm,step", "--out", str(tmp_path)]
    assert run.main([*options, "--dtype", "bf16"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["op"] for row in rows} == {"check_and_norm", "step"}
    assert {row["provider"] for row in rows} == {"torch", "amp_kernels"}
    needed = (
        "op shape dtype provider p20_us p50_us p80_us bytes flops roofline_share device versions commit date backend"
    )
    for row in rows:
        assert row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert set(needed.split()) - set(row) <= ({"backend"} if row["provider"] == "torch" else set())
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert "check_and_norm" in (tmp_path / "table.txt").read_text()
    before = len(rows)
    assert run.main([*options, "--dtype", "bf16 + split master", "--provider", "amp_kernels"]) == 0
    merged = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(merged) == before  # replaced, not repeated
    assert sum(row["date"] != rows[0]["date"] for row in merged) <= 1
    capsys.readouterr()


def test_the_summary_is_the_geometric_mean_over_cases():
    rows = [
        {
            "op": "gemm",
            "shape": shape,
            "dtype": "bf16",
            "provider": provider,
            "status": "ok",
            "baseline": "torch",
            "speedup": s,
        }
        for shape, ours in (("a", 0.5), ("b", 8.0))
        for provider, s in (("torch", 1.0), ("amp_kernels", ours))
    ]
    assert run.table(rows).splitlines()[-1] == (
        "gemm bf16: amp_kernels is 2.00 times as fast as torch (geometric mean of 2; least 0.50)"
    )


def test_a_wrong_result_fails_the_command(tmp_path, monkeypatch, capsys):
    bad = case(torch=lambda x: 2 * x, amp_kernels=lambda x: 3 * x)
    monkeypatch.setattr(run, "select", lambda options: [bad])
    assert run.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG: double 64 fp32 amp_kernels: out[0]: relative error 5.00e-01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "conv"], "--op: conv is unknown; accepted: adamw"),
        (["--provider", "liger"], "--provider: liger is unknown; accepted: torch, amp_kernels, apex"),
        (["--device", "tpu"], "--device tpu: not a device"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        run.main(options)
    assert message in capsys.readouterr().err


def test_every_op_file_yields_cases_for_both_sizes(capsys):
    for quick in ([], ["--quick"]):
        assert run.main(["--device", "cpu", "--list", *quick]) == 0
        listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
        assert listed == {"adamw_", "check_and_norm", "gemm", "gemm_accumulate_", "sgd_", "step", "unscale_"} - (
            {"gemm_accumulate_"} if quick else set()
        )
