"""The README's tables come from rows through these functions: wrong ones would be published."""

import json
from pathlib import Path

import pytest

from bench import report

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
    timed |= {"roofline_share": 50 / us, "floor_us": 50.0, "speedup": (baseline_us or us) / us, "baseline": "torch"}
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
    facts = {
        "params": 10**9,
        "bytes": 20 * 10**9,
        "moved_bytes": 20 * 10**9,
        "state_bytes": 8 * 10**9,
        "pipeline": "all",
    }
    return row("step", "llama-1b", "bf16 + split", provider, us, 1000, **{**facts, "host_us": 7.0, **more})


def lines(table):
    head, *body = table
    return [dict(zip(head, line, strict=True)) for line in body]


def test_goals_are_met_or_missed():
    spread = {"speedup_p20": 1.5, "speedup_p80": 2.5}
    rows = [row("linear", shape, "bf16", "torch", 800, goal=2.0) for shape in "ab"]
    rows += [row("linear", "a", "bf16", "amp_kernels", 400, 800, goal=2.0, **spread)]
    rows += [row("linear", "b", "bf16", "amp_kernels", 401, 800, goal=2.0, **spread)]
    rows += [row("linear", "c", "bf16", "amp_kernels", 401, 800)]  # without a goal
    met, missed = lines(report.goals(rows))
    assert (met["case"], met[""], met["vs torch"], met["p20"], met["p80"]) == ("a", "met", "2.00", "1.50", "2.50")
    assert (missed["case"], missed[""]) == ("b", "missed")


def test_families_have_their_own_geometric_means_and_least():
    found = {line["family"]: line for line in lines(report.speedups(list(products())))}
    assert list(found) == ["aligned", "skinny", "fp32 accumulated"]
    aligned = found["aligned"]
    assert (aligned["cases"], aligned["vs torch"], aligned["least"], aligned["least at"]) == ("2", "2.00", "0.50", "a")
    assert (aligned["Triton vs torch"], aligned["Triton vs CUDA"]) == ("0.80", "0.40")  # sqrt(.4 * 1.6), sqrt(.8 * .2)
    assert (found["skinny"]["vs torch"], found["skinny"]["cases"]) == ("8.00", "1")
    assert found["fp32 accumulated"]["vs torch"] == "3.00"
    assert found["fp32 accumulated"]["Triton vs CUDA"] == ""


def test_what_failed_does_not_vanish_from_a_mean_unseen():
    rows = list(products())
    failed = {key: rows[4][key] for key in ("op", "shape", "dtype", "provider", "families")}
    rows[4] = {**failed, **MACHINE, "status": "wrong", "reason": "out[0]: relative error 1"}
    aligned = lines(report.speedups(rows))[0]
    assert (aligned["cases"], aligned["vs torch"]) == ("1 of 2", "0.50")
    assert lines(report.products(rows))[1]["ours"] == "wrong"


def test_a_product_shows_what_runs_underneath():
    first = lines(report.products(list(products())))[0]
    assert first["torch's kernel"] == "nvjet_256x128|x"
    assert first["our plan"] == "128x256 splits 2"
    assert first["torch TFLOP/s"] == "625"
    assert (first["ours vs torch"], first["Triton vs ours"]) == ("0.50", "0.80")


def test_a_step_shows_times_bytes_floor_share_and_state():
    rows = [
        step("torch", 1000, moved_bytes=54 * 10**9, state_bytes=14 * 10**9, roofline_share=0.05),
        step("amp_kernels", 100, device_us=62.5, device_share=0.8, backend="cuda"),
        step("amp_kernels:triton", 200, device_us=100.0, device_share=0.5),
    ]
    torch, ours, triton = lines(report.steps(rows))
    assert (torch["moved"], torch["held"], torch["B/param needed"], torch["of copy"]) == ("54", "14", "20", "14 %")
    assert (ours["provider"], ours["vs torch"], ours["step us"]) == ("amp_kernels (cuda)", "10.00", "100")
    assert (ours["device us"], ours["host us"], ours["of copy"]) == ("62", "7", "80 %")
    assert (ours["held"], ours["held in all"], ours["floor us"]) == ("8", "7.45 GiB", "50")
    assert (triton["vs CUDA"], ours["vs CUDA"]) == ("0.62", "")  # of the device's times


def test_sections_share_the_rows_out_and_leave_nothing_over():
    rows = [*products(), step("torch", 1000), row("linear", "host", "bf16", "torch", 9, host_us=8.0)]
    rows.append(row("unscale_", "tiny", "fp32", "amp_kernels", 10, 20))
    found = {section.title: section.table for section in report.sections(rows)}
    assert len(found["Matrix products by shape"]) == 4
    assert [line[0] for line in found["Other ops"][1:]] == ["unscale_"]
    assert lines(found["Host time of a call"])[0]["host us"] == "8.0"
    assert [line[0] for line in found["Speed-ups"][1:]] == ["aligned", "skinny", "fp32 accumulated", "unscale_"]
    assert report.sections([]) == []


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "bench" / "results" / "some-gpu"
    folder.mkdir(parents=True)

    def write(rows):
        (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return folder

    write([*products(), step("torch", 1000), step("amp_kernels", 100)])
    return write


def test_the_readme_is_filled_between_its_marks(results, tmp_path):
    folder = results([*products(), step("torch", 1000), step("amp_kernels", 100)])
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\n## Next\n")
    for _ in range(2):  # as often as one likes
        assert report.main([str(folder), "--readme", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(
        f"# Title\n\n{report.BEGIN}\nSome GPU; torch 2.11.0, amp_kernels 0.1.0; commit abc, 2026-01-02."
    )
    assert text.endswith(f"{report.END}\n\n## Next\n")
    assert "old" not in text
    assert "Peers: apex absent, flashoptim 0.1.4. Measured in the same run: copy 4,250 GB/s" in text
    assert "| aligned | bf16 | 2 | 2.00 | 0.50 | a | 0.80 | 0.40 |" in text
    assert "![TFLOP/s by shape and provider](bench/results/some-gpu/gemm.png)" in text
    assert "nvjet_256x128\\|x" in text  # a bar in a cell would end it
    assert (folder / "gemm.png").read_bytes().startswith(b"\x89PNG")
    assert "Wrong or not run" not in text


def test_the_projects_own_readme_can_be_filled(results, tmp_path):
    page = tmp_path / "README.md"
    page.write_text((Path(__file__).parents[2] / "README.md").read_text())
    assert report.main([str(results(list(products()))), "--readme", str(page)]) == 0
    assert "| aligned | bf16 |" in page.read_text()


def test_without_marks_the_page_stays_as_it_is(results, tmp_path, capsys):
    folder = results(list(products()))
    begin, end = report.BEGIN, report.END
    for content in ("# Title\n", f"{end}\n{begin}\n", f"{begin}\n{begin}\n{end}\n", f"{begin}\n{end}\n{end}\n"):
        (tmp_path / "README.md").write_text(content)
        assert report.main([str(folder), "--readme", str(tmp_path / "README.md")]) == 2
        assert "needs one line <!-- benchmarks: begin -->" in capsys.readouterr().err
        assert (tmp_path / "README.md").read_text() == content


def test_a_quick_look_is_not_published(results, tmp_path, capsys):
    folder = results([{**r, "quick": True} for r in products()])
    assert report.main([str(folder)]) == 2
    assert "has no rows but those of --quick" in capsys.readouterr().err
    folder = results([*({**r, "quick": True} for r in products()), row("unscale_", "tiny", "fp32", "torch", 10)])
    shown = report.markdown(folder, tmp_path / "README.md")
    assert "unscale_" in shown
    assert "gemm" not in shown.replace("gemm.png", "")


def test_wrong_results_and_mixed_runs_are_named_on_the_page(results, tmp_path):
    wrong = {"op": "gemm", "shape": "c", "dtype": "bf16", "provider": "amp_kernels", "status": "wrong", "reason": "NaN"}
    later = {**step("torch", 1000), "commit": "def", "date": "2026-01-03T00:00:00+00:00"}
    folder = results([*products(), {**wrong, **MACHINE}, later])
    shown = report.markdown(folder, tmp_path / "README.md")
    assert "Wrong or not run: gemm c bf16, amp_kernels: NaN." in shown
    assert "commit abc, def, 2026-01-02, 2026-01-03" in shown


def test_an_empty_folder_is_an_error(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "has no rows" in capsys.readouterr().err
