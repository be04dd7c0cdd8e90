"""The training benchmark, killed with SIGKILL at random moments, also while it saves and with a full disk: every life goes
on from the newest whole checkpoint, and the end is that of a run that was never interrupted, bit for bit."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest

import amp_kernels as ak
from amp_kernels.checkpoint import _file
from bench import train
from bench.training.trial import Trial

RUN = ["--model", "nano", "--device", "cpu", "--dtype", "fp16", "--provider", "amp_kernels,torch", "--steps", "40"]
COMPARED = ("name", "losses", "scales", "validation", "validation_loss", "final_scale", "skipped_steps")
KINDS = ("killed", "killed while saving", "killed", "killed, disk full")


def live(folder: Path, prepare=lambda: None) -> tuple[int, int]:
    """A process that trains from the newest checkpoint on, and a pipe into which it writes a byte before each step.

    It is a fork of this one, which has loaded torch already: so fifty lives take seconds.
    """
    resume = ["--resume"] if ak.checkpoint.latest(folder / train.CHECKPOINTS) else []
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    code = 99
    try:
        os.close(read)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        prepare()
        real = Trial._train_step
        Trial._train_step = lambda trial: (os.write(write, b"."), real(trial))[1]
        code = train.main([*RUN, "--save-every", "10", "--out", str(folder), *resume])
    finally:
        os._exit(code)


def die_while_saving(chance: random.Random):
    """The process kills itself before or after one of the calls that write a checkpoint: in the middle of the file too."""
    calls = [(_file.Later, "cpu"), (os, "fsync"), (_file, "verify"), (os, "replace"), (Path, "unlink")]
    module, name = chance.choice(calls)
    left, after = chance.randrange(60 if name == "cpu" else 3), chance.random() < 0.5

    def prepare():
        real = getattr(module, name)

        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, name, call)

    return prepare


def fill_the_disk(chance: random.Random):
    """No file may grow beyond a size that a checkpoint exceeds: writing fails in its middle."""
    size = chance.randrange(100, 200_000)
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def wait_for_steps(steps: int, pipe: int, chance: random.Random):
    """Return within the step after so many, counted and not timed, so that slow and fast machines are killed alike."""
    taken = 0.0
    for _ in range(steps):
        begin = time.monotonic()
        if not os.read(pipe, 1):  # the process has ended
            return
        taken = time.monotonic() - begin
    time.sleep(chance.random() * taken)


def kill_at_random(folder: Path, chance: random.Random, kind: str) -> str:
    """One life. Returns how it ended: as ``kind``, one of KINDS, or ``"finished"``."""
    prepare = {"killed while saving": die_while_saving, "killed, disk full": fill_the_disk}.get(kind, lambda _: bool)
    pid, steps = live(folder, prepare(chance))
    try:
        if kind != "killed while saving":  # such a process kills itself, or finishes
            wait_for_steps(chance.randrange(30), steps, chance)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(steps)
    if code == -signal.SIGKILL:
        return kind
    assert code == 0 or kind == "killed, disk full", (folder / "log.txt").read_text()
    return "finished" if code == 0 else kind


def progress(folder: Path) -> tuple[int, int]:
    """Finished runs and steps of the next one, in the newest checkpoint."""
    newest = ak.checkpoint.latest(folder / train.CHECKPOINTS)
    if newest is None:
        return -1, 0
    extra = ak.checkpoint.load(newest, rng=False)
    return len(extra["finished"]), (extra["running"] or {"step": 0})["step"]


def outcome(folder: Path) -> list[dict]:
    runs = json.loads((folder / "train.json").read_text())["runs"]
    return [{key: run[key] for key in COMPARED} for run in runs]


def finish(folder: Path) -> list[dict]:
    pid, started = live(folder)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(started)
    assert code == 0, (folder / "log.txt").read_text()
    return outcome(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_every_life_goes_on_where_the_last_one_was_saved(tmp_path, kills):
    (tmp_path / "whole").mkdir()
    expected = finish(tmp_path / "whole")
    chance, ends, run = random.Random(kills), [], 0
    while len(ends) < kills:
        folder = tmp_path / str(run)
        folder.mkdir()
        at = -1, 0
        while len(ends) < kills:
            end = kill_at_random(folder, chance, KINDS[len(ends) % len(KINDS)])
            if end == "finished":
                break
            ends.append(end)
            reached = progress(folder)
            assert reached >= at  # nothing that was saved is lost
            at = reached
        else:
            finish(folder)
        assert outcome(folder) == expected
        assert not (folder / train.CHECKPOINTS).exists()
        run += 1
    assert set(ends) == set(KINDS)
