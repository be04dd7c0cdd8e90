"""Interrupts: KeyboardInterrupt or MemoryError before any line of the package, in a call that changes something. Afterwards all is as
before the call or as after it. The call, made once more, and the next step do what they do in a twin."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import amp_kernels as ak

from .fuzz import Draw, main
from .loop import VARIANTS, InterruptAt, Loop, assert_same, flat, is_same

Call = Callable[[], object]


# ---- the calls: each prepares a loop and returns what will be interrupted


def step(loop: Loop, folder: Path) -> Call:
    loop.backward()
    return lambda: loop.scaler.step(loop.optimizer)


def update(loop: Loop, folder: Path) -> Call:
    loop.backward(poison=0)
    loop.scaler.step(loop.optimizer)
    return loop.scaler.update


def load_state_dict(loop: Loop, folder: Path) -> Call:
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    return lambda: loop.optimizer.load_state_dict(saved)


def add_param_group(loop: Loop, folder: Path) -> Call:
    loop.step()
    group = {"params": [torch.nn.Parameter(torch.ones(3, dtype=loop.dtype))]}
    if "algorithm" in loop.optimizer.param_groups[0]:
        group["algorithm"] = "adamw"
    return lambda: loop.optimizer.add_param_group(dict(group))


def write_weights(loop: Loop, folder: Path) -> Call:
    loop.step()
    for param in loop.model.parameters():
        param.data.mul_(2)
    return loop.optimizer.reload_model_params


def save(loop: Loop, folder: Path) -> Call:
    ak.checkpoint.save(folder / "1.pt", **loop.parts)
    loop.step()
    return lambda: ak.checkpoint.save(folder / "2.pt", keep=1, **loop.parts)


def save_over(loop: Loop, folder: Path) -> Call:
    ak.checkpoint.save(folder / "1.pt", **loop.parts)
    loop.step()
    return lambda: ak.checkpoint.save(folder / "1.pt", **loop.parts)


def load(loop: Loop, folder: Path) -> Call:
    ak.checkpoint.save(folder / "1.pt", **loop.parts)
    loop.step()
    return lambda: ak.checkpoint.load(folder / "1.pt", **loop.parts)


def latest(loop: Loop, folder: Path) -> Call:
    for name in ("1.pt", "2.pt"):
        ak.checkpoint.save(folder / name, extra=name)

    def call() -> None:
        assert ak.checkpoint.latest(folder) == folder / "2.pt", "an older file is the latest"

    return call


def convert(loop: Loop, folder: Path) -> Call:
    ak.revert(loop.model)
    return lambda: ak.convert(loop.model)


def revert(loop: Loop, folder: Path) -> Call:
    return lambda: ak.revert(loop.model)


CALLS = [
    step,
    step,
    step,
    update,
    load_state_dict,
    add_param_group,
    write_weights,
    save,
    save_over,
    load,
    latest,
    convert,
    revert,
]
LINES = 6  # of a case
#: These change several objects one by one. Made once more, they end as they would have.
IN_PARTS = {load, convert, revert, save, write_weights}


class World:
    """A loop after so many steps, its folder, and a call of :data:`CALLS` that it is about to make."""

    def __init__(self, prepare: Callable, variant: tuple, taken: int, folder: str):
        self.loop, self.folder = Loop(*variant), Path(folder)
        self.loop.scaler.set_growth_interval(10**6)  # one more update must not change what follows
        for _ in range(taken):
            self.loop.step()
        self.call = prepare(self.loop, self.folder)

    def state(self) -> dict:
        parts = {"model": self.loop.model.state_dict(), "optimizer": self.loop.optimizer.state_dict()}
        counts = self.loop.scaler.state_dict()
        parts["scaler"] = {
            key: counts[key] for key in ("scale", "_hysteresis_tracker", "_skipped_steps", "_consecutive_skips")
        }
        parts["modules"] = [type(module).__name__ for module in self.loop.model.modules()]
        parts["files"] = {path.name: torch.load(path, weights_only=True) for path in self.folder.glob("*.pt")}
        return dict(flat(parts))

    def go_on(self) -> dict:
        """The state after another step, which a program takes that caught the error."""
        torch.manual_seed(1)
        try:
            self.loop.step()
        except RuntimeError as error:
            if "since the last update" not in str(error):
                raise
            self.loop.scaler.update()
            self.loop.update()
        return self.state()


def case(draw: Draw) -> None:
    prepare, variant, taken = draw.choice(CALLS), draw.choice(VARIANTS), draw.choice([0, 1, 3])
    error = draw.choice([KeyboardInterrupt, MemoryError])
    draw.note(prepare.__name__, *variant, f"after {taken} steps", error.__name__)
    with tempfile.TemporaryDirectory() as root:

        def world(name: str) -> World:
            (Path(root) / name).mkdir()
            return World(prepare, variant, taken, f"{root}/{name}")

        without, twin = map(world, ("without", "twin"))
        changes = rests = None  # the states after another step, with the call and without it
        before = without.state()
        assert_same(twin.state(), before)
        with InterruptAt(None) as lines:
            twin.call()
        after = twin.state()
        if prepare is update:
            assert not is_same(before, after), "a skipped step counts"
            for i, line in enumerate(draw.sample(range(lines.count), min(lines.count, 20))):
                draw.note(f"before line {line} of {lines.count}")
                assert_counted_once(world(f"update {i}"), line, error, before, after)
            return
        for i in range(LINES):
            # Loops over parameters have most lines, in few files.
            line = draw.choice(draw.choice([*lines.files.values()]))
            draw.note(f"before line {line} of {lines.count}")
            interrupted = world(f"interrupted {i}")
            with contextlib.suppress(error), InterruptAt(line, error):
                interrupted.call()
            if assert_whole(interrupted, prepare, taken, before, after):
                went = changes = changes or twin.go_on()
            else:
                went = rests = rests or without.go_on()
            assert_same(interrupted.go_on(), went)


def assert_whole(ours: World, prepare: Callable, taken: int, before: dict, after: dict) -> bool:
    """All is as before the call or as after it, which is made once more then. True if it has changed something."""
    now = ours.state()
    changed = is_same(now, after) and not is_same(before, after)
    # The first step makes the state that it will change. Such a state alone changes nothing: the next step says so.
    made = (
        prepare is step
        and not taken
        and all(is_same({k: now[k]}, {k: before[k]}) for k in before if k.startswith(".model"))
    )
    if not (changed or made or prepare in IN_PARTS or is_same(now, before)):
        raise AssertionError(f"between before and after: {', '.join(differences(now, before, after))}")
    if prepare is not step and not (changed and prepare is add_param_group):
        ours.call()
        assert_same(ours.state(), after)
        changed = True
    return changed


def assert_counted_once(world: World, line: int, error: type, before: dict, after: dict) -> None:
    """An update that was interrupted may have lost what the checks found. Once more, it counts no skip a second time."""
    with contextlib.suppress(error), InterruptAt(line, error):
        world.call()
    with contextlib.suppress(AssertionError):  # nothing was checked since an update that came to its end
        world.call()
    now = world.state()
    assert is_same(now, after) or is_same(now, before), f"counts {now['.scaler._skipped_steps']} skips"


def differences(now: dict, before: dict, after: dict) -> list[str]:
    """For each value that the call changes, the words that it is as before, or no longer."""

    def differs(a: dict, b: dict, key: str) -> bool:
        return not is_same(*({key: state[key]} if key in state else {} for state in (a, b)))

    changed = [key for key in before | after if differs(before, after, key)]
    return [f"{key} is {'no longer ' * differs(now, before, key)}as before" for key in changed]


if __name__ == "__main__":
    main(case)
