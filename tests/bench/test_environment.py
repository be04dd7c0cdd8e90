"""The machine that a figure comes from, and the folder that it belongs to."""

import subprocess

from bench.harness import environment


def test_the_commit_says_whether_files_differ_from_it_and_is_the_trees_own(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "bench").mkdir()
    (tmp_path / "setup.py").write_text("1")
    monkeypatch.setattr(environment, "FOLDER", tmp_path / "bench")
    assert environment.commit() is None  # no repository
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = environment.commit()
    assert len(clean) == 12
    (tmp_path / "setup.py").write_text("2")
    assert environment.commit() == clean + "+changes"
    (tmp_path / "setup.py").unlink()
    assert environment.commit() is None  # an installed package, by chance inside a repository
