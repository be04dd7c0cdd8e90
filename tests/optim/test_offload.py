"""State that a plain optimizer moves to host memory between phases, and back."""

import copy

import pytest
import torch

import amp_kernels as ak
from amp_kernels.optim import _store

from .optimizers import NAMES
from .released import LAYOUTS, assert_same, batch, make, snapshot, train


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_state_comes_back_with_its_bits(name, layout, monkeypatch):
    monkeypatch.setattr(_store, "moved", lambda tensor, device: tensor.clone())  # as from one device to another
    dtype, options = LAYOUTS[layout]
    plain, (model, optimizer, _) = (make(name, dtype, **options) for _ in range(2))
    for own in (plain, (model, optimizer)):
        train(*own[:2], None, range(3))
    for _ in range(2):
        kept = [buffer.untyped_storage()._weak_ref() for block in optimizer._store.blocks for buffer in block.tensors()]
        before = snapshot(model, optimizer)
        optimizer.offload_state()
        optimizer.offload_state()  # does nothing more
        assert all(map(torch.UntypedStorage._expired, kept))
        assert_same(snapshot(model, optimizer), before)
        model(batch(3)).backward()
        with pytest.raises(RuntimeError, match=rf"{name}: the state is in host memory.*reload_state\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        kept = [buffer.untyped_storage()._weak_ref() for block in optimizer._store.blocks for buffer in block.tensors()]
        optimizer.reload_state()
        optimizer.reload_state()
        assert all(map(torch.UntypedStorage._expired, kept))
        assert_same(snapshot(model, optimizer), before)
        for own in (plain, (model, optimizer)):
            train(*own[:2], None, range(3, 5))
        assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


def test_what_happens_while_the_state_is_away(monkeypatch):
    """Weights are written, a state is loaded, a copy is made, a gradient is released."""
    monkeypatch.setattr(_store, "moved", lambda tensor, device: tensor.clone())
    dtype, options = LAYOUTS["bf16 split24 8bit"]
    found = []
    for away in (False, True):
        model, optimizer, _ = make("AdamW", dtype, **options)
        train(model, optimizer, None, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        if away:
            optimizer.offload_state()
        with torch.no_grad():
            model.layers[1].weight[0] = 0
        if away:
            with (
                ak.optim.release_gradients(optimizer),
                pytest.raises(RuntimeError, match="AdamW: the state is in host memory"),
            ):
                model(batch(2)).backward()
            optimizer.zero_grad()
            optimizer.reload_state()
        train(model, optimizer, None, range(2, 4))
        found.append(snapshot(model, optimizer))
        if away:
            optimizer.offload_state()
        copied_model, copied = copy.deepcopy((model, optimizer))
        optimizer.load_state_dict(saved)  # onto the device of the parameters
        for own in ((model, optimizer), (copied_model, copied)):
            train(*own, None, range(4, 6))
            found.append(snapshot(*own))
    assert_same(found[:3], found[3:])


def test_a_move_that_fails_changes_nothing(monkeypatch):
    model, optimizer, _ = make("AdamW")
    train(model, optimizer, None, range(2))
    before, calls = snapshot(model, optimizer), []

    def fail(tensor, device):
        calls.append(tensor)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        return tensor.clone()

    monkeypatch.setattr(_store, "moved", fail)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.offload_state()
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, None, [2])
