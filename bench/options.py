"""Types of options that several commands have: positive numbers, lists of names, the device."""

import argparse
from collections.abc import Iterable

import torch

from .harness import environment


def positive(text: str) -> int:
    """The type of options that take 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def names(parser: argparse.ArgumentParser, option: str, given: str | None, accepted: Iterable[str]) -> list[str]:
    """The names in a comma-separated list, each once; all accepted ones if none is given."""
    if given is None:
        return list(accepted)
    chosen = list(dict.fromkeys(name.strip() for name in given.split(",")))
    if unknown := [name for name in chosen if name not in accepted]:
        parser.error(f"argument {option}: {', '.join(unknown)} is unknown; accepted: {', '.join(accepted)}")
    return chosen


def device(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    try:
        return environment.pick_device(name)
    except ValueError as error:
        parser.error(str(error))
