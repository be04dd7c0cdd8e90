"""The options that every optimizer of this package takes besides its own."""

import difflib
import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypedDict, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .._checks.stack import users_line
from .._checks.types import check_iterable, type_name
from .._sharding.agreement import check_declared, check_shard_group
from .._updates.state import MAX_SEED


class MixedPrecision(TypedDict, total=False):
    """Options of every optimizer of this package, all by keyword. Each is an attribute of the optimizer, too.

    Args:
        master_weights: where a 16-bit parameter's float32 weight lives: ``"fp32"`` keeps it next to the parameter,
            ``"split"`` keeps the 16 bits that the parameter lacks (2 bytes instead of 4; bfloat16 loses nothing,
            float16 nothing above 2^-17; ties of the weight go away from zero, not to even). ``"split24"`` keeps 8 of
            them, 1 byte, and rounds each updated weight stochastically to these 24 bits: 16 significant bits for
            bfloat16, 19 for float16. ``"none"`` keeps nothing and rounds each updated weight stochastically, so that
            updates too small for 16 bits count on average (Gupta et al., "Deep learning with limited numerical
            precision", ICML 2015); ``"none_rne"`` rounds it to nearest even, as torch's own optimizers do. float32
            parameters are their own masters, whatever is chosen.
        shadow_dtype: ``torch.float16`` or ``torch.bfloat16`` keeps a copy of each float32 parameter, written by the
            step, that :func:`amp_kernels.linear` uses under autocast instead of casting the weight in every forward. Only
            calls that record gradients use it: evaluation casts the weights as they are, also those that weight averaging swapped in.
            After writes through ``.data`` call ``ak.refresh_shadows(model)`` before training goes on.
        state_dtype: of the moments, ``torch.float32``, ``torch.bfloat16`` or ``"8bit"``: a byte an element, and one for each 32,
            rounded stochastically, with floating-point codes in which no second moment becomes 0. Parameters with fewer
            than 4096 elements, and those of which a row (all dimensions but the first) is no multiple of 32 elements, keep
            bfloat16, by their shape before any sharding; the logger ``amp_kernels`` names them at level DEBUG. A group may have
            a ``state_dtype`` of its own, such as float32 for embeddings beside 8 bits; it counts when the state is made or loaded.
        state_device: ``"cpu"`` keeps moments, averages and what parameters lack of their masters in CPU memory, and copies of the
            parameters beside them. Gradients leave the device in buckets, the CPU updates, and the weights return. The norm and the check
            for non-finite gradients are taken before, where the gradients are. It cannot be changed later. Not together with
            ``independent_groups`` or ``spike_zscore``.
        independent_groups: each parameter group, or all groups with the same ``unit`` (a string in the group), is a unit that
            steps as an optimizer of its own, in the launches of one: it has its own norm, clipping, check for non-finite gradients, skip
            and random bits. Groups may then also have a ``max_grad_norm`` and a ``skip_nonfinite``, the same in all groups
            of a unit, as may the options of spikes. A unit without gradients is not stepped.
        max_grad_norm: clip the total L2 norm of all gradients to this in every step, as
            :func:`torch.nn.utils.clip_grad_norm_` would, without writing them. With it, ``scaler.step(opt, max_norm=...)`` is
            refused.
        spike_zscore: a gradient norm so many standard deviations above its average is a spike, by ZClip's rule (arXiv 2504.02507;
            2.5 there); ``None``: none is. The averages are the optimizer's, or each unit's. They count a spike as the border of the
            band, so that a lasting change of level is flagged for some steps only; norms that are not finite do not count.
        spike_decay: of the averages of the norm and its variance, in [0, 1).
        spike_warmup: so many first norms, at least 2, are no spikes and begin the averages.
        spike_action: ``"clip"`` scales a spike into the band, by the square of ``spike_zscore`` over its score; ``"skip"`` skips the step,
            which a scaler does not count as an overflow.
        skip_nonfinite: skip, on the device, a step whose gradients are not all finite; for training without a scaler.
        ema_decay: keep an exponential moving average of each weight (Polyak and Juditsky, 1992), float32 whatever the
            parameter's dtype, in the shape of the parameter: ``ema += (1 - ema_decay) * (weight - ema)`` after every
            step that is not skipped. It starts at the weight when the state is made and is ``state[param]["ema"]``;
            :func:`amp_kernels.fp32_state_dict` exports it. A number in [0, 1), which groups may override and schedulers
            may change; ``None`` keeps none.
        unscale_grads: leave the gradients unscaled, and not clipped, behind a step under a scaler, for what reads them
            then, such as a logger. The pass that checks them writes them too, also in a step that is skipped; so float16
            gradients, which that could flush to 0, are refused.
        zero_grads: set the gradients to 0, in place, after each step, also a skipped one.
        shard_group: the ranks over which the optimizers hold different parameters of one model, which no DTensor shows:
            the process group of FSDP1 or ZeroRedundancyOptimizer, or that of a pipeline's stages. They skip and clip
            alike. Parameters that are DTensors (``fully_shard``, ``parallelize_module``) need none. A group may have a
            ``shard_group`` of its own, for norms and skips: the ranks over which its parameters are distinct besides their
            own mesh, as experts are over ``mesh["ep"].get_group()``; or ``"copies"``: those on other parts of the mesh (without
            a mesh, on the optimizer's ``shard_group``) are the same. It replaces the optimizer's where both have ranks in
            common. Without it the first norm tells copies on parts of a mesh by their weights and gradients, and refuses
            others.
        seed: of stochastic rounding, 0 to 2^63 - 1. The bits of an element depend on the seed, the parameter's number in
            the optimizer, its step count and the element's place in memory: a run that is repeated or resumed rounds
            alike, and so does one on another mesh if each rank's piece is consecutive elements from a multiple of 32 on.
            In the state_dict, and in the groups, where all must have the same: a ``seed`` that a group was given is the optimizer's.

    Raises:
        ValueError: an option is not among those accepted, out of range or NaN.
        TypeError: there is no option of that name.

    Examples:
        >>> options: ak.optim.MixedPrecision = {"master_weights": "none", "zero_grads": True}
        >>> weight = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        >>> optimizer = ak.optim.SGD([weight], lr=2**-12, **options)
        >>> weight.grad = -torch.ones_like(weight)
        >>> optimizer.step()  # up by 2^-7 with probability 2^-5: by 2^-12 on average
        >>> round((weight.data > 1).float().mean().item(), 2)
        0.03
        >>> weight.grad.any().item()
        False
    """

    master_weights: Literal["fp32", "split", "split24", "none", "none_rne"]
    shadow_dtype: torch.dtype | None
    state_dtype: torch.dtype | Literal["8bit"]
    state_device: Literal["cpu"] | None
    independent_groups: bool
    max_grad_norm: float | None
    spike_zscore: float | None
    spike_decay: float
    spike_warmup: int
    spike_action: Literal["clip", "skip"]
    skip_nonfinite: bool
    ema_decay: float | None
    unscale_grads: bool
    zero_grads: bool
    shard_group: ProcessGroup | None
    seed: int


DEFAULTS: MixedPrecision = {
    "master_weights": "fp32",
    "shadow_dtype": None,
    "state_dtype": torch.float32,
    "state_device": None,
    "independent_groups": False,
    "max_grad_norm": None,
    "spike_zscore": None,
    "spike_decay": 0.97,
    "spike_warmup": 25,
    "spike_action": "clip",
    "skip_nonfinite": False,
    "ema_decay": None,
    "unscale_grads": False,
    "zero_grads": False,
    "shard_group": None,
    "seed": 0,
}
GROUP_OPTIONS = (
    "ema_decay",
    "seed",
    "shard_group",
    "state_dtype",
)  # live in the groups, where schedulers and checkpoints find them
SPIKE_OPTIONS = ("spike_zscore", "spike_decay", "spike_warmup", "spike_action")
UNIT_KEYS = ("max_grad_norm", "skip_nonfinite", *SPIKE_OPTIONS)  # of independent groups; the same in all of a unit
_TYPES = MixedPrecision.__annotations__
_MAY_BE_TEXTS = ("params", "adjust_lr_fn", "ns_coefficients")  # arguments that no number stands for
_ACCEPTED = {
    "master_weights": get_args(_TYPES["master_weights"]),
    "shadow_dtype": (None, *HALF_DTYPES),
    "state_dtype": (torch.float32, torch.bfloat16, "8bit"),
    "state_device": (None, "cpu"),
}
#: By ``master_weights``: the dtype in which the optimizer keeps the part of a 16-bit parameter's master that the parameter lacks.
MASTERS = {"fp32": torch.float32, "split": torch.int16, "split24": torch.int8}

Constructor = TypeVar("Constructor", bound=Callable[..., None])
Value = TypeVar("Value")


class Options(SimpleNamespace):
    """The checked options of one optimizer, as :class:`MixedPrecision` names them. All parts of the optimizer read this object."""


def state_dtype_of(group: Mapping[str, Any], options: Options) -> torch.dtype | str:
    """The format of a group's moments."""
    return group.get("state_dtype", options.state_dtype)


def rounds_stochastically(group: Mapping[str, Any], options: Options) -> bool:
    """True if the seed counts in a group."""
    return options.master_weights in ("none", "split24") or state_dtype_of(group, options) == "8bit"


class OptionAttribute(Generic[Value]):
    """An option as an attribute of its optimizer, which has it in ``_options``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Value:
        return self if optimizer is None else getattr(optimizer._options, self._name)  # type: ignore[return-value]

    def __set__(self, optimizer: Any, value: Value) -> None:
        checked = checked_options(type(optimizer).__name__, {**vars(optimizer._options), self._name: value})
        setattr(optimizer._options, self._name, getattr(checked, self._name))


class FixedAttribute(OptionAttribute[Value]):
    """One that cannot be changed later."""

    def __set__(self, optimizer: Any, value: Value) -> None:
        if value != (own := getattr(optimizer._options, self._name)):
            raise ValueError(
                f"{type(optimizer).__name__}: {self._name} is set to {value!r}, and the optimizer was made with {own!r}; accepted: a new "
                "optimizer, which loads state_dict() of this one"
            )


class UnitsAttribute(OptionAttribute[bool]):
    """``independent_groups``: turning it on gives each group the keys that it lacks, and off takes them."""

    def __set__(self, optimizer: Any, value: bool) -> None:
        super().__set__(optimizer, bool(value))
        for group in optimizer.param_groups:
            for key in UNIT_KEYS:
                group.setdefault(key, getattr(optimizer._options, key)) if value else group.pop(key, None)
            if not value:
                group.pop("unit", None)


class GroupOptionAttribute(OptionAttribute[Value]):
    """The same of an option that all groups share and hold: writing it writes the groups, too."""

    def __set__(self, optimizer: Any, value: Value) -> None:
        super().__set__(optimizer, value)
        for group in optimizer.param_groups:
            if self._name in group:
                group[self._name] = value


def takes_options(init: Constructor) -> Constructor:
    """The constructor of an optimizer, which checks its own arguments before torch's constructors do. ``inspect.signature`` and
    ``help`` show the options one by one instead of ``**options``."""
    *own, _ = inspect.signature(init).parameters.values()
    names = [parameter.name for parameter in own]
    betas = next((len(parameter.default) for parameter in own if parameter.name == "betas"), 0)

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _check_arguments(type(args[0]).__name__, {name: given[name] for name in names if name in given}, betas)
        init(*args, **kwargs)

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_TYPES[name])
        for name, default in DEFAULTS.items()
    ]
    checked.__signature__ = inspect.Signature([*own, *shared], return_annotation=None)
    del checked.__annotations__["options"]
    checked.__annotations__ |= _TYPES
    return checked


def _check_arguments(optimizer: str, arguments: Mapping[str, Any], betas: int) -> None:
    """Raise for arguments that torch's constructors would fail on without naming them. ``betas`` are so many numbers."""
    if "params" in arguments:
        check_iterable(
            f"{optimizer}: params",
            arguments["params"],
            "model.parameters(), model.named_parameters(), or a list of groups",
        )
    for name, value in arguments.items():
        if isinstance(value, str) and name not in _MAY_BE_TEXTS:
            raise TypeError(f"{optimizer}: {name} is {value!r}, of type str; accepted: a number")
        if name in ("lr", "eps", "weight_decay", "momentum") and not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{optimizer}: {name} is {value!r}, of type {type_name(value)}; accepted: a number")
    if "betas" in arguments:
        check_betas(optimizer, arguments["betas"], betas)
    if arguments.get("fused") is False:
        warnings.warn(
            f"{optimizer}: fused=False has no effect, because the step is always fused; torch.optim has unfused ones",
            stacklevel=users_line(),
        )


def check_betas(optimizer: str, betas: Any, count: int) -> None:
    """Raise unless ``betas`` are ``count`` numbers, or tensors, which are refused elsewhere."""
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        raise ValueError(f"{optimizer}: betas is {betas!r}; accepted: {count} numbers")
    for i, beta in enumerate(betas):
        if not isinstance(beta, (numbers.Real, Tensor)):
            raise TypeError(f"{optimizer}: betas[{i}] is {beta!r}, of type {type_name(beta)}; accepted: a number")


def checked_options(optimizer: str, options: MixedPrecision) -> Options:
    """The options that were given and the defaults of all others, checked."""
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(
            f"{optimizer} got an unexpected keyword argument {min(unknown)!r}; the options of every optimizer here are "
            f"{', '.join(DEFAULTS)}"
        )
    alone = [name for name in SPIKE_OPTIONS if name in options]
    if alone and "spike_zscore" not in options and not options.get("independent_groups"):
        raise ValueError(
            f"{optimizer}: {alone[0]} is {options[alone[0]]!r}, and there is no spike_zscore; accepted: with one"
        )
    options = {**DEFAULTS, **options}
    for name in _ACCEPTED:
        _check_accepted(optimizer, name, options[name])
    check_shard_group(optimizer, options["shard_group"])
    check_unit_options(optimizer, options)
    check_state_device(optimizer, options)
    check_group_options(optimizer, options)
    for name in ("independent_groups", "skip_nonfinite", "unscale_grads", "zero_grads"):
        options[name] = checked_switch(optimizer, name, options[name])
    return Options(**options)


def checked_switch(optimizer: str, name: str, value: Any) -> bool:
    """Raise for what is not true or false, such as a text; ``None``, 0 and 1 are."""
    if not isinstance(value, (type(None), numbers.Integral, Tensor)) or value not in (None, 0, 1):
        raise TypeError(f"{optimizer}: {name} is {value!r}, of type {type_name(value)}; accepted: True, False")
    return bool(value)


def _check_accepted(optimizer: str, name: str, value: Any) -> None:
    if value not in _ACCEPTED[name]:
        wanted = ", ".join(map(repr, _ACCEPTED[name])).replace("torch.", "")
        raise ValueError(f"{optimizer}: {name} is {value!r}; accepted: {wanted}")


def check_unit(optimizer: str, group: Mapping[str, Any], independent: bool) -> None:
    """Raise for a name of a unit that is none, or that nothing reads."""
    if "unit" in group and not (isinstance(group["unit"], str) and independent):
        raise ValueError(
            f"{optimizer}: unit of a group is {group['unit']!r}, and independent_groups is {independent}; accepted: a string, with "
            "independent_groups=True"
        )


def check_unit_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise if an option of the decision about a norm is not acceptable. ``options`` has all of :data:`UNIT_KEYS`."""
    checked_switch(optimizer, "skip_nonfinite", options["skip_nonfinite"])
    if options["max_grad_norm"] is not None:
        lists.check_number(optimizer, "max_grad_norm", options["max_grad_norm"], 0.0)
    zscore, decay, warmup, action = (options[name] for name in SPIKE_OPTIONS)
    if zscore is not None and not (isinstance(zscore, numbers.Real) and 0.0 < zscore < math.inf):
        raise ValueError(f"{optimizer}: spike_zscore is {zscore!r}; accepted: None, a finite number above 0")
    if not (isinstance(decay, numbers.Real) and 0.0 <= decay < 1.0):
        raise ValueError(f"{optimizer}: spike_decay is {decay!r}; accepted: a number from 0 to below 1")
    if not isinstance(warmup, int) or warmup < 2:
        raise ValueError(f"{optimizer}: spike_warmup is {warmup!r}; accepted: an integer of at least 2")
    if action not in ("clip", "skip"):
        raise ValueError(f"{optimizer}: spike_action is {action!r}; accepted: 'clip', 'skip'")


def check_state_device(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise for what judges norms by state of its own together with state in host memory."""
    for name in ("independent_groups", "spike_zscore"):
        if options["state_device"] is not None and options[name] not in (None, False):
            raise ValueError(
                f"{optimizer}: {name} is {options[name]!r} and state_device is {options['state_device']!r}; accepted: one of them"
            )


def check_group_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise if an option that groups may set apart is not acceptable."""
    decay, seed = options.get("ema_decay"), options.get("seed", 0)
    if decay is not None:
        if isinstance(decay, Tensor):
            raise ValueError(f"{optimizer}: ema_decay is a tensor; accepted: a number (only lr may be a tensor)")
        if not isinstance(decay, numbers.Real):
            shown = f"{decay!r}, of type {type_name(decay)}"
            raise TypeError(f"{optimizer}: ema_decay is {shown}; accepted: None, a number from 0 to below 1")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"{optimizer}: ema_decay is {decay}; accepted: None, a number from 0 to below 1")
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{optimizer}: seed is {seed!r}; accepted: an integer from 0 to 2**63 - 1")
    if "state_dtype" in options:
        _check_accepted(optimizer, "state_dtype", options["state_dtype"])
    check_declared(optimizer, options)


def misspelt(key: str, options: Iterable[str]) -> str | None:
    """The option that ``key`` misspells, if it does: the same letters and digits in either case, or a similar long name.

    Groups hold keys of other libraries, too. A short name has too many neighbours (``etas`` is an option of Rprop), and an option
    with further words (``no_weight_decay``, ``max_momentum``, ``lr_scale``) is a name of its own.
    """
    options = list(options)
    letters = _letters(key)
    same = [option for option in options if _letters(option) == letters]
    if same:
        return same[0]
    if any(f"_{option}_" in f"_{key.lower()}_" for option in options):
        return None
    similar = difflib.get_close_matches(
        key.lower(), [option for option in options if len(option) >= 7], n=1, cutoff=0.85
    )
    return similar[0] if similar else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
