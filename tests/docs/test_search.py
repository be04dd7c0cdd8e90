"""Words that people search for stand in the page with the answer."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("speedup", "guide/profiling"),
        ("OOM", "guide/optimizer-memory"),
        ("wandb", "migration/hf-trainer"),
        ("wandb", "guide/logging"),
        ("TensorBoard", "guide/logging"),
        ("CSV", "guide/logging"),
        ("PEFT", "migration/bitsandbytes"),
        ("LoRA", "migration/bitsandbytes"),
        ("NaN", "guide/debugging"),
        ("GRPO", "guide/reinforcement-learning"),
    ],
)
def test_a_search_finds_its_page(word, page):
    assert re.search(rf"\b{word}\b", (DOCS / f"{page}.md").read_text())
