"""Files that appear whole or not at all, in an order, and in the background."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

import amp_kernels as ak
from amp_kernels.checkpoint import _folder
from amp_kernels.testing.patience import PATIENCE

from .loop import Loop, assert_same


def save(path, value, **options):
    ak.checkpoint.save(path, extra={"value": torch.tensor(value)}, **options)


def value(path):
    return ak.checkpoint.load(path, rng=False)["value"].item()


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, broken, there):
    if there:
        save(tmp_path / "c.pt", 1)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "c.pt", 2)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["c.pt"] * there
    assert not there or value(tmp_path / "c.pt") == 1


#: Runs a program where the folder is a file system of 1.5 MB.
SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec")
SMALL_DISK += ('mount -t tmpfs -o size=1500k none "$1"; shift; exec "$@"', "sh")
TWO_SAVES = """
import os, resource, sys, torch, amp_kernels as ak
folder, limit, model = sys.argv[1], int(sys.argv[2]), torch.nn.Linear(512, 512)
ak.checkpoint.save(f"{folder}/1.pt", model=model, extra={"step": 1})
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for options in ({}, {"background": True}):
    try:
        ak.checkpoint.save(f"{folder}/2.pt", model=model, extra={"step": 2}, **options)
        ak.checkpoint.wait()
    except OSError as error:
        print(error.strerror, os.listdir(folder))
print(ak.checkpoint.load(ak.checkpoint.latest(folder), model=model))
"""


def may_mount():
    try:
        command = [*SMALL_DISK, tempfile.gettempdir(), "true"]
        return subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
    except FileNotFoundError:
        return False


#: Bytes that a file may have, 0 for any number, and what the system says in its middle.
FULL = [(500_000, "File too large"), *([(0, "No space left on device")] if may_mount() else [])]


@pytest.mark.parametrize(("limit", "message"), FULL)
def test_a_disk_that_is_full(tmp_path, limit, message):
    command = [sys.executable, "-c", TWO_SAVES, tmp_path, str(limit)]
    command = command if limit else [*SMALL_DISK, tmp_path, *command]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.stdout.splitlines() == [f"{message} ['1.pt']"] * 2 + ["{'step': 1}"], run.stderr


def test_the_bytes_are_on_the_disk_before_the_name_is_and_the_old_files_go_last(tmp_path, monkeypatch):
    save(tmp_path / "0.pt", 0)
    order = []
    for module, name in ((os, "fsync"), (os, "replace"), (_folder, "remove_all_but")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: (order.append(name), real(*args)))
    save(tmp_path / "1.pt", 1, keep=1)
    assert order == ["fsync", "replace", "fsync", "remove_all_but"]  # the file, its name, the folder, the others
    assert os.listdir(tmp_path) == ["1.pt"]


def test_the_file_of_a_killed_writer_is_removed_and_that_of_a_live_one_is_not(tmp_path):
    pid = os.fork()
    if pid == 0:
        _folder.publish(tmp_path / "c.pt", lambda file: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)

    def write(file):
        ours = {name for name in os.listdir(tmp_path) if name != left}
        save(tmp_path / "other.pt", 1)
        assert set(os.listdir(tmp_path)) == ours | {"other.pt"}
        file.write(b"x")

    _folder.publish(tmp_path / "c.pt", write)
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "other.pt"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "usual").touch()
    save(tmp_path / "c.pt", 1)
    assert stat.S_IMODE((tmp_path / "c.pt").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_latest_is_the_newest_that_is_whole(tmp_path, caplog):
    assert ak.checkpoint.latest(tmp_path) is None
    assert ak.checkpoint.latest(tmp_path / "absent") is None
    for step in (1, 10, 9):  # in the order of saving, not of names
        save(tmp_path / f"{step}.pt", step)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    torch.save({}, tmp_path / "foreign.pt")
    assert ak.checkpoint.latest(str(tmp_path)) == tmp_path / "9.pt"
    os.truncate(tmp_path / "9.pt", 3000)
    times = os.stat(tmp_path / "10.pt").st_mtime_ns + 10**9
    os.utime(tmp_path / "9.pt", ns=(times, times))
    assert ak.checkpoint.latest(tmp_path) == tmp_path / "10.pt"
    assert "9.pt is skipped: it is cut short or damaged" in caplog.text
    assert "notes" not in caplog.text


def test_the_order_is_that_of_saving_whatever_the_clock_says(tmp_path):
    save(tmp_path / "1.pt", 1)
    future = time.time_ns() + 10**12
    os.utime(tmp_path / "1.pt", ns=(future, future))
    for step in range(2, 12):
        save(tmp_path / f"{step}.pt", step, keep=3)
        assert ak.checkpoint.latest(tmp_path) == tmp_path / f"{step}.pt"
    assert sorted(os.listdir(tmp_path)) == ["10.pt", "11.pt", "9.pt"]


def test_keep_removes_checkpoints_only(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    torch.save({}, tmp_path / "model.pt")
    for step in range(4):
        save(tmp_path / f"{step}.pt", step, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["3.pt", "model.pt", "notes.txt"]
    with pytest.raises(ValueError, match="keep is 0"):
        save(tmp_path / "4.pt", 4, keep=0)
    with pytest.raises(TypeError, match=r"keep is 1\.5, of type float; accepted: a whole number from 1"):
        save(tmp_path / "4.pt", 4, keep=1.5)
    assert not (tmp_path / "4.pt").exists()


@pytest.fixture
def gate(monkeypatch):
    """Writers stand still until it is opened."""
    opened, real = threading.Event(), _folder.publish

    def publish(path, write):
        assert opened.wait(PATIENCE)
        real(path, write)

    monkeypatch.setattr(_folder, "publish", publish)
    yield opened
    opened.set()
    ak.checkpoint.wait()


def test_in_the_background_the_state_is_that_of_the_call(tmp_path, gate):
    loop = Loop("AdamW", torch.bfloat16, {"master_weights": "split"})
    loop.step()
    expected = loop.state()
    ak.checkpoint.save(tmp_path / "c.pt", **loop.parts, extra=list(loop.losses), background=True)
    for _ in range(3):
        loop.step()
    assert not (tmp_path / "c.pt").exists()
    gate.set()
    ak.checkpoint.wait()
    loop.losses = ak.checkpoint.load(tmp_path / "c.pt", **loop.parts)
    assert_same(loop.state(), expected)


def test_there_is_one_at_a_time(tmp_path, gate):
    save(tmp_path / "1.pt", 1, background=True)
    second = threading.Thread(target=save, args=(tmp_path / "2.pt", 2), kwargs={"background": True})
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits, and holds no second copy meanwhile
    gate.set()
    second.join()
    ak.checkpoint.wait()
    assert sorted(os.listdir(tmp_path)) == ["1.pt", "2.pt"]


@pytest.mark.parametrize("then", ["save", "wait", "load"])
def test_an_error_in_the_background_is_raised_once_by_the_next_call(tmp_path, monkeypatch, caplog, then):
    save(tmp_path / "1.pt", 1)

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        save(tmp_path / "2.pt", 2, background=True)
        ak.checkpoint._writer._thread.join()
    assert "2.pt was not written: [Errno 28] No space left" in caplog.text
    calls = {"save": lambda: save(tmp_path / "3.pt", 3), "load": lambda: value(tmp_path / "1.pt")}
    with pytest.raises(OSError, match="No space left"):
        calls.get(then, ak.checkpoint.wait)()
    ak.checkpoint.wait()
    assert os.listdir(tmp_path) == ["1.pt"]


def test_a_process_that_ends_finishes_the_file_first(tmp_path, monkeypatch):
    real = _folder.publish
    monkeypatch.setattr(_folder, "publish", lambda *arguments: (time.sleep(0.3), real(*arguments)))
    arguments = (tmp_path / "c.pt", 1)
    process = multiprocessing.get_context("fork").Process(target=save, args=arguments, kwargs={"background": True})
    process.start()
    process.join()
    assert value(tmp_path / "c.pt") == 1


def test_a_fork_is_not_stuck_on_what_its_parent_writes(tmp_path, gate):
    save(tmp_path / "1.pt", 1, background=True)
    waiting = threading.Thread(target=ak.checkpoint.wait)
    waiting.start()
    while not ak.checkpoint._writer._lock.locked():
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)
        ak.checkpoint.wait()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    gate.set()
    waiting.join()
