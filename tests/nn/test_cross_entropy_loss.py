"""ak.nn.CrossEntropyLoss: torch's module with torch's arguments, buffer and state_dict; convert puts it in."""

import copy
import inspect
import pickle

import pytest
import torch

import amp_kernels as ak


def test_the_signature_is_torchs():
    ours = inspect.signature(ak.nn.CrossEntropyLoss).parameters
    torchs = inspect.signature(torch.nn.CrossEntropyLoss).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    assert all(ours[name].default == torchs[name].default for name in torchs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 2},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"weight": torch.rand(5)},
        {"reduce": False},
    ],
)
def test_convert_changes_no_result(options):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 5), "loss": torch.nn.CrossEntropyLoss(**options)})
    x, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 4])
    want = model["loss"](model["head"](x), target)
    before = copy.deepcopy(model.state_dict())
    loss = ak.convert(model)["loss"]
    assert type(loss) is ak.nn.CrossEntropyLoss
    torch.testing.assert_close(loss(model["head"](x), target), want)
    torch.testing.assert_close(model.state_dict(), before)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), ak.convert(loss)):
        torch.testing.assert_close(twin(model["head"](x), target), want)


def test_its_own_options_reach_the_op():
    x, target = torch.randn(4, 5), torch.tensor([0, 2, 1, 4])
    loss = ak.nn.CrossEntropyLoss(z_loss=0.5)(x, target)
    torch.testing.assert_close(loss, ak.cross_entropy(x, target, z_loss=0.5))
    assert not torch.equal(loss, ak.cross_entropy(x, target))
    logits = x.clone().requires_grad_()
    ak.nn.CrossEntropyLoss(inplace=True)(logits, target)
    assert not torch.equal(logits, x)


def test_subclasses_are_left_alone():
    class Other(torch.nn.CrossEntropyLoss):
        pass

    assert type(ak.convert(Other())) is Other
