"""The training benchmark as a user runs it: options, outputs, interruption by signal."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import amp_kernels as ak
from amp_kernels.testing.patience import PATIENCE
from bench import train

ROOT = Path(__file__).resolve().parents[2]
NANO = ["--model", "nano", "--device", "cpu"]
COMPARED = ("name", "losses", "scales", "validation", "validation_loss", "final_scale", "skipped_steps")


def outcome(folder: Path) -> list[dict]:
    runs = json.loads((folder / "train.json").read_text())["runs"]
    return [{key: run[key] for key in COMPARED} for run in runs]


def start(*arguments, script=("-m", "bench.train"), cwd=ROOT) -> subprocess.Popen:
    command = [sys.executable, *script, *NANO, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_leaves_table_plot_and_record(tmp_path, capsys):
    assert train.main([*NANO, "--steps", "8", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "train.png", "train.txt"]
    record = json.loads((tmp_path / "train.json").read_text())
    assert [(run["dtype"], run["provider"]) for run in record["runs"]] == [
        (dtype, provider) for dtype in ("fp32", "bf16", "fp16") for provider in ("torch", "amp_kernels")
    ]
    assert all(len(run["losses"]) == 8 for run in record["runs"])
    assert {"device", "commit", "date", "versions"} <= set(record["machine"])
    printed = capsys.readouterr().out
    assert "val. loss" in printed
    assert (tmp_path / "train.txt").read_text().splitlines()[1] in printed


TWO_RUNS = ("--dtype", "fp16", "--steps", 200)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    process = start(*TWO_RUNS, "--out", folder)
    assert process.wait(timeout=PATIENCE) == 0, process.stdout.read()
    return outcome(folder)


#: The process sends itself a signal in the middle of the second run, on machines of any speed.
SIGNALLED = """
import os, sys
from bench import train
from bench.trial import Trial

number, real = int(sys.argv[1]), Trial._train_step

def train_step(trial):
    if trial.provider == "amp_kernels" and trial.step == 117:
        os.kill(os.getpid(), number)
    real(trial)

Trial._train_step = train_step
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_ends_where_the_uninterrupted_run_does(tmp_path, uninterrupted, number):
    """The signal comes in the second of two runs, so the checkpoint holds a finished and an unfinished one."""
    cut = tmp_path
    process = start(*TWO_RUNS, "--out", cut, script=("-c", SIGNALLED, str(int(number))))
    rest = process.stdout.read()
    assert process.wait(timeout=PATIENCE) == 128 + number, rest
    assert "add --resume to continue" in rest
    saved = ak.checkpoint.load(ak.checkpoint.latest(cut / train.CHECKPOINTS), rng=False)
    assert [run["name"] for run in saved["finished"]] == ["fp16 torch"]
    assert saved["running"]["step"] == 118  # the step in which the signal comes is finished
    assert not (cut / "train.json").exists()

    resumed = start("--resume", "--out", cut)
    assert resumed.wait(timeout=PATIENCE) == 0, resumed.stdout.read()
    assert outcome(cut) == uninterrupted
    assert not (cut / train.CHECKPOINTS).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_what_it_did_before(number):
    reached = []
    outer = signal.signal(number, lambda *args: reached.append(1))
    try:
        interrupts = train.Interrupts()
        assert not interrupts()
        signal.raise_signal(number)
        assert interrupts()
        assert interrupts.signal == number
        assert not reached
        signal.raise_signal(number)
        assert reached
    finally:
        signal.signal(number, outer)


def test_it_runs_as_a_file_from_anywhere(tmp_path):
    process = start(
        "--dtype",
        "fp32",
        "--provider",
        "torch",
        "--steps",
        2,
        "--out",
        "here",
        script=(ROOT / "bench" / "train.py",),
        cwd=tmp_path,
    )
    assert process.wait(timeout=PATIENCE) == 0, process.stdout.read()
    assert (tmp_path / "here" / "train.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: 0 is not a positive number"),
        (["--save-every", "0"], "--save-every: 0 is not a positive number"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--dtype", "fp32,fp8"], "--dtype: 'fp8' is unknown; accepted: fp32, bf16, fp16"),
        (["--provider", "apex"], "--provider: 'apex' is unknown; accepted: torch, amp_kernels"),
        (["--model", "huge"], "--model: invalid choice: 'huge'"),
        (["--device", "tpu"], "--device tpu: not a device; accepted: cpu, cuda, cuda:<index>"),
        (["--text", "/nowhere/text"], "the text /nowhere/text cannot be read: No such file"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_a_bad_option_gets_one_line(tmp_path, capsys, options, message):
    assert train.main([*NANO, "--out", str(tmp_path / "out"), *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "out").exists()


class InterruptedAtOnce(train.Interrupts):
    def __call__(self):
        self.signal = signal.SIGINT
        return True


def test_resume_refuses_what_disagrees_and_gives_each_later_run_a_fresh_start(tmp_path, monkeypatch, capsys):
    """Interrupted in the first of two runs: the second must not start from the first one's state."""
    tmp_path, whole = tmp_path / "cut", tmp_path / "whole"
    arguments = ["--dtype", "fp32", "--steps", "9"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "Interrupts", InterruptedAtOnce)
        assert train.main([*NANO, *arguments, "--out", str(tmp_path)]) == 130
    capsys.readouterr()
    for options, message in (
        (["--steps", "10"], "the checkpoint has steps = 9, the command line 10"),
        (["--dtype", "fp16"], "the checkpoint has dtypes = ('fp32',)"),
        (["--no-scaler"], "the checkpoint has scaler = True"),
    ):
        assert train.main(["--device", "cpu", "--resume", "--out", str(tmp_path), *options]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "other.txt").write_bytes(bytes(range(256)) * 100)
    text = ["--text", str(tmp_path / "other.txt")]
    assert train.main(["--device", "cpu", "--resume", "--out", str(tmp_path), *text]) == 2
    assert "another text" in capsys.readouterr().err
    assert train.main(["--device", "cpu", "--resume", "--out", str(tmp_path)]) == 0
    assert train.main([*NANO, *arguments, "--out", str(whole)]) == 0
    assert outcome(tmp_path) == outcome(whole)
