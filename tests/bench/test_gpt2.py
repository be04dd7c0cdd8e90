"""The training step of GPT-2: every provider takes the same one, and what is left says whose time and memory it is."""

import functools
import json

import pytest
import torch
from torch._dynamo.utils import counters

from amp_kernels.ops._shadows import fresh_shadow
from bench import gpt2
from bench.training import gpt

PROVIDERS = ["torch", "amp_kernels three lines", "amp_kernels", "amp_kernels fused norms", "amp_kernels graph"]


@pytest.fixture
def small(monkeypatch):
    for module in (gpt2, gpt):
        monkeypatch.setattr(module, "WORDS", 64)
        monkeypatch.setattr(module, "CONTEXT", 16)
    config = gpt.GPT2Config(width=32, heads=2, layers=3, batch=2)
    monkeypatch.setitem(gpt.GPT2_MODELS, "gpt2-124m", config)
    return config


def run(tmp_path, *options):
    common = ["--device", "cpu", "--steps", "1", "--rounds", "3", "--out", str(tmp_path / "new")]
    assert gpt2.main([*common, *options]) == 0
    return [json.loads(line) for line in (tmp_path / "new" / "gpt2.jsonl").read_text().splitlines()]


def test_all_take_the_same_step(small, tmp_path, capsys):
    rows = run(tmp_path, "--provider", ",".join(PROVIDERS), "--layers", "2", "--profile")
    assert [(row["dtype"], row["provider"]) for row in rows] == [(d, p) for d in ("bf16", "fp16") for p in PROVIDERS]
    for row in rows:
        losses = row["losses"]
        assert (row["model"], row["layers"], row["batch"], len(losses)) == ("gpt2-124m", 2, 2, 4)
        assert {"device", "commit", "date", "versions"} <= set(row)
        assert row["shadows"] == ("amp_kernels" in row["provider"])
        assert "peak_gib" not in row  # which torch counts on CUDA alone
        first = rows[0 if row["dtype"] == "bf16" else len(PROVIDERS)]["losses"]
        assert losses == pytest.approx(first, rel=5e-3)
        assert max(losses) - min(losses) > 5e-3 * first[0]  # so that a step left out would show
    assert "bf16 amp_kernels graph: microseconds of a step" in capsys.readouterr().out


def test_rates_are_of_medians_and_ratios_of_turns(small, tmp_path, monkeypatch):
    taken = iter([1.0, 0.5, 3.0, 1.0, 2.0, 0.1])  # seconds of a step: torch and ours in turn
    monkeypatch.setattr(gpt2, "seconds", lambda step, steps, device: next(taken))
    torchs, ours = run(tmp_path, "--provider", "torch, amp_kernels", "--dtype", "bf16", "--batch", "5")
    assert (torchs["ms"], ours["ms"]) == (2000, 500)
    assert (torchs["speedup"], ours["speedup"]) == (1, 3)  # of 2, 3 and 20
    assert (torchs["ktok_per_s"], ours["ktok_per_s"]) == (5 * 16 / 2000, 5 * 16 / 500)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--provider", "torch,apex"], "--provider: apex is unknown; accepted: torch, torch.compile, amp_kernels, amp"),
        (["--dtype", "fp32"], "--dtype: fp32 is unknown; accepted: bf16, fp16"),
        (["--steps", "0"], "--steps: '0' is not a positive number"),
        (["--device", "tpu"], "--device tpu: not a device"),
    ],
)
def test_bad_options_are_refused(options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpt2.parse(["--device", "cpu", *options])
    assert said in capsys.readouterr().err


def is_within_an_op(event):
    """Products of the portable set widen the 16-bit weights that they are given."""
    return event is not None and (event.name.startswith("amp_kernels::") or is_within_an_op(event.cpu_parent))


@pytest.mark.parametrize("shadowed", [True, False])
def test_ours_reads_shadows(shadowed, small, monkeypatch):
    """No weight is cast in a step; without shadows the linear layers' are, as this test would see."""
    trainer = gpt2.TRAINERS["amp_kernels"]
    if not shadowed:
        monkeypatch.setitem(gpt2.TRAINERS, "amp_kernels", lambda *args, shadow_dtype: trainer(*args))
    model = gpt.GPT2(small, 1)
    weights = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    step = gpt2.build("amp_kernels", model, (torch.zeros(1, 16, dtype=torch.long),) * 2, torch.bfloat16)
    step()
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        step()
    casts = (event for event in profile.events() if event.name == "aten::_to_copy" and not is_within_an_op(event))
    cast = {tuple(event.input_shapes[0]) for event in casts}
    assert weights & cast == (set() if shadowed else weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused_norms", [False, True])
def test_a_compiled_step_is_one_graph_for_good(dtype, fused_norms, small, monkeypatch):
    """Weights, loss scale and learning rate change, and steps are skipped: nothing is compiled again."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(gpt2, "GROWTH_INTERVAL", 2)  # from 2^16 on, so that the scale overflows
    torch.compiler.reset()
    counters.clear()
    losses = []
    for options in ({"compiled": True}, {}):
        torch.manual_seed(0)
        model, data = gpt.GPT2(small, 2), tuple(torch.arange(16).expand(2, 16) * k % 64 for k in (3, 5))
        step = gpt2.build("amp_kernels", model, data, dtype, fused_norms=fused_norms, **options)
        losses.append([step().item() for _ in range(100 if options else 4)])
        shadows = [fresh_shadow(p, dtype) for p in model.parameters()]
        assert all(shadow is None for shadow in shadows) == bool(options)  # a compiled forward would not read them
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert losses[0][:4] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0][-1] < losses[0][0] - 0.05


@pytest.mark.parametrize("provider", ["torch", "amp_kernels"])
def test_fp16_is_scaled_and_bf16_is_not(small, provider):
    data = (torch.zeros(1, 16, dtype=torch.long),) * 2
    for dtype, scaled in ((torch.float16, True), (torch.bfloat16, False)):
        model = gpt.GPT2(small, 1)
        seen = []
        model.norm.bias.register_hook(lambda grad, seen=seen: seen.append(grad.abs().sum().item()))
        gpt2.build(provider, model, data, dtype)()
        assert (seen[0] > 100) == scaled, (dtype, seen)
