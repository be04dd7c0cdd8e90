"""The blocks whose additions can be made by norms (:mod:`.residual`), and which norm gets which sum.

A block is described by its norms, in the order in which its forward calls them. Between two, one addition is made, whose sum the second
gets; the sum behind the last goes to what follows the block. The same description fits blocks that begin with a norm and blocks that
begin with an addition. Where it is wrong, a norm is computed once that nobody fetches, and from then on torch adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from .._checks.types import type_name
from ._derived import base_of
from ._wrapped import own_class
from .residual import LISTS, Plan, forward, is_norm
from .waiting import Successor

#: Norms of the blocks of the packages below. A ``+`` stands for an addition whose sum no norm gets.
_NORMS = (
    "input_layernorm post_attention_layernorm",  # Llama, Mistral, Mixtral, Qwen and others
    "input_layernorm pre_ff_layernorm",  # Bamba, Jamba
    "input_layernorm +",  # Phi
    "ln_1 ln_2",  # GPT-2, torchvision's ViT
    "ln_1 ln_cross_attn ln_2",  # GPT-2 with cross-attention
    "ln_1 +",  # GPT-J
    "LayerNorm",  # BERT
    "layer_norm",  # T5
    "self_attn_layer_norm final_layer_norm",  # BART, OPT and others
    "self_attn_layer_norm encoder_attn_layer_norm final_layer_norm",  # their decoders, Whisper
    "sa_layer_norm output_layer_norm",  # DistilBERT
    "layernorm_before layernorm_after",  # ViT, Swin
    "layer_norm1 layer_norm2",  # CLIP
    "norm1 norm2",  # torch.nn, timm, torchvision's Swin, DINOv2
    "norm1 norm2 norm3",  # decoders of torch.nn
)
_KNOWN = {frozenset(names.split()) - {"+"}: tuple(names.split()) for names in _NORMS}
_KNOWN_BY_CLASS = {"GPTNeoXLayer": ("input_layernorm", "post_attention_layernorm", "+")}
_BLOCKS = re.compile(
    r"(torch|torchvision|timm|transformers)\..*(Layer|Block|Output|LayerFF|Layer(Self|Cross)Attention)"
)
_registered: dict[type[torch.nn.Module], tuple[str, ...]] = {}

Items = list[tuple[str, int]]  # paths of norms and blocks, each with the number of additions that are skipped behind it


def register_block(kind: type[torch.nn.Module], *norms: str) -> None:
    """Let ``convert(fuse_residuals=True)`` fuse the residual additions of modules of a class, such as the blocks of a model of your own.

    Known without it are the blocks of transformers, torchvision and timm that name their norms like Llama, GPT-2, Phi, BERT, T5, BART,
    ViT, CLIP or Swin, and the Transformer layers of torch.nn.

    The forward of ``kind`` finds tensors of a subclass of torch.Tensor where its submodules return tensors, so it must not ask for their
    exact class, nor write in place to a sum that a norm gets. Results have the same bits whatever ``norms`` says: a wrong order costs
    one norm, computed once.

    Args:
        kind: the class, not a subclass or base of it.
        norms: names of norms among the submodules, or of submodules that are such blocks, in the order in which the forward calls them,
            with one addition between two. ``"+"`` behind a name stands for an addition whose sum no norm gets. By default all of them,
            in the order of ``named_modules``.

    Raises:
        TypeError: ``kind`` is no class of modules, or a name is no string.
        ValueError: raised by :func:`amp_kernels.convert`, if a module of the class has no submodule of a name.

    Examples:
        >>> class Block(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.norm_1, self.mixer = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        ...         self.norm_2, self.mlp = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        ...
        ...     def forward(self, x):
        ...         x = x + self.mixer(self.norm_1(x))
        ...         return x + self.mlp(self.norm_2(x))
        >>> ak.nn.register_block(Block, "norm_1", "norm_2")
        >>> model = torch.nn.Sequential(Block(8), Block(8), torch.nn.LayerNorm(8))
        >>> ak.convert(model, fuse_residuals=True)(torch.randn(2, 8)).shape  # four additions, all made by norms
        torch.Size([2, 8])
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        raise TypeError(f"register_block: kind is {kind!r}; accepted: a subclass of torch.nn.Module")
    for name in norms:
        if not isinstance(name, str):
            raise TypeError(f"register_block: norms holds {name!r}, of type {type_name(name)}; accepted: names, '+'")
    _registered[kind] = norms


def fusible(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Plan | None]]:
    """The modules with norms, each with the plan of its additions; ``None`` where no class is known or there is none to make."""
    order = list(modules)
    blocks: dict[torch.nn.Module, Items] = {}
    for module in reversed(order):  # submodules first
        if items := _items(module, blocks):
            blocks[module] = items
    for i, module in enumerate(order):
        if module in blocks:
            yield module, _plan(module, blocks, order[i + 1 :])
        elif any(map(is_norm, _leaves(module).values())):
            yield module, None


def _items(module: torch.nn.Module, blocks: dict[torch.nn.Module, Items]) -> Items:
    kind = own_class(module)
    kind = base_of(kind) if kind.forward is forward else kind
    if "forward" in vars(module) or base_of(kind) is not None:
        return []
    leaves = _leaves(module)
    if kind in _registered:
        names = _registered[kind] or tuple(p for p, child in leaves.items() if is_norm(child) or child in blocks)
    elif _BLOCKS.fullmatch(f"{kind.__module__}.{kind.__name__}"):
        norms = frozenset(path for path, child in leaves.items() if is_norm(child))
        names = _KNOWN_BY_CLASS.get(kind.__name__) or _KNOWN.get(norms, ())
    else:
        return []
    found: Items = []
    for name in names:
        if name == "+" and found:
            found[-1] = found[-1][0], found[-1][1] + 1
        elif leaves.get(name) is not None:
            found.append((name, 0))
        elif name not in module._modules:  # and not an optional one, which is None
            raise ValueError(
                f"convert: {kind.__name__} was registered with {name!r}; accepted: names of its submodules, such as {[*leaves]}"
            )
    return found


def _plan(module: torch.nn.Module, blocks: dict[torch.nn.Module, Items], behind: list[torch.nn.Module]) -> Plan | None:
    inside = set(module.modules())
    following = next((m for m in behind if m not in inside and (m in blocks or is_norm(m))), None)
    targets = [*(module.get_submodule(path) for path, _ in blocks[module]), following]
    steps = []
    for (path, skipped), target in zip([("", 0), *blocks[module]], targets, strict=True):
        norm = _first_norm(target, blocks)
        steps.append((path, skipped, None if norm is None else Successor(norm, norm is target and norm in inside)))
    adds_inputs = all(map(is_norm, _leaves(module).values()))
    return Plan(steps, adds_inputs) if any(successor for *_, successor in steps) else None


def _first_norm(module: torch.nn.Module | None, blocks: dict[torch.nn.Module, Items]) -> torch.nn.Module | None:
    """The norm that gets the input of ``module``."""
    while module is not None and not is_norm(module):
        module = module.get_submodule(blocks[module][0][0]) if module in blocks else None
    return module


def _leaves(module: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """The submodules of a block, also those in its lists, by path."""
    if path and not isinstance(module, LISTS):
        return {path: module}
    children = ((f"{path}.{name}".lstrip("."), child) for name, child in module._modules.items() if child is not None)
    return {at: leaf for place, child in children for at, leaf in _leaves(child, place).items()}
