"""``token_log_probs``: the log-probabilities of a batch's own tokens under a causal language model, without its logits."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._checks.modules import check_module
from .._checks.operands import check_tensor
from .head_loss import Question, asking, is_fused

_OP = "token_log_probs"


@overload
def token_log_probs(
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: Literal[False] = False,
    **model_inputs: Any,
) -> Tensor: ...
@overload
def token_log_probs(
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: Literal[True],
    **model_inputs: Any,
) -> tuple[Tensor, Tensor]: ...
def token_log_probs(
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    **model_inputs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of ``input_ids``, each given those in front of it, by :func:`amp_kernels.linear_log_probs`.

    The model is a causal language model of transformers after ``ak.convert(model, fuse_loss=True)``, in training or evaluation mode,
    alone or inside of modules that call it. Its own forward runs, but its head returns its input, so the logits never exist. Call it
    with the model that DDP or FSDP returned; ``fully_shard`` leaves the head to the model around it.

    Args:
        model: the converted model.
        input_ids: ``[batch, length]``, int64.
        attention_mask: ``[batch, length]``, 0 at padding. A token that is padding, or that follows padding directly, has the
            log-probability and entropy 0, and no gradient.
        temperature: as :func:`amp_kernels.linear_log_probs` takes it; a tensor with one for each row has the shape of the result.
        entropy: also return the entropies of the distributions that the tokens are from.
        model_inputs: further arguments of the model, such as ``position_ids``. With ``logits_to_keep=n + 1`` the result has the last
            ``n`` tokens alone.

    Returns:
        ``[batch, length - 1]``, fp32: row ``t`` belongs to token ``t + 1``. With ``entropy`` a pair of such tensors.

    Raises:
        TypeError: ``model`` is no module, or ``input_ids`` not int64.
        ValueError: a shape does not fit; the model was not converted, ``convert`` left it because it caps its logits (Gemma 2), or its
            head is more than a linear layer (LoRA, hooks, a DTensor). A scale of the logits (Cohere, Granite) is part of the result.
            DistributedDataParallel has ``static_graph=True`` and gradients are computed.

    Examples:
        >>> try:
        ...     ak.nn.token_log_probs(torch.nn.Identity(), torch.zeros(1, 4, dtype=torch.int64))
        ... except ValueError as error:
        ...     print(str(error).partition(";")[0])
        token_log_probs: model (Identity) has no causal head that ak.convert(model, fuse_loss=True) has fused
    """
    check_module(_OP, model)
    check_tensor(_OP, "input_ids", input_ids, (torch.int64,))
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise ValueError(
            f"{_OP}: input_ids has shape {list(input_ids.shape)}; accepted: [batch, length], a length of 2 or more"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"{_OP}: attention_mask has shape {list(attention_mask.shape)}; accepted: {list(input_ids.shape)}, as input_ids has"
        )
    if given := {"labels", "return_dict"} & model_inputs.keys():
        raise ValueError(f"{_OP}: {min(given)} is given; accepted: other arguments of the model's forward")
    if not any(is_fused(module) for module in model.modules()):
        raise ValueError(
            f"{_OP}: model ({type(model).__name__}) has no causal head that ak.convert(model, fuse_loss=True) has fused; accepted: a model "
            "of transformers that convert does not leave as it is, because it changes its logits or its head is more than a linear layer"
        )
    if torch.is_grad_enabled() and any(getattr(module, "static_graph", False) for module in model.modules()):
        raise ValueError(
            f"{_OP}: model is DistributedDataParallel with static_graph=True, which would not reduce the first gradients; accepted: False"
        )
    question = Question(input_ids, attention_mask, temperature, entropy)
    with asking(question):
        model(input_ids=input_ids, attention_mask=attention_mask, **{"use_cache": False, **model_inputs})
    if question.answer is None:
        raise ValueError(
            f"{_OP}: model ({type(model).__name__}) did not run its causal head; accepted: one that is not compiled"
        )
    return question.answer if entropy else question.answer[0]
