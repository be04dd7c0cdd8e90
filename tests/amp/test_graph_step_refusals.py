"""``ak.graph_step`` refuses what a graph cannot repeat, and then has changed nothing."""

import contextlib
import random

import pytest
import torch

import amp_kernels as ak
from amp_kernels.amp.graph_step import _side_stream

from ..reliability.loop import assert_same
from .test_graph_step import BATCHES, Run, tensor_rates


def reads_the_loss(run, x):
    return run.train(x)["loss"].item()


def branches(run, x):
    if run.train(x)["loss"] > 1e9:
        raise AssertionError


def steps_the_schedule(run, x):
    run.train(x)
    run.scheduler.scheduler.step()


def changes_a_number(run, x):
    run.train(x)
    run.optimizer.param_groups[0]["weight_decay"] += 0.1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (reads_the_loss, r"waits for a value on the host \(aten._local_scalar_dense.default"),
        (branches, r"waits for a value on the host"),
        (lambda run, x: (run.train(x), x[x > 0]), r"waits for a value on the host \(aten.index.Tensor"),
        (lambda run, x: (run.train(x), x.nonzero()), r"waits for a value on the host \(aten.nonzero.default"),
        (steps_the_schedule, r"writes numbers of the optimizer's groups.*scheduler.step\(\) after the step"),
        (changes_a_number, r"writes numbers of the optimizer's groups"),
    ],
)
def test_a_refused_step_changes_nothing(function, words):
    run = tensor_rates(Run())
    run.train(BATCHES[0])
    before = run.state()
    decay = run.optimizer.param_groups[0]["weight_decay"]
    with pytest.raises(RuntimeError, match=words):
        run.graphed(lambda x: function(run, x))(BATCHES[1])
    run.optimizer.param_groups[0]["weight_decay"] = decay
    run.scheduler = type("Same", (), {"state_dict": lambda self: {}})()
    after = run.state()
    assert_same(after, {key: value for key, value in before.items() if not key.startswith(".scheduler")})


def test_a_refused_first_call_leaves_numbers_in_the_groups():
    run = Run()
    before = [group["lr"] for group in run.optimizer.param_groups]
    drawn = random.getstate()
    for function, inputs in ((reads_the_loss, (BATCHES[0],)), (reads_the_loss, (3.0,))):
        with pytest.raises((RuntimeError, TypeError)):
            run.graphed(lambda x, function=function: random.random() and function(run, x))(*inputs)
        assert [group["lr"] for group in run.optimizer.param_groups] == before
        assert not any(isinstance(group["lr"], torch.Tensor) for group in run.optimizer.param_groups)
        assert random.getstate() == drawn


def test_undoing_a_failed_step_waits_for_it(monkeypatch):
    """On a GPU steps before the failure may still run on their stream."""
    waits = []

    class Stream:
        def wait_stream(self, other):
            waits.append((self, other))

    side, main = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with contextlib.suppress(KeyboardInterrupt), _side_stream(True):
        assert waits == [(side, main)]
        raise KeyboardInterrupt
    assert waits == [(side, main), (main, side)]


def test_an_exception_in_the_warm_up_changes_nothing():
    run = Run()
    tensor_rates(run).train(BATCHES[0])
    before = run.state()

    def fails(x):
        run.scaler.scale(run.model(x).square().mean()).backward()
        run.scaler.unscale_(run.optimizer)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run.graphed(fails)(BATCHES[1])
    assert_same(run.state(), before)
    run.scaler.unscale_(run.optimizer)  # for the first time in this iteration


def test_parameters_without_a_gradient_are_named():
    run, margin = Run(), torch.nn.Parameter(torch.ones(2))
    run.model.add_module("idle", torch.nn.Linear(2, 2))
    run.optimizer = ak.optim.AdamW([*run.model.named_parameters(), ("margin", margin)])

    def train(x):
        run.optimizer.zero_grad()
        torch.nn.Sequential(*list(run.model)[:4])(x).square().mean().backward()
        run.optimizer.step()

    step = run.graphed(train)
    with pytest.raises(ValueError, match=r"in the step: idle\.weight, idle\.bias, margin; accepted: a gradient"):
        step(BATCHES[0])
    run.model.idle.requires_grad_(False), margin.requires_grad_(False)
    step(BATCHES[0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"warmup": 1}, ValueError, "graph_step: warmup is 1"),
        ({"function": 3}, TypeError, "step_fn has type int; accepted: a function"),
        ({"model": None}, TypeError, "graph_step: model has type NoneType; accepted: a torch.nn.Module"),
        ({"scaler": torch.amp.GradScaler("cpu")}, TypeError, "scaler has type torch.amp.* accepted: None"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, TypeError, "optimizer has type torch.optim.* accepted: an"),
    ],
)
def test_arguments(options, error, words):
    with pytest.raises(error, match=words):
        Run().graphed(**options)
