"""Threads, forks, workers, reloads, and a thousand steps: no crash, no leak."""

import gc
import importlib
import os
import signal
import threading
import traceback

import pytest
import torch

import amp_kernels as ak

from ..helpers.patience import PATIENCE
from ..helpers.processes import python
from .loop import Loop, assert_same

BF16 = "AdamW", torch.bfloat16, {"master_weights": "split"}


def trained(*arguments, steps=20, seed=0):
    loop = Loop(*arguments, seed=seed)
    loop.model[2].p = 0.0  # dropout draws from the one generator of the process
    for _ in range(steps):
        loop.step()
    state = loop.state()
    return {name: value for name, value in state.items() if name != ".random"}


def in_a_fork(function):
    """Exit status of a forked process that calls it: 0 if it returns, negative if a signal ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(PATIENCE)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_loops_in_two_threads():
    loops = [Loop(*BF16), Loop("SGD", torch.float32, {"momentum": 0.9})]
    expected = [trained(*BF16), trained("SGD", torch.float32, {"momentum": 0.9})]
    for loop in loops:
        loop.model[2].p = 0.0

    def train(loop):
        for _ in range(20):
            loop.step()

    threads = [threading.Thread(target=train, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loop, state in zip(loops, expected, strict=True):
        assert_same({name: value for name, value in loop.state().items() if name != ".random"}, state)


def test_a_fork_trains_as_its_parent_does():
    trained(*BF16, steps=3)
    expected = trained(*BF16)
    assert in_a_fork(lambda: assert_same(trained(*BF16), expected)) == 0


EXIT = """
import sys, threading
import torch
import amp_kernels as ak

torch.kept = model = ak.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(torch.bfloat16))
optimizer, scaler = ak.optim.AdamW(model.parameters(), master_weights="split"), ak.GradScaler("cpu")

def step():
    scaler.scale(model(torch.ones(4, 8, dtype=torch.bfloat16)).float().sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    optimizer.zero_grad()

step()
"""
EXITS = {
    "in the step": ("optimizer.register_step_post_hook(lambda *_: sys.exit(3)); step()", 3),
    "in the backward": ("model[0].weight.register_hook(lambda _: sys.exit(3)); step()", 3),
    "while a thread trains": ("threading.Thread(target=lambda: [step() for _ in range(200)]).start()", 0),
}


@pytest.mark.parametrize("where", EXITS)
def test_the_interpreter_exits(where):
    """With the status that was asked for and nothing on stderr, whatever outlives the modules of the package."""
    last, status = EXITS[where]
    assert python("-c", EXIT + last, status=status).stderr == ""


class Rows(torch.utils.data.Dataset):
    """Computes in the worker, under autocast, with ops of this package."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ak.linear(ak.layer_norm(torch.full((4,), float(i)) + torch.arange(4.0), 4), torch.eye(4)).float()


def test_workers_of_a_data_loader():
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), torch.stack([Rows()[i] for i in range(8)]))


@pytest.mark.parametrize("reloaded", ["amp_kernels", "amp_kernels.checkpoint", "amp_kernels.amp", "amp_kernels.nn"])
def test_a_module_that_is_reloaded(reloaded, tmp_path):
    """Objects made before go on, objects made afterwards work."""

    def check():
        loop = Loop(*BF16)
        loop.step()
        importlib.reload(importlib.import_module(reloaded))
        loop.step()
        ak.checkpoint.save(tmp_path / "c.pt", **loop.parts)
        other = Loop(*BF16, seed=1)
        other.step()
        ak.checkpoint.load(tmp_path / "c.pt", **other.parts)

    assert in_a_fork(check) == 0


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_steps_do_not_grow(tmp_path):
    """Neither the objects that Python knows of nor the memory of the process."""
    loop = Loop("AdamW", torch.bfloat16, {"master_weights": "split", "ema_decay": 0.5})

    def train(steps):
        for i in range(steps):
            loop.step(poison=1 if i % 50 == 0 else None)
            loop.scaler.unscale_(loop.optimizer)  # an iteration that is given up
        ak.checkpoint.save(tmp_path / "c.pt", **loop.parts)
        loop.optimizer.zero_grad()
        loop.losses.clear()
        gc.collect()
        return len(gc.get_objects()), resident()

    train(50)
    objects, memory = train(50)
    more_objects, more_memory = train(1000)
    assert more_objects - objects < 100
    assert more_memory - memory < 4 << 20
