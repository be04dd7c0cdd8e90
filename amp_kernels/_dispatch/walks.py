"""Loops over all tensors of a step that look at each one alone: in C++ where there is the module ``_nodes``
(csrc/autograd/gradient_table.h), in Python elsewhere. A model has hundreds of tensors, some thousands."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from . import nodes

_version = operator.attrgetter("_version")


def identical(objects: list | tuple, others: list | tuple) -> bool:
    """Whether two sequences hold the same objects. Not ``==``, which tensors define otherwise."""
    walk = nodes.step_walk()
    if walk is not None:
        return walk.same_objects(objects, others)
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def versions(tensors: Iterable[Tensor]) -> array:
    """Their version counters. Inference tensors have none."""
    return array("q", map(_version, tensors))


def same_versions(tensors: list[Tensor], known: array) -> bool:
    """Whether these are their version counters still."""
    walk = nodes.step_walk()
    return walk.same_versions(tensors, known) if walk is not None else versions(tensors) == known


def note_versions(tensors: list[Tensor], known: array) -> None:
    """Replace what was known of them by what they are now."""
    walk = nodes.step_walk()
    if walk is not None:
        walk.note_versions(tensors, known)
    else:
        known[:] = versions(tensors)


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd of writes that it cannot see."""
    walk = nodes.step_walk()
    if walk is not None:
        walk.bump_versions(tensors)
    else:
        torch.autograd.graph.increment_version(tensors)
