"""Files that appear whole or not at all, in an order, and in the background."""

import multiprocessing
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.files import TEMPORARY
from amp_kernels.checkpoint import _file

from ..helpers.patience import PATIENCE
from ..helpers.processes import run
from .loop import Loop, assert_same
from .stumbles import Stumbles


def save(path, value, **options):
    ak.checkpoint.save(path, extra={"value": torch.tensor(value)}, **options)


def value(path):
    return ak.checkpoint.load(path, rng=False)["value"].item()


def full(*_):
    raise OSError(28, "No space left on device")


def flip_a_bit(path, *_):
    """Between the write and the read back."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("broken", ["fsync", "replace", "read back"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, broken, there):
    if there:
        save(tmp_path / "c.pt", 1)
    if broken == "read back":
        real = os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: (flip_a_bit(*tmp_path.glob(".*")), real(*args)))
    else:
        monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match=r"No space left|it is cut short or damaged"):
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
        return run(*SMALL_DISK, tempfile.gettempdir(), "true", status=None).returncode == 0
    except FileNotFoundError:
        return False


#: Bytes that a file may have, 0 for any number, and what the system says in its middle.
FULL = [(500_000, "File too large"), *([(0, "No space left on device")] if may_mount() else [])]


@pytest.mark.parametrize(("limit", "message"), FULL)
def test_a_disk_that_is_full(tmp_path, limit, message):
    command = [sys.executable, "-c", TWO_SAVES, tmp_path, limit]
    said = run(*([] if limit else [*SMALL_DISK, tmp_path]), *command).stdout
    assert said.splitlines() == [f"{message} ['1.pt']"] * 2 + ["{'step': 1}"]


def test_the_bytes_are_on_the_disk_before_the_name_is_and_the_old_files_go_last(tmp_path, monkeypatch):
    save(tmp_path / "0.pt", 0)
    order = []
    for module, name in ((os, "fsync"), (os, "posix_fadvise"), (_file, "verify"), (os, "replace"), (Path, "unlink")):
        real = getattr(module, name)

        def call(*args, real=real, name=name, **options):
            order.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)
    save(tmp_path / "1.pt", 1, keep=1)
    assert order == ["fsync", "posix_fadvise", "verify", "replace", "fsync", "unlink"]  # the second fsync: the folder
    assert os.listdir(tmp_path) == ["1.pt"]


def test_the_file_of_a_killed_writer_is_removed_once_it_is_old(tmp_path, monkeypatch):
    """And that of a live one is not, also where the file system has no locks: none are taken."""
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        save(tmp_path / "c.pt", 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(TEMPORARY)
    assert ak.checkpoint.latest(tmp_path) is None
    os.utime(left, (time.time() - 3000,) * 2)
    real, once = os.fsync, []

    def fsync(descriptor):
        if not once:
            once.append(descriptor)
            save(tmp_path / "other.pt", 2)  # of another process, say
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path / "c.pt", 1)
    assert sorted(os.listdir(tmp_path)) == [left.name, "c.pt", "other.pt"]
    os.utime(left, (time.time() - 4000,) * 2)
    save(tmp_path / "c.pt", 3)
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "other.pt"]
    assert [value(tmp_path / name) for name in ("c.pt", "other.pt")] == [3, 2]


def test_savers_of_one_folder(tmp_path):
    """Processes, of one name and of several, with old files that go."""

    def write(number):
        for step in range(12):
            save(tmp_path / f"{number % 2}-{step % 4}.pt", step, keep=2)
            assert ak.checkpoint.latest(tmp_path) is not None

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(i,)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert {value(path) for path in tmp_path.iterdir()} <= {8, 9, 10, 11}


def fifo(path, _):
    os.mkfifo(path)


def link_to_a_fifo(path, elsewhere):
    os.mkfifo(elsewhere / "fifo")
    path.symlink_to(elsewhere / "fifo")


def link_to_a_device(path, _):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("name", ["2.pt", f"{TEMPORARY}2"])
@pytest.mark.parametrize("make", [fifo, link_to_a_fifo, link_to_a_device])
def test_only_regular_files_are_opened(tmp_path, tmp_path_factory, monkeypatch, make, name):
    """A FIFO would block for ever."""
    make(tmp_path / name, tmp_path_factory.mktemp("elsewhere"))
    with Stumbles(monkeypatch, tmp_path / name, AssertionError("opened")):
        save(tmp_path / "1.pt", 1, keep=1)
        assert ak.checkpoint.latest(tmp_path) == tmp_path / "1.pt"
        with pytest.raises(ValueError, match=rf"{name} cannot be loaded: it is not a regular file; .*1\.pt"):
            ak.checkpoint.load(tmp_path / name)
        with pytest.raises(FileExistsError, match=rf"path is .*{name}, a link or a device; accepted"):
            save(tmp_path / name, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(["1.pt", name])


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "usual").touch()
    save(tmp_path / "c.pt", 1)
    assert stat.S_IMODE((tmp_path / "c.pt").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_latest_is_the_newest_that_is_whole(tmp_path, caplog):
    assert ak.checkpoint.latest(tmp_path) is None
    assert not caplog.text
    assert ak.checkpoint.latest(tmp_path / "absent") is None
    assert f"checkpoint.latest: there is no folder {tmp_path / 'absent'}" in caplog.text
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
    for step in range(8, 12):
        save(tmp_path / f"{step}.pt", step, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["11.pt", "model.pt", "notes.txt"]
    with pytest.raises(ValueError, match="keep is 0"):
        save(tmp_path / "4.pt", 4, keep=0)
    with pytest.raises(TypeError, match=r"keep is 1\.5, of type float; accepted: a whole number from 1"):
        save(tmp_path / "4.pt", 4, keep=1.5)
    for options in ({"pattern": "*.pt"}, {"pattern": "step-*", "keep": 1}):
        with pytest.raises(
            ValueError, match=r"pattern is .*, keep is .* and the file is '4\.pt'; accepted: with keep, a"
        ):
            save(tmp_path / "4.pt", 4, **options)
    assert not (tmp_path / "4.pt").exists()


NAMES = [
    "step-8.pt",
    "best.pt",
    "step-9.pt",
    "step-9-good.pt",
    "step-10.pt",
    "epoch=1-loss=0.5.pt",
    "epoch=2-loss=0.25.pt",
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        (None, ["best.pt", "epoch=2-loss=0.25.pt", "step-10.pt", "step-9-good.pt"]),
        ("*.pt", ["epoch=2-loss=0.25.pt"]),
        ("*[!t].pt", ["best.pt", "epoch=2-loss=0.25.pt"]),
    ],
)
def test_keep_counts_files_of_one_kind(tmp_path, pattern, left, background):
    """Names that differ in numbers, or those of a pattern."""
    for name in NAMES:
        counted = {} if pattern == "*[!t].pt" and name == "best.pt" else {"keep": 1, "pattern": pattern}
        save(tmp_path / name, 1, background=background, **counted)
    ak.checkpoint.wait()
    assert sorted(os.listdir(tmp_path)) == left


@pytest.mark.parametrize("to", ["step-1.pt", "absent.pt", "../1.pt"])
def test_links_are_not_counted_removed_or_replaced(tmp_path, to):
    folder = tmp_path / "run"
    for path in (tmp_path / "1.pt", folder / "step-1.pt"):
        save(path, 1)
    (folder / "step-2.pt").symlink_to(to)
    with pytest.raises(FileExistsError, match=r"path is .*step-2\.pt, a link or a device; accepted: a file"):
        save(folder / "step-2.pt", 2)
    assert value(folder / "step-1.pt") == 1
    for step in (3, 4):
        save(folder / f"step-{step}.pt", step, keep=2)
    assert sorted(os.listdir(folder)) == ["step-2.pt", "step-3.pt", "step-4.pt"]
    assert os.readlink(folder / "step-2.pt") == to


def test_a_checkpoint_behind_a_link_is_found(tmp_path):
    save(tmp_path / "elsewhere" / "1.pt", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1.pt").symlink_to(tmp_path / "elsewhere" / "1.pt")
    assert value(ak.checkpoint.latest(tmp_path / "run")) == 1


@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(1, 1), 3, b"bytes"])
@pytest.mark.parametrize("function", [ak.checkpoint.save, ak.checkpoint.load, ak.checkpoint.latest])
def test_a_path_of_another_type(function, wrong):
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=rf"(path|folder) has type .*{kind}; accepted: a str or an os\.PathLike"):
        function(wrong)


def test_a_folder_for_a_file_and_a_file_for_a_folder(tmp_path):
    message = r"path is .*, a folder; accepted: a file in it"
    for function in (ak.checkpoint.save, ak.checkpoint.load):
        with pytest.raises(IsADirectoryError, match=message):
            function(tmp_path)
    save(tmp_path / "1.pt", 1)
    with pytest.raises(NotADirectoryError):
        ak.checkpoint.latest(tmp_path / "1.pt")


@pytest.fixture
def gate(monkeypatch):
    """Writers stand still until it is opened."""
    opened, real = threading.Event(), _file.write

    def write(*arguments):
        assert opened.wait(PATIENCE)
        real(*arguments)

    monkeypatch.setattr(_file, "write", write)
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

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        save(tmp_path / "2.pt", 2, background=True)
        while not caplog.text:
            time.sleep(0.01)
    assert "2.pt was not written: [Errno 28] No space left" in caplog.text
    calls = {"save": lambda: save(tmp_path / "3.pt", 3), "load": lambda: value(tmp_path / "1.pt")}
    with pytest.raises(OSError, match="No space left"):
        calls.get(then, ak.checkpoint.wait)()
    ak.checkpoint.wait()
    assert os.listdir(tmp_path) == ["1.pt"]


def test_a_process_that_ends_finishes_the_file_first(tmp_path, monkeypatch):
    real = _file.write
    monkeypatch.setattr(_file, "write", lambda *arguments: (time.sleep(0.3), real(*arguments)))
    arguments = (tmp_path / "c.pt", 1)
    process = multiprocessing.get_context("fork").Process(target=save, args=arguments, kwargs={"background": True})
    process.start()
    process.join()
    assert value(tmp_path / "c.pt") == 1


def test_a_fork_is_not_stuck_on_what_its_parent_writes(tmp_path, gate):
    save(tmp_path / "1.pt", 1, background=True)
    waiting = threading.Thread(target=ak.checkpoint.wait)
    waiting.start()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)
        ak.checkpoint.wait()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    gate.set()
    waiting.join()
