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


def test_a_batch_depends_on_seed_and_step_alone(text):
    def batch(seed, step):
        return text.batch(seed, step, 4, 16)[0]

    first = batch(0, 7)
    torch.manual_seed(99)
    assert torch.equal(batch(0, 7), first)
    assert not torch.equal(batch(0, 8), first)
    assert not torch.equal(batch(1, 7), first)


def test_validation_windows_reach_both_ends(text):
    batches = list(text.validation_batches(batch_size=4, context=32, count=3))
    assert len(batches) == 3
    assert torch.equal(batches[0][0][0], text.validation[:32].long())
    assert torch.equal(batches[-1][1][-1], text.validation[-32:].long())


def test_a_short_or_missing_text_is_refused(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="short has 100 bytes; at least 20000"):
        load_text(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        load_text(str(tmp_path / "absent"))
