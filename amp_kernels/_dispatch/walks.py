"""Loops over all tensors of a step, of which a model has hundreds or thousands. These are the specification; the module ``_nodes``,
where it is loaded, puts its own in their place (csrc/autograd/gradient_table.cpp). So they are called as ``walks.bump_versions(...)``."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_version = operator.attrgetter("_version")


def same_objects(objects: list | tuple, others: list | tuple) -> bool:
    """True if two sequences hold the same objects, in order. Tensors define ``==`` in another way."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def versions(tensors: Iterable[Tensor]) -> array:
    """The version counters of tensors. Inference tensors have none."""
    return array("q", map(_version, tensors))


def same_versions(tensors: list[Tensor], known: array) -> bool:
    """True if the tensors still have the version counters ``known``."""
    return versions(tensors) == known


def note_versions(tensors: list[Tensor], known: array) -> None:
    """Overwrite ``known`` with the current version counters."""
    known[:] = versions(tensors)


def bump_versions(tensors: list[Tensor]) -> None:
    """Tell autograd of writes that it cannot see. It does not count those of inference tensors."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def take_from(module: Any) -> None:
    """Use the functions of ``module`` from now on."""
    global same_objects, same_versions, note_versions, bump_versions
    same_objects, same_versions = module.same_objects, module.same_versions
    note_versions, bump_versions = module.note_versions, module.bump_versions
