"""``convert`` puts this package's modules into an existing model; ``revert`` takes them out again."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TypeVar

import torch

from .._checks.modules import check_module
from .._checks.types import check_iterable, type_name
from .._sharding.dtensor import is_dtensor
from . import activation, conv1d, copied_norm, experts, fused, head_loss, residual, residual_blocks, rotary, waiting
from ._derived import base_of, derived, forward_of
from ._wrapped import own_class, wrapped_as
from .cross_entropy import CrossEntropyLoss
from .embedding import Embedding
from .linear import Linear
from .linear_cross_entropy import LinearCrossEntropyLoss
from .mlp import MLP
from .norm import LayerNorm, RMSNorm

logger = logging.getLogger("amp_kernels")

Model = TypeVar("Model", bound=torch.nn.Module)

#: The replacement of each class. It has the same attributes and parameters, and adds only class-level defaults.
REPLACEMENTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.CrossEntropyLoss: CrossEntropyLoss,
    torch.nn.Embedding: Embedding,
    torch.nn.Linear: Linear,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
}
if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # from torch 2.13 on
    REPLACEMENTS[torch.nn.LinearCrossEntropyLoss] = LinearCrossEntropyLoss


def convert(
    model: Model,
    *,
    skip: Iterable[str | type] = (),
    report: bool | Callable[[str, str], None] = False,
    fuse_residuals: bool = False,
    fuse_loss: bool = False,
    fuse_rotary: bool = False,
    recompute_mlp: bool = False,
) -> Model:
    """Replace the Linear, LayerNorm, RMSNorm, Embedding, CrossEntropyLoss and LinearCrossEntropyLoss modules of ``model``, including
    itself, with those of :mod:`amp_kernels.nn`, in place; also their equivalents in Hugging Face's model files.

    Each module stays the same object and only changes its class. So names, parameters (also tied ones), hooks, training flag,
    state_dict, optimizers and references held elsewhere remain valid. Call :func:`revert` before tools that look for torch's
    exact classes, such as ``torch.ao.quantization.quantize_dynamic`` and ``torch.fx.symbolic_trace``, whose graph may be converted.

    Hugging Face's ``Conv1D``, activations and RMSNorms of any name (LlamaRMSNorm, T5LayerNorm, ...) are recognised without
    importing transformers. RMSNorms and activations run once on a few numbers to identify their formula.

    A linear layer, its activation and the next linear layer run as one fused op (:func:`amp_kernels.mlp`) inside an
    ``nn.Sequential`` and inside feed-forward blocks like those of GPT-2, Llama, BERT, T5 and ViT. Only the container changes.
    Each call fuses the modules that have no hooks and were not replaced, parametrised or pruned.

    The experts of a mixture that Hugging Face's model files keep in two parameters of three dimensions (Mixtral, Qwen-MoE, OLMoE and
    others with silu) run as two grouped products (:func:`amp_kernels.grouped_mm`), whatever experts implementation the configuration
    names. Their tokens are sorted on the device, so no host sync is left.

    ``fuse_residuals`` saves what blocks add and copy between layers. A norm also makes the addition in front of it: ``norm(residual +
    branch)`` is one kernel forward and one backward. The norm may belong to the module that adds, be the first of a submodule or of
    the next block, or the last of the model. This covers the blocks of transformers (GPT-2, Llama, BERT, T5, ViT and others),
    torchvision and timm that name their norms like these, torch.nn's Transformer layers, and classes that were given to
    :func:`amp_kernels.nn.register_block`; any other module stays as it is. The block's own forward runs. Additions between blocks stay
    torch's under activation checkpointing, and all do on sharded parameters and in torch.inference_mode. Results have the bits of the
    separate addition, and gradients too, except that the gradient of a 16-bit residual stream is rounded once less. torch.compile
    fuses additions by itself, so the option is for eager training.

    With ``fuse_loss`` a causal language model of transformers (GPT2LMHeadModel, LlamaForCausalLM, ...) computes its head and its loss
    by :func:`amp_kernels.linear_cross_entropy` when it is called with ``labels=`` in training mode. The logits of all tokens never
    exist, and a use of the output's ``logits`` raises an error that says so. A model is recognised by running its forward on a few
    numbers; one that changes its logits before the loss (Gemma 2) stays as it is. The model's own forward runs in evaluation, in
    torch.compile, with ``return_dict=False``, with a loss function set by the user, and while the head has hooks, was replaced or is a
    DTensor.

    With ``fuse_rotary`` the attention of transformers' models (Llama, Mistral, Qwen3, Phi, Cohere and others in a table of model files)
    turns queries and keys by :func:`amp_kernels.rotary`: one kernel forward and one backward. The function ``apply_rotary_pos_emb`` of
    the model file is replaced, until :func:`revert`, by one that calls it except in converted attention: other models of the file in
    the process keep their bits. Results are rounded once, where the model's own operations round each product and sum. torch.compile
    fuses these operations by itself.

    With ``recompute_mlp`` the pairs of linear layers that run as :func:`amp_kernels.mlp` save no activation, and so do modules of
    :class:`amp_kernels.nn.MLP`: 2 bytes less for each token and hidden feature, made again in backward (``recompute`` there). Gated
    blocks like Llama's have no such pair.

    ``fully_shard`` and ``replicate`` may be called before or after. Wrapped modules stay wrapped, also after :func:`revert`.
    They get hooks, so a layer that is wrapped alone runs unfused; wrap the block around it instead.

    These modules are not replaced:

    - other subclasses, which may override forward; modules whose forward was replaced on the instance;
    - norms with another formula (Gemma's adds one to its weight);
    - modules whose weight is not a plain parameter or a DTensor (parametrised, pruned, quantised, sparse);
    - modules that torch.jit has compiled;
    - standalone activations, for which torch's kernels are already as good.

    The logger ``amp_kernels`` reports replaced and other modules by class in one INFO line, and by module in DEBUG lines; it
    warns if no module of the model is replaced, of an option that no module fits, and of attention with a rotary embedding whose model
    file is not in the table. A second call changes nothing.

    Args:
        model: any module.
        skip: names of modules or classes to leave unchanged. A name includes everything inside that module, even if it is also
            used elsewhere in the model.
        report: also print a line for each replaced module, and for each other module with parameters, with the reason. A function is
            given the two parts of each line, the module and what becomes of it, in place of a print.
        fuse_residuals: let norms make the additions in front of them.
        fuse_loss: let causal language models compute head and loss as one op in training.
        fuse_rotary: let attention turn queries and keys as one op.
        recompute_mlp: let backward make the activations of feed-forward blocks again.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module or is a scripted one, or an entry of ``skip`` is neither a name nor a class.
        ValueError: ``model`` has no module of a name in ``skip``, or a registered block no norm of a given name. The model is unchanged
            in all cases.

    Examples:
        >>> layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        >>> model = ak.convert(torch.nn.Sequential(*layers), skip=["2"])
        >>> [type(module) for module in model]
        [<class 'amp_kernels.nn.linear.Linear'>, <class 'amp_kernels.nn.norm.LayerNorm'>, <class 'torch.nn.modules.linear.Linear'>]
    """
    check_module("convert", model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "convert: model is a torch.jit.ScriptModule, whose code is fixed; accepted: the model before scripting"
        )
    modules = list(model.named_modules())
    named, classes = _skipped(model, skip)
    skipped = {inside for module in named for inside in module.modules()}
    skipped |= {module for _, module in modules if isinstance(module, classes) or _scripted(module)}
    changes = _Changes(report)
    with changes.all_or_none():
        _convert(modules, skipped, changes)
        fused_modules = {
            "fuse_residuals": _fuse_residuals(modules, skipped, changes) if fuse_residuals else None,
            "fuse_loss": _fuse(modules, skipped, changes, head_loss) if fuse_loss else None,
            "fuse_rotary": _fuse(modules, skipped, changes, rotary) if fuse_rotary else None,
            "recompute_mlp": _recompute(modules, skipped) if recompute_mlp else None,
        }
    changes.summarise()
    package = __name__.partition(".")[0] + "."
    if not any(each.__module__.startswith(package) for _, module in modules for each in type(module).__mro__):
        left = _counted(changes.left)
        logger.warning("convert: nothing in the model (%s) is replaced; left alone: %s", type(model).__name__, left)
    for option, count in fused_modules.items():
        if count == 0:
            hint = _HINTS.get(option, "")
            kind = type(model).__name__
            logger.warning(
                "convert: %s=True changes nothing: the model (%s) has no module for it%s", option, kind, hint
            )
    left = {own_class(module) for _, module in modules if module not in skipped and rotary.is_attention(module)}
    for kind in left if fuse_rotary else ():
        file = kind.forward.__module__
        logger.warning("convert: fuse_rotary=True leaves %s: %s is not in the table of files", kind.__name__, file)
    return model


_HINTS = {"fuse_residuals": "; amp_kernels.nn.register_block names a block's class"}


def _convert(modules: list[tuple[str, torch.nn.Module]], skipped: set[torch.nn.Module], changes: _Changes) -> None:
    for name, module in modules:
        if module in skipped:
            changes.leave(name, module, "torch.jit has compiled it" if _scripted(module) else "skip names it")
            continue
        replacement = _replacement(module)
        reason = _why_not(module) if replacement else _unknown(module)
        if reason is not None:
            changes.leave(name, module, reason)
        elif replacement is not None:
            changes.replace(name, module, replacement)
    for name, module in modules:  # containers, after the layers inside them
        found = None if module in skipped or base_of(own_class(module)) else fused.fusible(module, skipped.__contains__)
        if found:
            forward, activations = found
            changes.replace(name, module, derived(own_class(module), forward))
            for each in activations:
                if base_of(type(each)) is None:
                    changes.give(each, derived(type(each), activation.FORWARDS[activation.recognised(each)]))


def _fuse_residuals(
    modules: list[tuple[str, torch.nn.Module]], skipped: set[torch.nn.Module], changes: _Changes
) -> int:
    """The number of blocks."""
    names = {module: name for name, module in modules if module not in skipped}
    count = 0
    for module, plan in residual_blocks.fusible(names):
        kind = own_class(module)
        if plan is None:
            name = names[module] or "the model"
            logger.debug("convert: %s (%s) keeps its additions: its class is not known", name, kind.__name__)
            continue
        if base_of(kind) is None:
            changes.replace(names[module], module, derived(kind, residual.forward))
        vars(module)[residual.PLAN] = plan
        count += 1
    return count


def _fuse(
    modules: list[tuple[str, torch.nn.Module]], skipped: set[torch.nn.Module], changes: _Changes, fusion: ModuleType
) -> int:
    """Give each module that ``fusion`` (:mod:`.head_loss` or :mod:`.rotary`) knows its forward; the number of those that have it."""
    count = 0
    for name, module in modules:
        if module not in skipped and fusion.fusible(module):
            changes.replace(name, module, derived(own_class(module), fusion.forward))
        count += forward_of(own_class(module)) is fusion.forward
    return count


def _recompute(modules: list[tuple[str, torch.nn.Module]], skipped: set[torch.nn.Module]) -> int:
    """The number of modules that save no activation from now on."""
    count = 0
    for _, module in modules:
        if module in skipped:
            continue
        if isinstance(module, MLP):
            module.recompute = True
            count += 1
        elif forward_of(own_class(module)) in (fused.sequential, fused.feed_forward):
            vars(module)[fused.RECOMPUTE] = True
            count += 1
    return count


def revert(model: Model) -> Model:
    """Undo :func:`convert`: give this package's modules in ``model`` their classes of torch or transformers back, in place.

    Two kinds of modules stay unchanged, each with a DEBUG line of the logger ``amp_kernels``: subclasses, among them those that torch
    makes of modules that are parametrised after ``convert``, and modules with features that torch's lack (a Linear with an
    activation, a CrossEntropyLoss with z_loss). A CrossEntropyLoss with ``inplace=True`` no longer overwrites the logits.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.

    Examples:
        >>> model = ak.convert(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)))
        >>> [type(module).__module__ for module in ak.revert(model)]
        ['torch.nn.modules.linear', 'torch.nn.modules.normalization']
    """
    originals = {ours: theirs for theirs, ours in REPLACEMENTS.items()}
    check_module("revert", model)
    for name, module in model.named_modules():
        kind = own_class(module)
        base = base_of(kind)
        original = base or originals.get(kind)
        if original is None:
            if hasattr(kind, "_amp_kernels_base") or isinstance(module, tuple(originals)):
                logger.debug("revert: %s (%s) is left alone: it is a subclass", name or "the model", kind.__name__)
            continue
        more = None if base else next((name for name in ("activation", "z_loss") if getattr(module, name, None)), None)
        if more:
            logger.debug("revert: %s (%s) is left alone: it has %s", name or "the model", kind.__name__, more)
        else:
            for name in (residual.PLAN, waiting.NAME, fused.RECOMPUTE):
                vars(module).pop(name, None)
            if forward_of(kind) is rotary.forward:
                rotary.restore(original)
            module.__class__ = wrapped_as(module, original)
    return model


def _skipped(model: torch.nn.Module, skip: Iterable[str | type]) -> tuple[list[torch.nn.Module], tuple[type, ...]]:
    """The modules named in ``skip``, and the classes in it."""
    named = []
    skip = [skip] if isinstance(skip, (str, type)) else skip
    check_iterable("convert: skip", skip, "names of modules, classes")
    skip = list(skip)
    for entry in skip:
        if not isinstance(entry, (str, type)):
            raise TypeError(
                f"convert: skip holds {entry!r}, of type {type_name(entry)}; accepted: names of modules, classes"
            )
        if isinstance(entry, str):
            try:
                named.append(model.get_submodule(entry))  # named_modules() has only the first of several names
            except AttributeError:
                raise ValueError(
                    f"convert: skip holds {entry!r}; accepted: names of modules, as model.named_modules() has them"
                ) from None
    return named, tuple(entry for entry in skip if isinstance(entry, type))


class _Changes:
    """Applies, counts, logs and prints changes of modules."""

    def __init__(self, report: bool | Callable[[str, str], None]):
        if not (isinstance(report, bool) or callable(report)):
            raise TypeError(
                f"convert: report is {report!r}; accepted: True, False, a function of a module's name and its fate"
            )
        self.report = print if report is True else report
        self.replaced, self.left = Counter(), Counter()
        self._before: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Restore the model after an error, for example one raised by a module's own attribute."""
        try:
            yield
        except BaseException:
            for module, kind in reversed(self._before):
                module.__class__ = kind
            raise

    def give(self, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
        before = type(module)
        module.__class__ = wrapped_as(module, kind)
        self._before.append((module, before))

    def replace(self, name: str, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
        self.replaced[type(module).__name__] += 1
        self.give(module, kind)
        self._tell(name or "the model", f"is now {kind.__module__}.{kind.__qualname__}")

    def leave(self, name: str, module: torch.nn.Module, reason: str) -> None:
        self.left[type(module).__name__] += 1
        self._tell(f"{name or 'the model'} ({type(module).__name__})", f"is left alone: {reason}")

    def _tell(self, module: str, fate: str) -> None:
        logger.debug("convert: %s %s", module, fate)
        if self.report:
            self.report(module, fate)

    def summarise(self) -> None:
        if self.replaced or self.left:
            logger.info("convert: replaced %s; left alone %s", _counted(self.replaced), _counted(self.left))


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "nothing"


def _replacement(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class that replaces that of ``module``, or ``None``."""
    kind = own_class(module)
    if kind in REPLACEMENTS or base_of(kind):
        return REPLACEMENTS.get(kind)
    if conv1d.is_conv1d(kind):
        return derived(kind, conv1d.forward)
    if copied_norm.is_rms_norm(module):
        return derived(kind, copied_norm.forward)
    if experts.recognised(module):
        return derived(kind, experts.forward)
    name = activation.recognised(module) if activation.of_transformers(kind) else None
    return derived(kind, activation.FORWARDS[name]) if name else None


def _unknown(module: torch.nn.Module) -> str | None:
    """The reason why a module without a replacement is not replaced; ``None`` if there is nothing to report."""
    kind = own_class(module)
    if kind in REPLACEMENTS.values() or base_of(kind):
        return None
    base = next((known for known in REPLACEMENTS if isinstance(module, known)), None)
    if base:
        return f"it is a subclass of {base.__name__} and may override forward"
    if copied_norm.looks_like_rms_norm(module):
        return "it does not compute RMSNorm's formula"
    return "there is no replacement for it" if module._parameters else None


def _scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _why_not(module: torch.nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if isinstance(module, torch.nn.modules.loss._Loss):  # has no parameters of its own
        return None
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name, module)
        if parameter is module and not hasattr(module, name):  # an RMSNorm has no bias, an activation has neither
            continue
        if parameter is module:
            return f"its {name} is not a parameter of its own (parametrised or pruned)"
        if parameter is not None and type(parameter) is not torch.nn.Parameter and not is_dtensor(parameter):
            return f"its {name} has type {type_name(parameter)}"
        if parameter is not None and parameter.layout != torch.strided:
            return f"its {name} has layout {parameter.layout}"
        if parameter is not None and not parameter.is_floating_point():
            return f"its {name} has dtype {parameter.dtype}"
    return None
