"""A small training loop with everything in it that has state: dropout, a scaler that skips, a schedule, shuffled data."""

import functools
import sys
from collections import defaultdict
from pathlib import Path

import torch

import amp_kernels as ak

from ..helpers.bits import assert_same_bits
from ..helpers.generators import normal
from ..optim.optimizers import make as make_optimizer

#: Optimizers and where their weights live: (name, dtype of the parameters, options).
VARIANTS = [
    ("AdamW", torch.float32, {"shadow_dtype": torch.float16, "ema_decay": 0.9}),
    ("AdamW", torch.bfloat16, {"master_weights": "split", "amsgrad": True}),
    ("Adam", torch.float16, {"master_weights": "fp32", "state_dtype": torch.bfloat16}),
    ("SGD", torch.float16, {"master_weights": "split", "momentum": 0.9}),
    ("SGD", torch.bfloat16, {"master_weights": "none_rne"}),
    ("Lion", torch.bfloat16, {"master_weights": "none", "seed": 7}),
    ("Muon", torch.bfloat16, {"master_weights": "split", "nesterov": False}),
    ("LAMB", torch.float32, {"max_grad_norm": 0.1}),
]
IDS = [f"{name}-{str(dtype)[6:]}" for name, dtype, _ in VARIANTS]


class Sampler:
    """Shuffles 32 rows anew each epoch and knows where it is."""

    def __init__(self, seed=0):
        self.seed, self.position = seed, 0

    def next(self, count=4):
        epoch, begin = divmod(self.position, 32)
        self.position += count
        return torch.randperm(32, generator=torch.Generator().manual_seed(self.seed + epoch))[begin : begin + count]

    def state_dict(self):
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state):
        self.seed, self.position = state["seed"], state["position"]


class Loop:
    """``loop.step()`` trains for a step; :attr:`parts` are the arguments of ``ak.checkpoint``."""

    def __init__(self, name="AdamW", dtype=torch.float32, options=None, seed=0, optimizer=None):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        self.dtype = dtype
        self.model = ak.convert(torch.nn.Sequential(*layers).to(dtype))
        self.inputs = normal(32, 6, seed=99)
        make = optimizer or functools.partial(make_optimizer, name)
        self.optimizer = make(self.model.parameters(), lr=0.03, **options or {})
        self.scaler = ak.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, hysteresis=2)
        schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)
        self.scheduler = ak.amp.SkipAwareScheduler(schedule, self.scaler)
        self.sampler = Sampler(seed)
        self.losses = []

    @property
    def parts(self):
        named = "model", "optimizer", "scaler", "scheduler"
        return {name: getattr(self, name) for name in named} | {"data": self.sampler}

    def backward(self, poison=None):
        """Up to the gradients; those of the parameter numbered ``poison`` become infinite."""
        self.optimizer.zero_grad()
        x = self.inputs[self.sampler.next()].to(self.dtype)
        loss = (self.model(x).float() - x.float().sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss).backward()
        if poison is not None:
            list(self.model.parameters())[poison].grad.view(-1)[0] = torch.inf
        self.losses.append(loss.item())

    def update(self, **step):
        self.scaler.step(self.optimizer, **step)
        self.scaler.update()
        self.scheduler.step()

    def step(self, poison=None):
        self.backward(poison)
        self.update()

    def state(self):
        """Everything the next step depends on, copied: values by their names."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return dict(flat({"losses": self.losses, "random": torch.get_rng_state(), **states}))


def flat(value, name=""):
    if isinstance(value, dict):
        for key in value:
            yield from flat(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from flat(entry, f"{name}[{i}]")
    else:
        yield name, value.clone() if isinstance(value, torch.Tensor) else value


def assert_same(state, expected):
    """Two of :meth:`Loop.state` agree in every bit."""
    assert state.keys() == expected.keys(), f"of one alone: {sorted(state.keys() ^ expected.keys())}"
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(state[name], torch.Tensor), name
            assert_same_bits(state[name], value, name)
        else:
            assert state[name] == value or (value != value and state[name] != state[name]), name


def is_same(state, expected):
    try:
        assert_same(state, expected)
    except AssertionError:
        return False
    return True


class InterruptAt:
    """Raises ``error``, by default as Ctrl-C does, before the line number ``at`` that Python runs of this package; ``None`` counts only.
    Afterwards :attr:`count` is the number of lines, and :attr:`files` has the numbers of the lines of each file."""

    PACKAGE = str(Path(ak.__file__).parent)

    def __init__(self, at, error=KeyboardInterrupt):
        self.at, self.error, self.count = at, error, 0
        self.files = defaultdict(list)

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.PACKAGE):
            return None
        if event == "line":
            self.files[frame.f_code.co_filename].append(self.count)
            self.count += 1
            if self.at is not None and self.count > self.at:
                raise self.error
        return self
