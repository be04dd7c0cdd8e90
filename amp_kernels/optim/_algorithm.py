"""The algorithm of an optimizer: its op, its state, the meaning of its groups."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from .._raw._block8 import FIRST, SECOND, Code8
from .._sharding.agreement import Agreement
from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateCall, UpdateOp
from .._updates.state import CAUTIOUS
from ._launches import Launch
from ._state import Place

#: Keys of groups that torch's optimizers do not have.
SWITCHES = ("cautious", "decouple_lr")


class Update(NamedTuple):
    """The update of the parameters of one device: the launch, and the arguments of the op."""

    launch: Launch
    arguments: UpdateArguments

    @property
    def table(self) -> Tensor | None:
        """The addresses that replace the lists of tensors, if there are any."""
        return None if self.launch.table is None else self.launch.table.tensor


class Algorithm:
    """The stateless part of an optimizer, which its class chooses; a subclass overrides what differs.

    Args:
        op: the update op.
        shows_step: whether ``state[param]["step"]`` always exists, as in torch's optimizer of the same name.
        required: entries besides the moments that a loaded state must have.
        absent: values of its own group keys that a checkpoint may lack.
        switches: those of :data:`SWITCHES` that a group may turn on.
    """

    exchanges = False  # whether `prepared` exchanges data with ranks that hold other pieces of a parameter

    def __init__(
        self,
        op: UpdateOp,
        *,
        shows_step: bool = True,
        required: Sequence[str] = (),
        absent: dict[str, Any] | None = None,
        switches: Sequence[str] = (),
    ):
        self.op, self.declared = op, op.declared
        self.shows_step, self.absent, self.switches = shows_step, absent or {}, switches
        self.required = {*required} | ({*op.declared.moments} - {*op.declared.optional})

    @property
    def members(self) -> tuple[Algorithm, ...]:
        """All that a group may have."""
        return (self,)

    def of(self, group: dict[str, Any]) -> Algorithm:
        """The member that updates a group."""
        return self

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        """Raise for a group whose numbers are in range and which the optimizer ``name`` still cannot take."""

    def check_param(self, label: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise for a parameter that only this optimizer cannot update."""

    def format_of(self, moment: str) -> Code8:
        """Its format in 8 bits."""
        return SECOND if any(moment in member.declared.unsigned for member in self.members) else FIRST

    def moments(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        """Names of the moments of a parameter of ``group``; ``loaded`` is its state in a checkpoint."""
        return self.declared.moments

    def loaded_step(self, shown: Set[str], values: dict[str, Any]) -> Tensor | float:
        """The step count of a loaded state, ``values``: a tensor, or a number in old checkpoints. ``shown``: names of the state that the
        parameter has now, as in a checkpoint."""
        return values.get("step", 0.0)

    def exported(self, values: dict[str, Any], place: Place | None) -> dict[str, Any]:
        """A parameter's state in a checkpoint; ``place`` is where ``values`` are, unless the user put them there."""
        return values

    def option(self, group: dict[str, Any], name: str) -> float:
        """The group's value of an option of the op, except ``lr``."""
        if name == "weight_decay" and group.get("decouple_lr"):
            return float(group["weight_decay"]) / float(group["initial_lr"])  # the op multiplies it by the rate of now
        return float(group["betas"][int(name[4:]) - 1] if name in ("beta1", "beta2") else group[name])

    def flags(self, group: dict[str, Any]) -> int:
        """The flags of a group that depend on the algorithm."""
        return CAUTIOUS if group.get("cautious") else 0

    def constants(self, group: dict[str, Any]) -> tuple:
        """Further values of a group that a captured step keeps."""
        return ()

    def prepared(self, updates: list[Update], agreement: Agreement, groups: list[dict[str, Any]]) -> list[UpdateCall]:
        """The calls that take the step, device after device; everything that may fail has been done. ``groups`` are all of the
        optimizer's."""
        return [UpdateCall(self.op, update.arguments, update.table) for update in updates]
