"""Finds the blocks of a model whose additions can be made by norms (:mod:`.residual`), by running each on a few numbers.

The block's forward runs with small parts in place of its submodules, and every addition is watched: which norm, other submodule or
caller gets the sum? Then it runs with a plan made from that, and without one. Results and gradients must agree.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._derived import base_of
from ._probe import standing_in, values
from ._wrapped import own_class
from .norm import LayerNorm
from .residual import Key, Plan, Run, Submodule, forward, is_list, is_norm, stream_and_branch, submodules
from .stand_in import plain
from .waiting import Successor

_MOST_TRIALS = 81
_LARGEST = 2**24  # elements of a block's own parameters
_PAIRS = (torch.nn.MultiheadAttention, torch.nn.RNNBase)


@dataclass
class Block:
    """Facts about a block's additions, by the path of the submodule that gets the sum."""

    inside: dict[Key, str] = field(default_factory=dict)  # a norm
    passed: dict[Key, str] = field(default_factory=dict)  # another submodule
    returned: Key | None = None  # the addition that makes the block's result
    entry: str | None = None  # the norm that gets the block's input

    def uses(self) -> tuple[int, bool, bool]:
        return len(self.inside) + len(self.passed), self.returned is not None, self.entry is not None

    def __bool__(self) -> bool:
        return any(self.uses())


def fusible(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Plan | None]]:
    """The modules with norms, each with the plan of its additions; ``None`` where there is none to make."""
    order = list(modules)
    blocks: dict[torch.nn.Module, Block | None] = {}
    known: dict[tuple, _Trial | None] = {}
    for module in reversed(order):  # submodules first
        if any(is_norm(child) or blocks.get(child) for _, child in _leaves(module._modules)):
            blocks[module] = _examined(module, known)
    for i, module in enumerate(order):
        if module in blocks:
            yield module, _plan(module, blocks, order[i + 1 :]) or None


def _plan(module: torch.nn.Module, blocks: dict[torch.nn.Module, Block | None], behind: list[torch.nn.Module]) -> Plan:
    block = blocks[module] or Block()
    found: dict[Key, tuple[torch.nn.Module | None, bool]] = {}
    if block.returned:
        inside = set(module.modules())
        following = (m for m in behind if m not in inside and (blocks.get(m) or is_norm(m)))
        found[block.returned] = _first_norm(next(following, None), blocks), False
    for key, path in block.passed.items():
        found[key] = _first_norm(module.get_submodule(path), blocks), False
    for key, path in block.inside.items():
        found[key] = module.get_submodule(path), True
    return {key: Successor(norm, inside) for key, (norm, inside) in found.items() if norm is not None}


def _first_norm(module: torch.nn.Module | None, blocks: dict[torch.nn.Module, Block | None]) -> torch.nn.Module | None:
    """The norm that gets the input of ``module``."""
    if module is None or is_norm(module):
        return module
    block = blocks.get(module)
    return module.get_submodule(block.entry) if block and block.entry else None


def _leaves(modules: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules of a block, also those in its lists, by path."""
    for name, child in modules.items():
        if is_list(child):
            yield from _leaves(child._modules, f"{prefix}{name}.")
        elif child is not None:
            yield prefix + name, child


def _base(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class whose forward says what the module does."""
    kind = own_class(module)
    return base_of(kind) if kind.forward is forward else kind


def _examined(module: torch.nn.Module, known: dict[tuple, _Trial | None]) -> Block | None:
    """Facts about the block ``module``; ``None`` if it does not compute the same when norms make its sums, or does not run.

    Nobody knows how many results a submodule of a foreign class returns, so all small numbers are tried. ``known`` has the trial that
    was best for another block of the same classes.
    """
    kind = _base(module)
    if "forward" in vars(module) or base_of(kind) is not None:
        return None
    leaves = {path: _kind(child) for path, child in _leaves(module._modules)}
    key = kind, module.training, *leaves.items()
    trials = [known[key]] if key in known else _trials(module, kind)
    found = [(block, trial) for trial in trials if trial and (block := _run(module, kind, trial))]
    # The first of several results may be a row of the only one, but not the other way round.
    best = max(found, key=lambda each: (sum(each[1].results.values()), each[0].uses()), default=(None, None))
    known.setdefault(key, best[1])
    return best[0]


@dataclass(frozen=True)
class _Trial:
    results: dict[type, int]  # how many each foreign submodule returns
    count: int  # how many tensors the block takes


def _trials(module: torch.nn.Module, kind: type[torch.nn.Module]) -> list[_Trial]:
    foreign = dict.fromkeys(_kind(child) for _, child in _leaves(module._modules) if _results(child) is None)
    choices = (dict(zip(foreign, chosen, strict=True)) for chosen in itertools.product((1, 2, 3), repeat=len(foreign)))
    return [_Trial(each, n) for each in itertools.islice(choices, _MOST_TRIALS) for n in _counts(kind.forward)]


def _counts(function: Callable) -> list[int]:
    """The numbers of tensors that a block may take."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(p.kind in positional and p.default is p.empty for p in parameters)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return [1, 2] if open_ended and required < 2 else [max(required, 1)]


def _kind(module: torch.nn.Module) -> type[torch.nn.Module]:
    kind = own_class(module)
    return base_of(kind) or kind


def _results(module: torch.nn.Module) -> int | None:
    """The number of results of ``module``, if that is known."""
    if isinstance(module, _PAIRS):
        return 2
    function = getattr(_kind(module), "forward", None)  # a scripted module's class has none
    known = is_norm(module) or isinstance(module, torch.nn.Linear)
    return 1 if known or getattr(function, "__module__", "").startswith("torch.nn.") else None


class _Part(torch.nn.Module):
    """Stands for a submodule: permutes and scales columns, and returns that alone or first of ``count`` results."""

    def __init__(self, module: torch.nn.Module, seed: float, count: int):
        super().__init__()
        vars(self).update(own=module, seed=seed, count=count)  # in no table of modules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        columns = getattr(self.own, "out_features", getattr(self.own, "nf", x.shape[-1]))
        y = x.double()[..., torch.arange(1, columns + 1) % x.shape[-1]] * values(columns, seed=self.seed)
        return y if self.count == 1 else (y, *[None] * (self.count - 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def _parts(modules: dict[str, Any], results: dict[type, int], seeds: Iterator[int]) -> dict[str, Any]:
    found = dict(modules)
    for name, child in modules.items():
        seed = 0.2 + 0.07 * next(seeds)
        if is_list(child):
            found[name] = standing_in(child, _modules=_parts(child._modules, results, seeds))
        elif child is not None and is_norm(child):
            shape = getattr(child, "normalized_shape", None) or child.weight.shape
            found[name] = LayerNorm(shape, device="cpu", dtype=torch.float64)
            found[name].weight.data = values(*shape, seed=seed)
        elif child is not None and not isinstance(child, (torch.nn.ParameterList, torch.nn.ParameterDict)):
            found[name] = _Part(child, seed, _results(child) or results[_kind(child)])
    return found


class _Watch(Run):
    """Records who gets the sums of a block."""

    def __init__(self, adds_inputs: bool):
        super().__init__({})
        self.adds_inputs, self.received, self.sums, self.block = adds_inputs, [], [], Block()

    def receive(self, x: Any) -> Any:
        self.received.append(super().receive(x))
        return self.received[-1]

    def enter(self, submodule: Submodule, args: tuple, kwargs: dict) -> None:
        super().enter(submodule, args, kwargs)
        x = next(iter((*args, *kwargs.values())), None)
        if submodule.is_norm and x is self.received[0]:
            self.block.entry = self.block.entry or submodule.path
        if key := self.key_of(x):
            (self.block.inside if submodule.is_norm else self.block.passed).setdefault(key, submodule.path)

    def add(self, key: Key, one: Tensor, other: Any) -> Any:
        total = super().add(key, one, other)
        if stream_and_branch(one, other):
            self.sums.append((total, key))
        return total

    def key_of(self, x: Any) -> Key | None:
        return next((key for total, key in self.sums if total is x), None)


def _run(module: torch.nn.Module, kind: type[torch.nn.Module], trial: _Trial) -> Block | None:
    try:
        with (
            torch.device("cpu"),
            torch.inference_mode(False),  # also enables gradients
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return _watched(module, kind, trial)
    except Exception:
        return None


def _watched(module: torch.nn.Module, kind: type[torch.nn.Module], trial: _Trial) -> Block | None:
    parts = _parts(module._modules, trial.results, itertools.count())
    leaves = dict(_leaves(parts))
    width = next((part.normalized_shape for part in leaves.values() if is_norm(part)), (4,))
    inputs = tuple(t.requires_grad_() for t in (2 * values(trial.count, 2, 3, *width, seed=0.9)).unbind())
    random, own = torch.get_rng_state(), _own_tensors(module)

    def run(run: Run | None) -> Any:
        torch.set_rng_state(random)
        view = standing_in(module, _modules=parts if run is None else submodules(parts, run), **own)
        result = kind.forward(view, *(inputs if run is None else map(run.receive, inputs)))
        replaced = dict.fromkeys(("_modules", *own))
        if {**vars(view), **replaced} != {**vars(module), **replaced}:
            raise RuntimeError("it writes its own attributes")  # which a copy of it would lose
        return _first(result)

    watch = _Watch(adds_inputs=trial.count > 1)
    watch.block.returned = watch.key_of(run(watch))
    plan = {key: Successor(leaves[path], inside=True) for key, path in watch.block.inside.items()}
    expected, found = run(None), plain(run(Run(plan)))
    if not _close(found, expected) or not all(successor.fetched for successor in plan.values()):
        return None
    of = [*inputs, *(part.weight for part in leaves.values() if is_norm(part))]
    gradients = (
        torch.autograd.grad((y * values(*y.shape, seed=0.6)).sum(), of, allow_unused=True) for y in (expected, found)
    )
    return watch.block if all(map(_close, *gradients)) else None


def _first(result: Any) -> Any:
    return result[0] if type(result) is tuple and result else result


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def _own_tensors(module: torch.nn.Module) -> dict[str, dict[str, Tensor | None]]:
    """Small values for the module's own parameters and buffers, on the CPU."""

    def own(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return None if t is None else t.cpu()
        if t.numel() > _LARGEST:
            raise RuntimeError("it has large parameters")
        return values(*t.shape, seed=0.3)

    return {table: {name: own(t) for name, t in vars(module)[table].items()} for table in ("_parameters", "_buffers")}
