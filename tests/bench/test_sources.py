"""A page names the kernels whose sources changed since its figures were measured."""

import pytest

from bench.harness import sources


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name in ("csrc/gemm/sm90/gemm.cu", "csrc/norm/forward.cu", "amp_kernels/_triton/gemm.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_families_that_changed_are_named(tree, tmp_path):
    results = tmp_path / "results"
    sources.record(results, "c1", tree)
    assert sources.told(results, ["c1"], tree) == "Kernels whose sources changed since: none."
    (tree / "csrc/gemm/sm90/gemm.cu").write_text("another")
    (tree / "amp_kernels/_triton/gemm.py").rename(tree / "amp_kernels/_triton/product.py")
    (tree / "csrc/loss").mkdir()
    assert sources.told(results, ["c1"], tree) == "Kernels whose sources changed since: gemm, loss, Triton."


def test_rows_of_several_commits_are_as_old_as_the_oldest(tree, tmp_path):
    sources.record(tmp_path, "c1", tree)
    (tree / "csrc/norm/forward.cu").write_text("another")
    sources.record(tmp_path, "c2", tree)
    assert sources.told(tmp_path, ["c2"], tree) == "Kernels whose sources changed since: none."
    assert sources.told(tmp_path, ["c2", "c1"], tree) == "Kernels whose sources changed since: norm."
    assert sources.told(tmp_path, ["c0", "c2"], tree).endswith(
        "none. The sources of c0 were not recorded; the kernels have changed since."
    )
