"""The calls of a training loop in any order, held against the contract in plain floats (contract.py)."""

import copy
import math

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402

import amp_kernels as ak  # noqa: E402

from ..helpers.generators import normal  # noqa: E402
from . import contract  # noqa: E402

SIZES = (2, 1)  # of the tensors of each optimizer
COUNT = sum(SIZES)
GRADS = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=COUNT, max_size=COUNT)
POISON = st.sampled_from([None] * 5 + [math.nan, math.inf, -math.inf])
WHICH = st.integers(0, 1)
MAX_NORM = st.sampled_from([None, 0.5, 4.0, 0.0])
RULES = st.builds(
    contract.Rules,
    growth_interval=st.integers(1, 3),
    min_scale=st.sampled_from([0.0, 16.0]),
    max_scale=st.sampled_from([128.0, 2.0**20]),
    hysteresis=st.integers(1, 3),
    consecutive_hysteresis=st.booleans(),
)


class Loop(RuleBasedStateMachine):
    """``self.model`` is the contract, everything else the real thing: an SGD and an AdamW under one scaler."""

    @initialize(rules=RULES, seed=st.integers(0, 3), options=st.sampled_from([{}, {"shadow_dtype": torch.float16}]))
    def start(self, rules, seed, options):
        weights = normal(2, COUNT, seed=seed)
        self.params = [[torch.nn.Parameter(piece.clone()) for piece in row.split(SIZES)] for row in weights]
        self.options = options
        models = [contract.Optimizer(bool(i), row.double().tolist()) for i, row in enumerate(weights)]
        self.model = contract.Scaler(rules, models)
        self.optimizers = [self.make(0), self.make(1)]
        self.scaler = ak.GradScaler("cpu", init_scale=self.model.scale, **vars(rules))
        self.scaler.scale(torch.ones(()))

    def make(self, which):
        if which:
            betas, eps = contract.Optimizer.BETAS, contract.Optimizer.EPS
            return ak.optim.AdamW(self.params[1], lr=0.125, betas=betas, eps=eps, weight_decay=0.0, **self.options)
        return ak.optim.SGD(self.params[0], lr=0.125, momentum=contract.Optimizer.MOMENTUM, **self.options)

    def both(self, expected, actual):
        """The same call of both: both refuse it, or none does."""
        try:
            expected()
        except contract.Refused:
            with pytest.raises((RuntimeError, AssertionError)):
                actual()
        else:
            actual()

    @rule(first=st.none() | GRADS, second=st.none() | GRADS, poison=POISON, where=st.integers(0, COUNT - 1))
    def backward(self, first, second, poison, where):
        grads = [first and list(first), second and list(second)]
        for grad in grads:
            if grad and poison is not None:
                grad[where] = poison
        terms = [
            (param * piece).sum()
            for params, grad in zip(self.params, grads, strict=True)
            if grad
            for param, piece in zip(params, torch.tensor(grad).split(SIZES), strict=True)
        ]
        self.model.backward(grads)
        if terms:
            self.scaler.scale(torch.stack(terms).sum()).backward()
        else:
            self.scaler.scale(torch.ones((), requires_grad=True)).backward()

    @rule(which=WHICH)
    def unscale(self, which):
        optimizer = self.optimizers[which]
        self.both(lambda: self.model.unscale(self.model.optimizers[which]), lambda: self.scaler.unscale_(optimizer))

    @rule(which=WHICH, max_norm=st.sampled_from([0.5, 4.0]))
    def clip(self, which, max_norm):
        model = self.model.optimizers[which]
        if model.grads is not None:
            model.grads = model.clip(model.grads, max_norm)
        torch.nn.utils.clip_grad_norm_(self.params[which], max_norm)

    @rule(which=WHICH, max_norm=MAX_NORM)
    def step(self, which, max_norm):
        model, optimizer = self.model.optimizers[which], self.optimizers[which]
        self.both(lambda: self.model.step(model, max_norm), lambda: self.scaler.step(optimizer, max_norm=max_norm))

    @rule(new_scale=st.sampled_from([None] * 6 + [32.0]))
    def update(self, new_scale):
        self.both(lambda: self.model.update(new_scale), lambda: self.scaler.update(new_scale))

    @rule(which=WHICH, grads=GRADS, poison=POISON, more=st.integers(2, 4))
    def iterations(self, which, grads, poison, more):
        """Usual ones, of which only the first may overflow: any order alone seldom takes a step."""
        for value in [poison, *[None] * more]:
            self.zero_grad(0, True)
            self.zero_grad(1, True)
            self.backward(grads if which == 0 else None, grads if which else None, value, 0)
            self.step(which, None)
            self.update(None)

    @rule(which=WHICH, to_none=st.booleans())
    def zero_grad(self, which, to_none):
        model = self.model.optimizers[which]
        model.grads = None if to_none or model.grads is None else [0.0] * COUNT
        self.optimizers[which].zero_grad(set_to_none=to_none)

    @rule(which=WHICH, lr=st.sampled_from([0.0, 0.125, 0.5]), weight_decay=st.sampled_from([0.0, 0.125]))
    def edit(self, which, lr, weight_decay):
        model = self.model.optimizers[which]
        model.lr, model.weight_decay = lr, weight_decay
        self.optimizers[which].param_groups[0].update(lr=lr, weight_decay=weight_decay)

    @precondition(lambda self: all(model.stage == "ready" for model in self.model.optimizers))
    @rule(which=WHICH)
    def save_and_load(self, which):
        saved = copy.deepcopy(self.optimizers[which].state_dict())
        self.optimizers[which] = self.make(which)
        self.optimizers[which].load_state_dict(saved)
        state, self.scaler = self.scaler.state_dict(), ak.GradScaler("cpu")
        self.scaler.load_state_dict(state)
        self.scaler.scale(torch.ones(()))

    @invariant()
    def agree(self):
        if not hasattr(self, "model"):
            return
        state = self.scaler.state_dict()
        counted = (
            state["_growth_tracker"],
            state["_hysteresis_tracker"],
            state["_skipped_steps"],
            state["_consecutive_skips"],
        )
        model = self.model
        assert state["scale"] == model.scale
        assert counted == (model.growth_tracker, model.hysteresis_tracker, model.skipped, model.consecutive)
        for params, optimizer, expected in zip(self.params, self.optimizers, model.optimizers, strict=True):
            assert_close([param.detach() for param in params], expected.weights)
            assert_close([param.grad for param in params], expected.grads)
            if expected.adam and expected.steps:
                assert optimizer.state[params[0]]["step"] == expected.steps


def assert_close(tensors, expected):
    if expected is None:
        assert all(tensor is None for tensor in tensors)
        return
    for actual, value in zip(torch.cat([tensor.view(-1) for tensor in tensors]).tolist(), expected, strict=True):
        assert (
            (actual != actual and value != value) or actual == value or abs(actual - value) <= 1e-4 * (1 + abs(value))
        )


EXAMPLES = {"ci": 220, "long": 4400}  # of up to 50 steps each, 47 on average: 10^4 and 2 * 10^5


@pytest.mark.parametrize("size", ["ci", pytest.param("long", marks=pytest.mark.exhaustive)])
def test_any_order_of_calls(size):
    hypothesis.stateful.run_state_machine_as_test(
        Loop,
        settings=settings(
            max_examples=EXAMPLES[size],
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
