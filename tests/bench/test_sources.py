"""A page names the commit of its figures, and the kernels whose sources changed since."""

import subprocess

from bench.harness import environment, sources


def test_families_that_changed_are_named(tmp_path):
    tree, results = tmp_path / "tree", tmp_path / "results"
    for name in ("csrc/gemm/sm90/gemm.cu", "csrc/norm/forward.cu", "amp_kernels/_triton/gemm.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    sources.record(results, "c1", tree)
    assert sources.told(results, ["c1"], tree) == "Kernels whose sources changed since: none."
    (tree / "csrc/gemm/sm90/gemm.cu").write_text("another")
    (tree / "amp_kernels/_triton/gemm.py").rename(tree / "amp_kernels/_triton/product.py")
    (tree / "csrc/loss").mkdir()
    sources.record(results, "c2", tree)
    assert sources.told(results, ["c2"], tree) == "Kernels whose sources changed since: none."
    assert sources.told(results, ["c2", "c1"], tree) == "Kernels whose sources changed since: gemm, loss, Triton."
    assert "c0 were not recorded" in sources.told(results, ["c0", "c2"], tree)


def test_the_commit_says_whether_files_differ_from_it_and_is_the_trees_own(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("1")
    (tmp_path / "bench/results/rows.jsonl").write_text("")
    monkeypatch.setattr(environment, "FOLDER", tmp_path / "bench")
    assert environment.commit() is None  # no repository
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = environment.commit()
    (tmp_path / "bench/results/rows.jsonl").write_text("1")  # of the run that asks
    assert environment.commit() == clean
    (tmp_path / "setup.py").write_text("2")
    assert (len(clean), environment.commit()) == (12, clean + "+changes")
    (tmp_path / "setup.py").unlink()
    assert environment.commit() is None  # an installed package, by chance inside a repository
