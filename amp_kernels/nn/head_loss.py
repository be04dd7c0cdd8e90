"""Causal language models of transformers whose head and loss run as one op, :func:`amp_kernels.linear_cross_entropy`, and whose head
gives the log-probabilities of tokens by :func:`amp_kernels.linear_log_probs`.

The model's own forward runs, whatever it does besides, but its head returns its input and its loss function multiplies by the head's
weight. Only transformers' loss for causal models is replaced, and only if the model passes the head's output to nothing else
but the loss and its own output. A probe finds that out.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import HALF_DTYPES
from .._dispatch import autocast
from .._dispatch.library import PLAIN
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.linear_log_probs import linear_log_probs
from ._derived import base_of, forward_of, own_forward, shows
from ._probe import same, standing_in, values
from ._wrapped import own_class
from .fused import operands

_IGNORED = -100
_WIDTH = 4


class _Identity(torch.nn.Module):
    """Stands for the head."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class _NoLogits:
    """Stands for the logits in the output, which were never made."""

    @classmethod
    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            "the output has no logits: convert(fuse_loss=True) computes head and loss as one op when the model is called with labels "
            "in training mode; accepted: a call without labels, model.eval(), or convert without fuse_loss"
        )

    __getattr__ = __getitem__ = __array__ = __torch_function__ = _refuse


class _Loss:
    """transformers' ForCausalLMLoss of the head's input in place of its output."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden, target = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        with _fp32_result(hidden):
            loss = linear_cross_entropy(
                hidden, self.weight, target, linear_bias=self.bias, reduction=reduction, ignore_index=ignore_index
            )
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class Question:
    """A call of :func:`amp_kernels.nn.token_log_probs` to the head; ``answer``: log-probabilities and entropies."""

    answer: tuple[Tensor, Tensor] | None = None

    def __init__(self, ids: Tensor, mask: Tensor | None, temperature: float | Tensor, entropy: bool):
        self.ids, self.mask, self.temperature, self.entropy = ids, mask, temperature, entropy

    def put(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The answer as one tensor. ``hidden``: ``[batch, rows, width]``, those of the last tokens."""
        first = self.ids.shape[1] - hidden.shape[1] + 1  # of the tokens that are asked for, perhaps none
        target = self.ids[:, first:].to(hidden.device)
        if self.mask is not None:
            mask = self.mask.to(hidden.device) != 0
            target = target.masked_fill(~(mask[:, first:] & mask[:, first - 1 : -1]), _IGNORED)
        options = {"linear_bias": bias, "temperature": self.temperature}
        found = linear_log_probs(hidden[:, :-1], weight, target, entropy=self.entropy, **options)
        together = torch.stack(found) if self.entropy else found
        self.answer = together.unbind() if self.entropy else (found, found)
        return together


_asked = threading.local()


@contextlib.contextmanager
def asking(question: Question) -> Iterator[None]:
    """Within it a converted model's forward, in this thread, answers ``question``."""
    before = getattr(_asked, "question", None)
    _asked.question = question
    try:
        yield
    finally:
        _asked.question = before


def is_fused(module: torch.nn.Module) -> bool:
    return forward_of(own_class(module)) is forward


def _fp32_result(hidden: Tensor) -> contextlib.AbstractContextManager:
    """A context in which the loss of 16-bit inputs is FP32, as transformers' is."""
    device = hidden.device.type
    if hidden.dtype not in HALF_DTYPES or autocast.dtype_on(device) is not None:
        return contextlib.nullcontext()
    return torch.autocast(device, hidden.dtype)


def _found(module: torch.nn.Module, view: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    kind = own_class(module)
    return getattr(kind, "_amp_kernels_base", kind).forward(view, *args, **kwargs)


def _run(module: torch.nn.Module, view: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """The output of the model's own forward, run on ``view``, without its logits."""
    found = _found(module, view, args, kwargs)
    output = type(found)(**{name: value for name, value in found.items() if name != "logits"})
    object.__setattr__(output, "logits", _NoLogits())  # the class would add a key, too
    return output


@shows("amp_kernels.convert(fuse_loss=True)", own_signature=True)
def forward(self, *args: Any, **kwargs: Any) -> Any:
    question = getattr(_asked, "question", None)
    if question is not None and not torch.compiler.is_compiling():
        return _answered(self, question, args, kwargs)
    head = operands(self.lm_head) if self.training and kwargs.get("labels") is not None else None
    as_tuple = not (self.config.return_dict if kwargs.get("return_dict") is None else kwargs["return_dict"])
    if (
        head is None
        or as_tuple
        or type(head[0]) not in PLAIN
        or torch.compiler.is_compiling()  # which cannot trace the stand-in
        or not _has_causal_loss(self)
    ):
        return own_forward(self, *args, **kwargs)
    return _run(self, _view(self, _Loss(*head), self._modules), args, kwargs)


def _answered(module: torch.nn.Module, question: Question, args: tuple, kwargs: dict) -> Any:
    """The output of the model's own forward with the answer, computed from the head's input, as its logits: DDP and FSDP look for
    tensors with gradients in outputs."""
    head = operands(module.lm_head)
    if head is None or type(head[0]) not in PLAIN:
        raise ValueError(
            f"token_log_probs: lm_head of {own_class(module).__name__} is a {type(module.lm_head).__name__} with hooks, adapters or a "
            "weight of its own kind; accepted: a linear layer as convert(fuse_loss=True) found it, sharded with the model around it"
        )
    found = _found(module, _view(module, _Loss(*head), module._modules), args, kwargs)
    if not hasattr(found, "keys"):
        return question.put(found[0], *head), *found[1:]
    found["logits"] = question.put(found["logits"], *head)
    return found


def _view(module: torch.nn.Module, loss: _Loss, modules: dict[str, Any]) -> torch.nn.Module:
    return standing_in(module, _modules=modules | {"lm_head": _Identity()}, _loss_function=loss)


def _has_causal_loss(module: torch.nn.Module) -> bool:
    losses = sys.modules.get("transformers.loss.loss_utils")
    return losses is not None and getattr(module, "loss_function", None) is losses.ForCausalLMLoss


class _Hidden:
    """The result of a model's body: the first of several, all others ``None``."""

    def __init__(self, tensor: Tensor):
        self.last_hidden_state = tensor

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class _Body(torch.nn.Module):
    def forward(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(values(2, 3, _WIDTH))


class _Head(torch.nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def fusible(module: torch.nn.Module) -> bool:
    """True if the loss of ``module`` is that of causal models over its head ``lm_head``, and nothing changes the logits between."""
    head = module._modules.get("lm_head")
    if head is None or operands(head) is None or "forward" in vars(module) or not _has_causal_loss(module):
        return False
    if base_of(own_class(module)) is not None or not hasattr(getattr(module, "config", None), "return_dict"):
        return False
    weight, bias = operands(head)
    words = weight.shape[0]
    weight, bias = values(words, _WIDTH, seed=0.3), None if bias is None else values(words, seed=0.7)
    modules = dict.fromkeys(module._modules, _Body()) | {"lm_head": _Head(weight, bias)}
    own, fused = standing_in(module, _modules=modules), _view(module, _Loss(weight, bias), modules)
    labels = torch.tensor([[0, 1, _IGNORED], [1, 0, 1]], device="cpu")

    def loss(view: torch.nn.Module) -> Tensor:
        before = dict(vars(view))
        found = _run(module, view, (), {"input_ids": labels.abs(), "labels": labels})["loss"]
        if vars(view) != before:
            raise RuntimeError("it writes its own attributes")  # which a copy of it would lose
        return found

    try:
        return same(lambda _: loss(fused), lambda _: loss(own), labels, 1e-5)
    except Exception:  # its own forward does not run on stand-ins
        return False
