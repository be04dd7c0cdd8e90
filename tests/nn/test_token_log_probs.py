"""token_log_probs: the numbers of the model's own logits, and nothing of their size."""

import pytest
import torch
from torch import nn

import amp_kernels as ak

from .test_head_loss import WORDS, Capped, Model, Output, _transformers, models  # noqa: F401  (a fixture)


def exact(model, ids, temperature=1.0):
    """Log-probabilities and entropies from the model's logits, in float64."""
    logits = model(ids)["logits"].double()[:, :-1] / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def tokens():
    return torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.rand(3, 6) + 0.5], ids=["1", "0.7", "rows"])
def test_numbers_and_gradients_are_the_models(bias, temperature):
    theirs, ours = (model.double() for model in models(bias))
    ids = tokens()
    for model in (theirs, ours.train(), ours.eval()):
        found = (
            exact(model, ids, torch.as_tensor(temperature, dtype=torch.float64)[..., None])
            if model is theirs
            else ak.nn.token_log_probs(model, ids, temperature=temperature, entropy=True)
        )
        model.zero_grad()
        (found[0] * torch.linspace(-1, 1, 18).view(3, 6) + 0.1 * found[1]).sum().backward()
        if model is theirs:
            want = [t.detach() for t in found]
            continue
        torch.testing.assert_close([*found], [*want], rtol=1e-12, atol=1e-12)
        for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)
    assert torch.equal(ak.nn.token_log_probs(ours, ids, temperature=temperature), found[0])


def test_padding_has_no_part():
    """On both sides: a token behind padding alone is not predicted by anything."""
    _, model = models()
    ids, mask = tokens(), torch.ones(3, 7, dtype=torch.int64)
    mask[0, :3] = 0
    mask[1, 5:] = 0
    log_probs, entropy = ak.nn.token_log_probs(model, ids, mask, entropy=True)
    full = ak.nn.token_log_probs(model, ids)
    ignored = torch.zeros(3, 6, dtype=torch.bool)
    ignored[0, :3] = ignored[1, 4:] = True
    assert torch.equal(log_probs == 0, ignored)
    assert torch.equal(entropy == 0, ignored)
    assert torch.equal(log_probs[~ignored], full[~ignored])


class Keeps(Model):
    def forward(self, input_ids, labels=None, logits_to_keep=0, return_dict=None, **kwargs):
        logits = self.lm_head(self.body(input_ids)[0][:, -logits_to_keep:])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=WORDS, **kwargs)
        return Output(logits=logits, **({} if loss is None else {"loss": loss}))


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def test_the_last_tokens_alone_and_through_wrappers():
    model, ids = models(kind=Keeps)[1], tokens()
    full = ak.nn.token_log_probs(Wrapper(model), ids)
    for count in (0, 3):
        found = ak.nn.token_log_probs(model, ids, torch.ones_like(ids), logits_to_keep=count + 1)
        assert torch.equal(found, full[:, 6 - count :])


def test_no_tensor_of_the_size_of_the_logits():
    _, model = models()
    ids, sizes = tokens().repeat(40, 10), []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() for t in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(t)
            )
            return result

    rows = ids.numel()
    with torch.autocast("cpu", torch.bfloat16), Sizes():
        ak.nn.token_log_probs(model, ids).sum().backward()
    assert max(sizes) < rows * WORDS


def test_bad_input():
    theirs, ours = models()
    capped = models(kind=Capped)[1]
    ids = tokens()
    hooked = models()[1]
    hooked.lm_head.register_forward_hook(lambda *_: None)
    calls = {
        "model \\(Model\\) has no causal head": lambda: ak.nn.token_log_probs(theirs, ids),
        "model \\(Capped\\) has no causal head": lambda: ak.nn.token_log_probs(capped, ids),
        "lm_head of Model is a Linear with hooks": lambda: ak.nn.token_log_probs(hooked, ids),
        r"input_ids has shape \[3\]; accepted: \[batch, length\]": lambda: ak.nn.token_log_probs(ours, ids[:, 0]),
        r"input_ids has shape \[3, 1\]": lambda: ak.nn.token_log_probs(ours, ids[:, :1]),
        r"attention_mask has shape \[3, 6\]; accepted: \[3, 7\]": lambda: ak.nn.token_log_probs(ours, ids, ids[:, 1:]),
        "labels is given": lambda: ak.nn.token_log_probs(ours, ids, labels=ids),
        "temperature is 0": lambda: ak.nn.token_log_probs(ours, ids, temperature=0),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match="input_ids has dtype int32"):
        ak.nn.token_log_probs(ours, ids.int())
    assert ak.nn.token_log_probs(ours, ids).shape == (3, 6)  # no error stays behind
    assert "loss" in ours(ids, labels=ids)
