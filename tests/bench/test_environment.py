"""The machine that a figure comes from, and the folder that it belongs to."""

import subprocess

import pytest
import torch

from bench.harness import environment

CPU = torch.device("cpu")


def test_results_belong_to_the_device_and_to_the_tree_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "device_name", lambda device: "AMD EPYC(TM) 9,5 @ 3GHz ")
    (tmp_path / "setup.py").touch()
    monkeypatch.chdir(tmp_path)
    for folder in ("bench", "site-packages/amp_kernels/bench"):  # in a source tree, and installed
        monkeypatch.setattr(environment, "FOLDER", tmp_path / folder)
        assert environment.results_folder(CPU) == tmp_path / "bench" / "results" / "amd-epyc-tm-9-5-3ghz"


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


def test_devices_by_name_and_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [environment.pick_device(name) for name in (None, "cpu", "cpu:0")] == [CPU] * 3
    with pytest.raises(ValueError, match=r"--device cuda: torch .* finds no CUDA GPU"):
        environment.pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"--device cuda:3: this machine has 1 CUDA"):
        environment.pick_device("cuda:3")


def test_a_busy_machine_is_named(monkeypatch):
    for load, busy in ((0.1, False), (3.0, True)):
        monkeypatch.setattr(environment.os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setattr(environment.os, "cpu_count", lambda: 4)
        warning = environment.load_warning(CPU)
        assert (warning is not None) == busy
        assert warning is None or ("3.0 on 4 cores" in warning and "OMP_NUM_THREADS=1" in warning)
        assert environment.load_warning(torch.device("cuda")) is None
