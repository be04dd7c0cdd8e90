"""The README's tables come from rows through these functions: wrong ones would be published."""

import json
from pathlib import Path

import pytest

from bench import goals, plot, report, summary
from bench.harness import sources

ROOT = Path(__file__).parents[2]

MACHINE = {
    "device": "Some GPU",
    "versions": {"torch": "2.11.0", "amp_kernels": "0.1.0"},
    "peers": {"apex": "absent", "flashoptim": "0.1.4"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "copy_gb_per_s": 4250.0,
    "tflops_bf16": 700.0,
}


def row(op, shape, dtype, provider, us, baseline_us=None, **more):
    timed = {"p50_us": us, "p20_us": us, "p80_us": us, "error": 1e-3, "gb_per_s": 1e6 / us, "tflops": 5e5 / us}
    timed |= {"bytes": 10**9, "roofline_share": 50 / us, "floor_us": 50.0, "speedup": (baseline_us or us) / us}
    return {"op": op, "shape": shape, "dtype": dtype, "provider": provider, "status": "ok", **timed, **more, **MACHINE}


def products():
    """Ratios to torch 0.5 and 8 in one family, 3 in another; Triton 0.8 and 0.2 of CUDA."""
    plain, skinny, wide = ["aligned"], ["aligned", "skinny"], ["fp32 accumulated"]
    yield row("gemm", "a", "bf16", "torch", 800, families=plain, kernels=["nvjet_256x128|x"])
    yield row("gemm", "a", "bf16", "amp_kernels", 1600, 800, families=plain, plan="128x256 splits 2")
    yield row("gemm", "a", "bf16", "amp_kernels:triton", 2000, 800, families=plain)
    yield row("gemm", "b", "bf16 -> fp32", "torch", 800, families=skinny)
    yield row("gemm", "b", "bf16 -> fp32", "amp_kernels", 100, 800, families=skinny)
    yield row("gemm", "b", "bf16 -> fp32", "amp_kernels:triton", 500, 800, families=skinny)
    yield row("gemm_accumulate_", "a", "bf16 -> fp32 accumulated", "torch", 300, families=wide)
    yield row("gemm_accumulate_", "a", "bf16 -> fp32 accumulated", "amp_kernels", 100, 300, families=wide)


def step(provider, us, **more):
    facts = {"params": 10**9, "bytes": 20 * 10**9, "moved_bytes": 20 * 10**9, "state_bytes": 8 * 10**9}
    dtype = more.pop("dtype", "bf16 + split")
    return row("step", "llama-1b", dtype, provider, us, 1000, **{**facts, "pipeline": "all", "host_us": 7.0, **more})


def lines(table):
    head, *body = table
    return [dict(zip(head, line, strict=True)) for line in body]


def test_a_failed_case_is_counted_beside_the_mean():
    rows = list(products())
    failed = {key: rows[4][key] for key in ("op", "shape", "dtype", "provider", "families")}
    rows[4] = {**failed, **MACHINE, "status": "wrong", "reason": "out[0]: relative error 1"}
    aligned = lines(report.speedups(rows))[0]
    assert (aligned["cases"], aligned["vs torch"]) == ("1 of 2", "0.50")
    first, second = lines(report.products(rows))[:2]
    assert second["ours"] == "wrong"
    assert (first["torch's kernel"], first["our plan"], first["torch TFLOP/s"]) == (
        "nvjet_256x128|x",
        "128x256 splits 2",
        "625",
    )
    assert (first["ours vs torch"], first["Triton vs ours"]) == ("0.50", "0.80")


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "bench" / "results" / "some-gpu"
    folder.mkdir(parents=True)

    def write(rows):
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return folder

    write([*products(), step("torch", 1000), step("amp_kernels", 100)])
    return write


def test_pages_are_filled_between_their_marks(results, tmp_path):
    rows = [*products(), step("torch", 1000, device_us=900.0), step("amp_kernels", 100, device_us=90.0, host_us=3.5)]
    folder = results([*rows, step("amp_kernels", 80, device_us=60.0, host_us=7.0, dtype="fp32")])
    full, short = tmp_path / "docs" / "gpu.md", tmp_path / "README.md"
    full.parent.mkdir()
    for page in (full, short):
        page.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\n## Next\n")
    for _ in range(2):  # as often as one likes
        assert report.main([str(folder), "--page", str(full), "--readme", str(short)]) == 0
    text = full.read_text()
    assert text.startswith(
        f"# Title\n\n{report.BEGIN}\nSome GPU, torch 2.11.0, 2026-01-02, 5 cases. All ran earlier kernels than today's"
    )
    assert text.endswith(f"{report.END}\n\n## Next\n")
    assert "old" not in text
    assert "## Provenance\n\nSome GPU; torch 2.11.0, amp_kernels 0.1.0; commit abc, 2026-01-02." in text
    assert "Peers: apex absent, flashoptim 0.1.4. Measured in the same run: copy 4,250 GB/s" in text
    assert "Rows, table and pictures: `../bench/results/some-gpu`." in text
    assert "| aligned | bf16 | 2 | 2.00 | 0.50 | a | 0.80 | 0.40 |" in text
    assert "nvjet_256x128\\|x" in text  # a bar in a cell would end it
    assert sorted(path.name for path in folder.glob("*.png")) == ["memory.png", "products.png", "step.png"]
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "![products](../bench/results/some-gpu/products.png)" in text
    assert "| matrix products, aligned | 2 | 2.00 | 0.50 | a bf16 | earlier |" in text
    assert "Wrong or not run" not in text
    assert short.read_text() == (
        f"# Title\n\n{report.BEGIN}\n"
        "Some GPU, torch 2.11.0, 2026-01-02. Ratios are torch's time divided by ours: below 1, torch is faster.\n\n"
        "- matrix multiplication vs cuBLAS, mean (worst): aligned 2.00 (0.50), skinny 8.00 (8.00), fp32 accumulated 3.00 (3.00)\n"
        "- whole optimizer step, llama-1b: 10.00 (device 10.00, host 2.00)\n"
        f"{report.END}\n\n## Next\n"
    )


def test_the_short_form_spans_the_layouts_and_shows_a_slower_step_as_it_is():
    layouts = [("a", 50, 250.0, 2.0), ("b", 2000, 1000.0, 14.0)]
    rows = []
    for dtype, us, device, host in layouts:
        rows.append(step("torch", 1000, device_us=500.0, dtype=dtype))
        rows.append(step("amp_kernels", us, device_us=device, host_us=host, dtype=dtype))
    rows.append({**rows[1], "dtype": "c", "status": "wrong"})
    del rows[-1]["speedup"]
    said = summary.text(
        rows, [training("torch", 50.0, 2.0), training("amp_kernels", 100.0, 1.5), training("x", 1.0, 1.0)]
    )
    assert said.splitlines()[2:] == [
        "- whole optimizer step, llama-1b: 0.50-20.00 (device 0.50-2.00, host 0.50-3.50)",
        "- training step, gpt2-124m, batch 32: torch 50.0 ms, 2.0 GiB; amp_kernels 100.0 ms, 1.5 GiB",
        "- wrong or not run: 1",
    ]


def training(provider, ms, peak, dtype="bf16"):
    name = {"op": "training step", "shape": "gpt2-124m, batch 32", "dtype": dtype, "provider": provider, "status": "ok"}
    times = {"ms": ms, "p50_us": 1e3 * ms, "speedup": 50 / ms, "ktok_per_s": 32768 / ms, "peak_gib": peak}
    return {**name, **times, "model": "gpt2-124m", "batch": 32, **MACHINE}


def test_a_picture_has_14_bars_from_best_to_worst_and_both_ends():
    rows = [row("layer_norm", str(i), "bf16", "amp_kernels", 100, ratio) for i, ratio in enumerate(range(40, 240, 5))]
    rows += [row("layer_norm", "0", "bf16", "torch", 100), row("step", "x", "fp32", "amp_kernels", 100, 100)]
    rows.append({**row("rms_norm", "y", "bf16", "amp_kernels", 1), "status": "wrong"})
    del rows[-1]["speedup"]
    bars, count = plot.ratios(rows, "norms")
    lengths = [length for _, length, _ in bars]
    assert (len(bars), count) == (14, 40)
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (2.35, 0.4)
    assert [color == "tab:red" for _, _, color in bars] == [length < 1 for length in lengths]
    assert plot.ratios(rows, "losses") == ([], 0)


def goals_of(rows):
    return {line["goal"]: line for line in lines(goals.table(rows))}


def test_goals_are_on_means_on_the_least_and_on_the_most():
    rows = [*products(), step("torch", 1000), step("amp_kernels", 500, moved_bytes=9 * 10**9, bytes=9 * 10**9)]
    rows += [training("torch", 50.0, 20.0), training("amp_kernels", 25.0, 11.0)]
    found = goals_of(rows)
    mean, least = found["GEMM, aligned: torch's time over ours"], found["GEMM, aligned: each"]
    assert (mean["measured"], mean[""], mean["cases"]) == ("2.00", "met", "2")
    assert (least["measured"], least[""], least["worst case"]) == ("0.50", "missed", "a bf16")
    memory = found["training step of GPT-2 124M, bf16: our peak memory over torch eager's"]
    assert (memory["target"], memory["measured"], memory[""]) == ("0.55", "0.55", "met")
    assert found["training step of GPT-2 124M, bf16: torch eager's time over ours"]["measured"] == "2.00"
    more = goals_of([*rows[:-1], training("amp_kernels", 25.0, 11.1)])
    assert more["training step of GPT-2 124M, bf16: our peak memory over torch eager's"][""] == "missed"
    assert not any(name.startswith("LayerNorm") for name in found)  # never timed


def test_a_goal_with_a_wrong_case_is_not_met():
    rows = list(products())
    rows[4] = {**{key: rows[4][key] for key in (*report.CASE, "provider", "families")}, **MACHINE, "status": "wrong"}
    rows[1] = {**rows[1], "speedup": 1.5}
    line = goals_of(rows)["GEMM, aligned: torch's time over ours"]
    assert (line["measured"], line[""], line["cases"]) == ("1.50", "open", "1 of 2")


def test_rows_of_several_runs_become_one_folders(results, tmp_path):
    folder = results(list(products()))
    later = [
        row("gemm", "a", "bf16", "amp_kernels", 800, 800, families=["aligned"]),
        row("norm", "x", "bf16", "torch", 5),
    ]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(r) + "\n" for r in later))
    assert report.main([str(folder), "--merge", str(tmp_path / "more.jsonl")]) == 0
    merged = report.load(folder)
    assert len(merged) == len(list(products())) + 1
    assert next(r for r in merged if r["shape"] == "a" and r["provider"] == "amp_kernels")["p50_us"] == 800
    assert report.main([str(folder), "--merge", str(tmp_path / "absent.jsonl")]) == 2


@pytest.mark.parametrize(
    ("machine", "page", "shown"),
    [
        ("nvidia-h200", "docs/gpu.md", "full"),
        ("nvidia-h200", "README.md", "short"),
        ("amd-epyc", "docs/cpu.md", "full"),
    ],
)
def test_the_projects_pages_show_its_rows(machine, page, shown):
    folder = ROOT / "bench" / "results" / machine
    text = report.markdown(folder, ROOT / page) if shown == "full" else summary.text(*report.published(folder))
    option = "--page" if shown == "full" else "--readme"
    assert f"{report.BEGIN}\n{text}\n{report.END}" in (ROOT / page).read_text(), (
        f"python -m bench.report bench/results/{machine} {option} {page}"
    )
    assert ("## Goals\n\n| goal | statistic |" in text) == (page == "docs/gpu.md")


def test_cases_of_todays_kernels_come_first(results, tmp_path, monkeypatch):
    folder = results([*products(), step("torch", 1000), step("amp_kernels", 500)])
    now = dict.fromkeys(("base", "device", "emulator", "gemm", "activation", "gradients", "update"), "1")
    monkeypatch.setattr(sources, "families", lambda root: now)
    # The GEMM includes this file, the step does not.
    (folder / sources.FILE).write_text(json.dumps({"abc": {**now, "activation": "0"}}))
    shown = report.markdown(folder, tmp_path / "README.md")
    assert "4 cases. 1 of them ran today's kernels, the others earlier ones" in shown
    lines = [line for line in shown.splitlines() if line.endswith(("| today's |", "| earlier |"))]
    assert [line.split("|")[1].strip() for line in lines] == [
        "optimizer step, llama-1b", "matrix products, aligned", "matrix products, skinny", "matrix products, fp32 accumulated",
    ]  # fmt: skip


def test_a_quick_look_is_not_published(results, tmp_path, capsys):
    for rows, said in (([], "has no rows"), ([{**r, "quick": True} for r in products()], "but those of --quick")):
        assert report.main([str(results(rows))]) == 2
        assert said in capsys.readouterr().err
    folder = results([*({**r, "quick": True} for r in products()), row("unscale_", "tiny", "fp32", "torch", 10)])
    shown = report.markdown(folder, tmp_path / "README.md")
    assert "unscale_" in shown
    assert "gemm" not in shown


def test_wrong_results_and_mixed_runs_are_named_on_the_page(results, tmp_path):
    wrong = {"op": "gemm", "shape": "c", "dtype": "bf16", "provider": "amp_kernels", "status": "wrong", "reason": "NaN"}
    later = {**step("torch", 1000), "commit": "def", "date": "2026-01-03T00:00:00+00:00"}
    folder = results([*products(), {**wrong, **MACHINE}, later])
    shown = report.markdown(folder, tmp_path / "README.md")
    assert "Wrong or not run: gemm c bf16, amp_kernels: NaN." in shown
    assert "commit abc, def, 2026-01-02, 2026-01-03" in shown
