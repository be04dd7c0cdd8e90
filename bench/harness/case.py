"""A case is one op at one shape and dtype, a provider one implementation of it (torch, amp_kernels, a peer)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = list[torch.Tensor]
Call = Callable[[], dict[str, Any]]
Prepare = Callable[[Any], Call]


@dataclass(frozen=True)
class Scope:
    """Limits of a run, which each benchmark fits its cases to; `memory` is in bytes. `product` (M, N, K) and `layout` are of the
    one matrix product that is asked for, `dtype` the text that a case's dtype contains."""

    device: torch.device
    quick: bool = False
    memory: float = float("inf")
    product: tuple[int, int, int] | None = None
    layout: str = ""
    dtype: str = ""

    def pick(self, cuda: Any, cpu: Any, quick_cpu: Any) -> Any:
        """The sizes for this device."""
        return cuda if self.device.type == "cuda" else quick_cpu if self.quick else cpu

    def dtypes(self, *names: Any, quick: int = 1) -> tuple:
        """The names; of a quick run that asks for no dtype the first ones."""
        return names[:quick] if self.quick and not self.dtype else names


class WithFacts:
    """A call with more columns for its row: `facts()` is called after it."""

    def __init__(self, call: Call, facts: Callable[[], dict[str, Any]]):
        self.call, self.facts = call, facts

    def __call__(self) -> dict[str, Any]:
        return self.call()


@dataclass
class Case:
    """One op at one shape and dtype.

    `inputs(generator)` draws fresh inputs. `providers[name](inputs)` prepares a call without arguments that returns
    its results by name, each a tensor or a list (an in-place op returns what it changed); speed-ups refer to the
    first provider. `reference(inputs)`, computed before the call, gives for each name the values in float64 and the
    largest accepted relative error. A provider may leave out a result that it keeps in another form, but not the
    first. `bytes` and `flops` count the least that must be moved and computed; `written` of the bytes are written (None:
    half, as in a copy). `families` are the groups whose geometric means the tables show; `memory` is what the case needs on the
    device, where that is much.
    """

    op: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    inputs: Callable[[torch.Generator], Any]
    providers: dict[str, Prepare]
    reference: Callable[[Any], dict[str, tuple[Any, float]]]
    host_time: bool = False
    check_calls: int = 1  # the check runs the call so often; state that only a second step reads needs two
    backends: dict[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    written: int | None = None
    memory: int = 0
    sets: int | None = None  # input sets to rotate among; None: as many as defeat the L2 cache
    goal: float | None = None  # the speed-up that this package is to reach
    kernels: bool = False  # record the names of the kernels that each provider runs

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"
