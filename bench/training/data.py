"""The text of the training benchmark: Python's own reference manual, as bytes.

`pydoc_data.topics` ships inside CPython (about 460 KB of English with code), so a real text is at hand on every machine
without a download. Bytes are the tokens: a vocabulary of 256, no tokenizer. Every tenth block of 8 KiB is held out
for validation: topics differ too much for a cut at one place to be fair.

A batch is a pure function of (seed, step), so the position in the data is the step number, two providers see the same
batches, and a resumed run needs no iterator state.
"""

import hashlib
from dataclasses import dataclass

import torch

BLOCK = 8192  # bytes
HELD_OUT = 10  # one block in so many


@dataclass(frozen=True)
class Text:
    """Train and validation bytes (uint8, 1-D, on the CPU) with a name and fingerprint of where they came from."""

    train: torch.Tensor
    validation: torch.Tensor
    source: str
    sha256: str

    def batch(self, seed: int, step: int, batch_size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [batch_size, context] int64: random training windows, decided by (seed, step)."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(self.train.numel() - context, (batch_size,), generator=generator)
        return _windows(self.train, starts, context)

    def validation_batches(self, batch_size: int, context: int, count: int):
        """Yields `count` batches of windows spread evenly over the validation text, the same ones every time."""
        starts = torch.linspace(0, self.validation.numel() - context - 1, batch_size * count).long()
        for chunk in starts.split(batch_size):
            yield _windows(self.validation, chunk, context)


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def load_text() -> Text:
    """The Python reference manual."""
    from pydoc_data.topics import topics  # large

    raw = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return Text(*split(raw, BLOCK), "pydoc_data.topics", hashlib.sha256(raw).hexdigest())


def split(raw: bytes, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and held out."""
    blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).split(block)
    train = torch.cat([part for i, part in enumerate(blocks) if i % HELD_OUT != HELD_OUT - 1])
    return train, torch.cat(blocks[HELD_OUT - 1 :: HELD_OUT])
