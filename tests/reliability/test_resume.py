"""A run that is saved, and goes on in other objects, is the run that was never interrupted: bit for bit."""

import random

import pytest
import torch

import amp_kernels as ak

from ..helpers.processes import python
from .loop import IDS, VARIANTS, Loop, assert_same

SAVED, TOTAL = 4, 9
SKIPPED = (2, 6)  # on both sides, so that hysteresis and both counts of skips matter


def run(loop, steps):
    for step in steps:
        loop.step(poison=1 if step in SKIPPED else None)
    return loop


def whole_run(*arguments, **options):
    return run(Loop(*arguments, **options), range(TOTAL)).state()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_it_goes_on_where_it_was(tmp_path, variant, background):
    expected = whole_run(*variant)
    first = run(Loop(*variant), range(SAVED))
    ak.checkpoint.save(tmp_path / "c.pt", **first.parts, extra=first.losses, background=background)
    run(first, range(SAVED, TOTAL))
    assert_same(first.state(), expected)  # saving changes nothing, and is not changed by what comes after
    second = Loop(*variant, seed=1)
    run(second, range(2))  # with a state of its own
    second.losses = ak.checkpoint.load(tmp_path / "c.pt", **second.parts)
    assert_same(run(second, range(SAVED, TOTAL)).state(), expected)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_it_goes_on_where_all_steps_were_skipped(tmp_path, variant):
    """State exists and holds nothing yet: SGD's momentum is saved as None, as torch's is before its first step."""

    def begin(loop):
        for _ in range(2):
            loop.step(poison=1)
        return loop

    expected = run(begin(Loop(*variant)), range(3)).state()
    first = begin(Loop(*variant))
    ak.checkpoint.save(tmp_path / "c.pt", **first.parts, extra=first.losses)
    second = run(Loop(*variant, seed=1), range(2))
    second.losses = ak.checkpoint.load(tmp_path / "c.pt", **second.parts)
    assert_same(run(second, range(3)).state(), expected)


def test_remainders_below_the_smallest_weight_are_kept(tmp_path):
    """A split master whose 16-bit weight is zero: a zero that somebody writes would clear its remainder."""
    model = torch.nn.Linear(2, 2).half()
    torch.nn.init.zeros_(model.weight)
    optimizer = ak.optim.SGD(model.parameters(), lr=1e-9, master_weights="split")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = ak.fp32_state_dict(model, optimizer)
    assert expected["weight"].all()
    assert not model.weight.any()
    ak.checkpoint.save(tmp_path / "c.pt", model=model, optimizer=optimizer)
    ak.checkpoint.load(tmp_path / "c.pt", model=model, optimizer=optimizer)
    assert_same(ak.fp32_state_dict(model, optimizer), expected)


def test_optimizers_of_torch_too(tmp_path):
    def make(params, lr):
        return torch.optim.AdamW(params, lr=lr, fused=True)

    expected = whole_run(optimizer=make)
    first = run(Loop(optimizer=make), range(SAVED))
    ak.checkpoint.save(tmp_path / "c.pt", **first.parts, extra=first.losses)
    second = Loop(optimizer=make, seed=1)
    second.losses = ak.checkpoint.load(tmp_path / "c.pt", **second.parts)
    assert_same(run(second, range(SAVED, TOTAL)).state(), expected)
    loaded = second.state()
    (tmp_path / "c.pt").write_bytes(b"")  # nothing of the run lies in the file
    assert_same(second.state(), loaded)


def test_the_generators_of_python_and_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    ak.checkpoint.save(tmp_path / "c.pt")
    expected = random.random(), numpy.random.random(), torch.rand(())
    ak.checkpoint.load(tmp_path / "c.pt", rng=False)
    assert (random.random(), numpy.random.random(), torch.rand(())) != expected
    ak.checkpoint.load(tmp_path / "c.pt")
    assert (random.random(), numpy.random.random(), torch.rand(())) == expected


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["amp_kernels"] = None  # cannot be imported
import torch
for path, out in zip(sys.argv[1::2], sys.argv[2::2]):
    saved = torch.load(path, weights_only=True)
    layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for param, state in zip(model.parameters(), saved["optimizer"]["state"].values()):
        if "master" in state:
            param.data.copy_(state["master"])
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    torch.save([list(model.parameters()), {**saved, "model": 0, "optimizer": 0}], out)
"""


def test_torch_alone_reads_it_and_trains_on(tmp_path):
    """Float32 weights, and bfloat16 ones of which half of the master lies in a remainder."""
    variants = [(torch.float32, "fp32"), (torch.bfloat16, "split")]
    loops = [run(Loop("AdamW", dtype, {"master_weights": kept}), range(SAVED)) for dtype, kept in variants]
    files = []
    for i, loop in enumerate(loops):
        ak.checkpoint.save(tmp_path / f"{i}.pt", **loop.parts, extra={"step": SAVED})
        files += [tmp_path / f"{i}.pt", tmp_path / f"{i}.out"]
    python("-c", WITHOUT_THE_PACKAGE, *files, cwd=tmp_path)
    for loop, out in zip(loops, files[1::2], strict=True):
        params, rest = torch.load(out)
        assert rest["extra"] == {"step": SAVED}
        assert rest["data"] == loop.sampler.state_dict()
        assert rest["scaler"] == loop.scaler.state_dict()
        for param in loop.model.parameters():
            param.grad = torch.full_like(param, 0.5)
        loop.optimizer.step()
        masters = ak.fp32_state_dict(loop.model, loop.optimizer)
        ours = [masters[name] for name, _ in loop.model.named_parameters()]
        for param, other in zip(ours, params, strict=True):
            torch.testing.assert_close(other.data, param, rtol=1e-6, atol=1e-7)
