"""The text of the training benchmark: Python's own reference manual, as bytes.

`pydoc_data.topics` ships inside CPython (about 460 KB of English with code), so a real text is at hand on every machine
without a download. Bytes are the tokens: a vocabulary of 256, no tokenizer. Every tenth block of 8 KiB is held out
for validation: topics differ too much for a cut at one place to be fair.

A batch is a pure function of (seed, step), so the position in the data is the step number, two providers see the same
batches, and a resumed run needs no iterator state.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

BLOCK = 8192  # bytes, less for a short text
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


def load_text(path: str | None = None) -> Text:
    """The Python reference manual, or the bytes of the file `path`.

    Raises ValueError if `path` cannot be read, or if the text is too short to hold out a validation part.
    """
    if path is None:
        from pydoc_data.topics import topics

        raw, source = "\n\n".join(topics[name] for name in sorted(topics)).encode(), "pydoc_data.topics"
    else:
        try:
            raw, source = Path(path).read_bytes(), Path(path).name
        except OSError as error:
            raise ValueError(f"the text {path} cannot be read: {error.strerror}") from None
    if len(raw) < 20_000:
        raise ValueError(
            f"the text {source} has {len(raw)} bytes; at least 20000 are needed for training and validation"
        )
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    blocks = data.split(min(BLOCK, len(raw) // (4 * HELD_OUT)))
    train = torch.cat([block for i, block in enumerate(blocks) if i % HELD_OUT != HELD_OUT - 1])
    validation = torch.cat(blocks[HELD_OUT - 1 :: HELD_OUT])
    return Text(train, validation, source, hashlib.sha256(raw).hexdigest())
