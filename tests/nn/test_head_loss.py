"""Head and loss of a causal language model as one op: the loss and gradients of the separate ones, and no logits."""

import copy
import inspect
import pickle
import sys
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_kernels as ak

WORDS, WIDTH = 23, 8


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """transformers' ForCausalLMLoss."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    rows, target = wide.view(-1, vocab_size), shift_labels.reshape(-1)
    if num_items_in_batch is None:
        return F.cross_entropy(rows, target, ignore_index=ignore_index)
    return F.cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


@pytest.fixture(autouse=True)
def _transformers(monkeypatch):
    losses = types.SimpleNamespace(ForCausalLMLoss=causal_loss)
    monkeypatch.setitem(sys.modules, "transformers.loss.loss_utils", losses)


class Output(dict):
    def __getattr__(self, name):
        return self.get(name)


@dataclass
class Config:
    return_dict: bool = True


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids):
        return (self.words(ids).tanh(),)


class Model(nn.Module):
    """As transformers' models compute head and loss."""

    def __init__(self, bias=False):
        super().__init__()
        self.config = Config()
        self.body, self.lm_head = Body(), nn.Linear(WIDTH, WORDS, bias=bias)

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", causal_loss)

    def change(self, logits):
        return logits

    def forward(self, input_ids, labels=None, return_dict=None, **kwargs):
        logits = self.change(self.lm_head(self.body(input_ids)[0]))
        loss = self.loss_function(logits, labels, vocab_size=WORDS, **kwargs) if labels is not None else None
        output = Output(logits=logits, **({} if loss is None else {"loss": loss}))
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else (loss, logits)


class Capped(Model):
    def change(self, logits):
        return 2 * torch.tanh(logits / 2)


class Counting(Model):
    def change(self, logits):
        self.calls = getattr(self, "calls", 0) + 1
        return logits


def models(bias=False, kind=Model):
    torch.manual_seed(0)
    model = kind(bias)
    return model, ak.convert(copy.deepcopy(model), fuse_loss=True)


def data():
    ids = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def is_fused(model):
    return type(model).__module__ == "amp_kernels.nn.head_loss"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(9)}, {"shift_labels": data()[0]}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_are_the_models(bias, more, dtype):
    theirs, ours = (model.to(dtype) for model in models(bias))
    ids, labels = data()
    expected, found = (model(ids, labels=labels, **more) for model in (theirs, ours))
    assert is_fused(ours)
    assert found.keys() == {"loss"}
    bound = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found["loss"], expected["loss"], **bound)
    for output in (expected, found):
        output["loss"].backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **bound)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_the_loss_of_16_bits_is_fp32(parameters):
    """2^-8 is the most that a logit is rounded by, relative to itself; below 4 here."""
    theirs, ours = models()
    ids, labels = data()
    theirs, ours = theirs.to(parameters), ours.to(parameters)
    with torch.autocast("cpu", torch.bfloat16, enabled=parameters == torch.float32):
        found = ours(ids, labels=labels).loss
    exact = theirs.double()(ids, labels=labels).loss
    assert found.dtype == torch.float32
    assert abs(found - exact) < 3 * 4 * 2.0**-8
    assert found != found.bfloat16()


@pytest.mark.parametrize(
    "use",
    [lambda x: x.argmax(-1), lambda x: x[..., :-1, :], F.softmax, torch.argmax, lambda x: torch.cat([x]), np.asarray],
)
def test_a_use_of_the_logits_names_the_reason(use):
    ids, labels = data()
    output = models()[1](ids, labels=labels)
    assert "logits" not in output
    with pytest.raises(
        AttributeError, match=r"the output has no logits: convert\(fuse_loss=True\) computes head and loss"
    ):
        use(output.logits)


def test_the_models_own_forward_runs_where_the_logits_are_wanted():
    theirs, ours = models()
    ids, labels = data()
    assert ours(ids).logits is not None
    _, logits = ours(ids, labels=labels, return_dict=False)
    assert torch.equal(logits, theirs(ids).logits)
    assert ours.eval()(ids, labels=labels).logits is not None
    ours.train().config.return_dict = False
    assert len(ours(ids, labels=labels)) == 2
    ours.config.return_dict = True
    ours._loss_function = lambda logits, labels, **_: logits.sum()
    assert torch.equal(ours(ids, labels=labels).loss, ours(ids).logits.sum())
    del ours._loss_function
    seen = []
    ours.lm_head.register_forward_hook(lambda *_: seen.append(1))
    ours(ids, labels=labels)
    assert seen == [1]


@pytest.mark.parametrize("kind", [Capped, Counting])
def test_a_model_that_does_more_stays_as_it_is(kind):
    theirs, ours = models(kind=kind)
    ids, labels = data()
    assert not is_fused(ours)
    torch.testing.assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)


def test_a_second_call_does_not_warn(caplog):
    _, ours = models()
    ak.convert(ours, fuse_loss=True)
    assert not caplog.records


def test_the_head_is_left_alone_if_skipped_and_without_the_option():
    model = ak.convert(Model(), skip=["lm_head"], fuse_loss=True)
    assert not is_fused(model)
    assert not is_fused(ak.convert(Model()))


def test_its_signature_is_the_models_and_it_pickles():
    """transformers drops the columns of a data set that forward does not name."""
    theirs, ours = models()
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    ids, labels = data()
    copied = pickle.loads(pickle.dumps(ours))
    assert is_fused(copied)
    assert copied(ids, labels=labels).keys() == {"loss"}


def test_compiled_it_is_the_models_own_and_reverted_too():
    _, ours = models()
    ids, labels = data()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, labels=labels)["loss"], ours(ids, labels=labels).loss)
    assert "convert(fuse_loss=True) in place of" in repr(ours)
    assert type(ak.revert(ours)) is Model
