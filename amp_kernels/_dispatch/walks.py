"""Loops over all tensors of a step, of which a model has hundreds or thousands: in C++ if the module ``_nodes`` is loaded
(csrc/autograd/gradient_table.h), otherwise in Python."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from . import nodes

_version = operator.attrgetter("_version")


def identical(objects: list | tuple, others: list | tuple) -> bool:
    """True if two sequences hold the same objects, in order. Tensors define ``==`` in another way."""
    walk = nodes.step_walk()
    if walk is not None:
        return walk.same_objects(objects, others)
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def versions(tensors: Iterable[Tensor]) -> array:
    """The version counters of tensors. Inference tensors have none."""
    return array("q", map(_version, tensors))


def same_versions(tensors: list[Tensor], known: array) -> bool:
    """True if the tensors still have the version counters ``known``."""
    walk = nodes.step_walk()
    return walk.same_versions(tensors, known) if walk is not None else versions(tensors) == known


def note_versions(tensors: list[Tensor], known: array) -> None:
    """Overwrite ``known`` with the current version counters."""
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
