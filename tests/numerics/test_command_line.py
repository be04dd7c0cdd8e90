"""``python -m amp_kernels parity`` on a file of the user's."""

import sys

import pytest

from amp_kernels.__main__ import main

TRAINING = """
import torch

import amp_kernels as ak


def train(run, loss_weight=1.0):
    model = torch.nn.Linear(8, 1)
    optimizer = ak.optim.SGD(model.parameters(), lr=0.02 / loss_weight)
    for step in range(60):
        x = torch.randn(64, 8)
        with run.autocast():
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean() * loss_weight
        run.scaler.scale(loss).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        optimizer.zero_grad()
    return 1 + (model.weight - 1).abs().mean().item()  # seeds move it by less than a tenth


def small(run):
    return train(run, loss_weight=2.0**-24)


def fails(run):
    return 1 / 0


not_a_function = 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_training_function(tmp_path, monkeypatch, request):
    name = f"training_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    request.node.module_name = name


@pytest.fixture
def module(request):
    return request.node.module_name


def test_parity_is_the_exit_code(module, capsys):
    assert main(["parity", f"{module}:train", "--precisions", "bf16", "fp16", "--seeds", "2"]) == 0
    assert capsys.readouterr().out.count("parity\n") == 2
    assert main(["parity", f"{module}.py:small", "--precisions", "fp16-unscaled", "--seeds", "2"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


IN_A_PROCESS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from beside_it import one


def added(seed):
    return 100 * one + seed


def metric(run):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(added, run.seed).result(timeout=1800)
"""


def test_a_file_anywhere_and_what_lies_beside_it(tmp_path, monkeypatch, capsys):
    """Its name need not be one of Python's, and processes that it starts find it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my-run", "beside_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "beside_it.py").write_text("one = 1.0\n")
    path = tmp_path / "elsewhere" / "my-run.py"
    path.write_text(IN_A_PROCESS)
    for name in (path, path.relative_to(tmp_path)):
        assert main(["parity", f"{name}:metric", "--precisions", "bf16", "--seeds", "2"]) == 0
    assert capsys.readouterr().out.count("parity\n") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seeds 1", "argument --seeds: '1' is no whole number from 2 on"),
        ("--seeds 2.5", "argument --seeds: '2.5' is no whole number from 2 on"),
        ("--factor -1", "argument --factor: '-1' is no number from 0 on"),
        ("--factor nan", "argument --factor: 'nan' is no number from 0 on"),
        ("--device tpv", "argument --device: 'tpv' cannot be used: "),
        ("--device cpu:x", "argument --device: 'cpu:x' cannot be used: "),
    ],
)
def test_bad_arguments_are_told_from_a_difference(module, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(["parity", f"{module}:train", *arguments.split()])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_training_that_fails_is_told_from_a_difference(module, capsys):
    assert main(["parity", f"{module}:fails"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_here:train", "there is no module 'nothing_here'"),
        ("../nothing-here.py:train", "there is no file '../nothing-here.py'"),
        ("{}:nobody", "has no function 'nobody'"),
        ("{}:not_a_function", "has no function 'not_a_function'"),
        ("{}", "is not of the form module:function"),
    ],
)
def test_names_that_mean_nothing(module, capsys, name, message):
    with pytest.raises(SystemExit):
        main(["parity", name.format(module)])
    assert message in capsys.readouterr().err
