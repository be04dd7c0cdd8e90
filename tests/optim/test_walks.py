"""The loops over all tensors of a step: C++ answers what Python does."""

from array import array

import pytest
import torch

from amp_kernels._dispatch import nodes, walks


@pytest.fixture(autouse=True, params=["Python", *(["C++"] if nodes.step_walk() else [])])
def walk(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(nodes, "step_walk", lambda: None)


def test_identical_means_the_same_objects_in_the_same_order():
    a, b = torch.zeros(2), torch.zeros(2)
    assert walks.identical([a, b], (a, b))
    assert walks.identical([], [])
    assert not walks.identical([a, b], [b, a])
    assert not walks.identical([a, b], [a, a])
    assert not walks.identical([a, b], [a])
    assert not walks.identical([a], [a, b])


def test_versions_are_compared_noted_and_bumped():
    tensors = [torch.zeros(1), torch.nn.Parameter(torch.zeros(1))]
    tensors[0].add_(1).add_(1)
    known = walks.versions(tensors)
    assert known == array("q", [2, 0])
    assert walks.same_versions(tensors, known)
    assert not walks.same_versions(tensors, known[:1])
    assert not walks.same_versions(tensors[:1], known)
    walks.bump_versions(tensors[1:])
    assert not walks.same_versions(tensors, known)
    walks.note_versions(tensors, known)
    assert known == array("q", [2, 1])
    with torch.inference_mode():
        tensors.append(torch.zeros(1))
    with pytest.raises(RuntimeError, match="Inference tensors"):
        walks.same_versions(tensors, array("q", [2, 1, 0]))
