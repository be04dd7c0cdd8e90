"""The text that is trained on: what is held out, and what decides a batch."""

import pytest
import torch

from bench.training.data import load_text


@pytest.fixture(scope="module")
def text():
    return load_text()


def test_held_out_bytes_are_not_trained_on(tmp_path):
    """Each block of this text has its own byte, so any that strays to the other side shows."""
    path = tmp_path / "text"
    path.write_bytes(b"".join(bytes([i]) * 600 for i in range(40)))  # 24000 bytes: blocks of 600
    text = load_text(str(path))
    assert set(text.validation.tolist()) == {9, 19, 29, 39}
    assert set(text.train.tolist()) == set(range(40)) - {9, 19, 29, 39}


def test_targets_are_the_next_bytes(text):
    tokens, targets = text.batch(seed=3, step=5, batch_size=4, context=16)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    stream = text.train.numpy().tobytes()
    for row, target in zip(tokens, targets, strict=True):
        assert bytes([*row.tolist(), target[-1].item()]) in stream
