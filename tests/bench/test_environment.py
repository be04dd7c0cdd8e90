"""The machine that a figure comes from, and the folder that it belongs to."""

import subprocess

import torch

from bench.harness import environment

CPU = torch.device("cpu")


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


def test_a_busy_machine_is_named(monkeypatch):
    for load, busy in ((0.1, False), (3.0, True)):
        monkeypatch.setattr(environment.os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(environment.os, "cpu_count", lambda: 4)
        warning = environment.load_warning(CPU)
        assert (warning is not None) == busy
        assert warning is None or ("3.0 on 4 cores" in warning and "OMP_NUM_THREADS=1" in warning)
        assert environment.load_warning(torch.device("cuda")) is None
