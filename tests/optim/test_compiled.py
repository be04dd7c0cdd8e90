"""Optimizer and scaler in programs of torch.compile: one graph, one op a call, the bits of eager."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_flatten

import amp_kernels as ak
from amp_kernels.optim._state import Place

from ..helpers.bits import assert_same_bits
from ..helpers.generators import normal

OPTIONS = [
    pytest.param("AdamW", torch.float32, {"shadow_dtype": torch.bfloat16, "ema_decay": 0.9}, id="AdamW-shadows"),
    pytest.param("AdamW", torch.bfloat16, {"master_weights": "split"}, id="AdamW-split"),
    pytest.param(
        "AdamW", torch.bfloat16, {"master_weights": "split24", "state_dtype": "8bit", "cautious": True}, id="AdamW-8bit"
    ),
    pytest.param("LAMB", torch.float16, {"zero_grads": True}, id="LAMB-float16"),
]
FP32 = "AdamW", torch.float32, {}
#: Inductor takes a minute where it has a kernel to compile; a program that is nothing but our ops has none.
INDUCTOR_TOO = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()


class Training:
    def __init__(self, name, dtype, options):
        torch.manual_seed(0)
        self.dtype = dtype
        width = 1024 if options.get("state_dtype") == "8bit" else 6
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4)).to(dtype)
        self.optimizer = getattr(ak.optim, name)(self.model.parameters(), lr=0.05, **options)
        self.scaler = ak.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def backward(self, i, poison=False):
        self.optimizer.zero_grad()
        x = normal(3, 4, dtype=self.dtype, seed=i)
        self.scaler.scale(self.model(x).float().square().mean()).backward()
        if poison:
            self.model[0].bias.grad[1] = torch.inf

    def state(self):
        return [self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]


def assert_same(one, other):
    for a, b in zip(tree_flatten(one.state())[0], tree_flatten(other.state())[0], strict=True):
        if isinstance(a, torch.Tensor):
            assert_same_bits(a, b)
        else:
            assert a == b


@contextlib.contextmanager
def one_graph():
    """The calls within are compiled once, whatever changes."""
    yield
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def compiled(function, backend="inductor"):
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize(("name", "dtype", "options"), OPTIONS)
def test_a_scaler_s_step_and_update(name, dtype, options, monkeypatch):
    """Rates, scale and counts change, and a step is skipped."""
    eager, training = Training(name, dtype, options), Training(name, dtype, options)

    def update():
        training.scaler.step(training.optimizer, max_norm=0.5)
        training.scaler.update()

    program, hooks, adopted = compiled(update), [], []
    training.optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    training.optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
    with one_graph():
        for i in range(6):
            for one in (eager, training):
                one.backward(i, poison=i == 3)
                one.optimizer.param_groups[0]["lr"] = 0.05 / (i + 1)
            eager.scaler.step(eager.optimizer, max_norm=0.5)
            eager.scaler.update()
            with monkeypatch.context() as patch:
                patch.setattr(Place, "adopt_write", lambda place: adopted.append(place))
                program()
            assert_same(training, eager)
            assert_same_bits(training.scaler.last_grad_norm, eager.scaler.last_grad_norm)
            assert training.scaler.last_step_skipped is (i == 3)
    assert hooks == ["before", "after"] * 6
    assert not adopted  # that the program writes the parameters is no news to their masters


@pytest.mark.parametrize(("name", "dtype", "options"), OPTIONS[::2])
def test_an_optimizer_s_step(name, dtype, options):
    """Alone, with its hooks, which are traced, and with a weight that the program writes before and reads afterwards."""
    eager, training = Training(name, dtype, options), Training(name, dtype, options)
    calls = torch.zeros(1)

    def update(one):
        one.model[0].weight.clamp_(-0.25, 0.25)
        one.optimizer.step()
        return one.model[0].weight * 2.0, one.model[0].weight.grad * 2.0

    def count(*_):
        calls.add_(1.0)

    training.optimizer.register_step_pre_hook(count)
    program = compiled(torch.no_grad()(update), "aot_eager")
    with one_graph():
        for i in range(3):
            for one in (eager, training):
                one.backward(i)
                one.optimizer.param_groups[0]["lr"] = 0.05 / (i + 1)
            with torch.no_grad():
                expected = update(eager)
            for result, wanted in zip(program(training), expected, strict=True):
                assert_same_bits(result, wanted)
    assert_same_bits(training.model[0].weight, eager.model[0].weight)
    assert calls == 3


@INDUCTOR_TOO
def test_gradients_that_the_program_makes(backend):
    """They are not yet those of the parameters when the step runs."""
    eager, training = Training(*FP32), Training(*FP32)

    def update(one):
        one.scaler.unscale_(one.optimizer)
        for param in one.model.parameters():
            param.grad.mul_(0.5)
        one.model[1].bias.grad = torch.ones_like(one.model[1].bias)
        one.scaler.step(one.optimizer)
        one.scaler.update()

    program = compiled(torch.no_grad()(update), backend)
    for i in range(3):
        eager.backward(i)
        update(eager)
        training.backward(i)
        program(training)
        assert_same(training, eager)
        for param, other in zip(training.model.parameters(), eager.model.parameters(), strict=True):
            assert_same_bits(param.grad, other.grad)


@INDUCTOR_TOO
def test_the_whole_loop_with_any_batch_size(backend):
    eager, training = Training(*FP32), Training(*FP32)

    def loss_of(one, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return one.scaler.scale(one.model(x).float().square().mean())

    def update(one):
        one.scaler.step(one.optimizer)
        one.scaler.update()

    ak.convert(eager.model)
    ak.convert(training.model)
    forward = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    program = compiled(update, backend)
    for one in (eager, training):
        one.scaler.scale(torch.ones(()))  # makes what a scaler has on the device
    for batch in (3, 5, 8, 13):
        x = torch.randn(batch, 4)
        for one, compute, step in ((eager, loss_of, update), (training, forward, program)):
            one.optimizer.zero_grad()
            compute(one, x).backward()
            step(one)
        for param, other in zip(training.model.parameters(), eager.model.parameters(), strict=True):
            torch.testing.assert_close(param, other, atol=2e-2, rtol=2e-2)
    assert counters["stats"]["unique_graphs"] == 2
    training.scaler = ak.GradScaler("cpu", enabled=False)
    forward(training, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_is_stepped_and_not_its_original(copied):
    first = Training(*FP32)
    program = compiled(lambda one: (one.scaler.step(one.optimizer), one.scaler.update()), "aot_eager")
    first.backward(0)
    program(first)
    second = copied(first)
    for one in (first, second, second):
        one.backward(1)
        program(one)
    first.backward(1)
    program(first)
    assert_same(second, first)


def test_a_parameter_that_is_added_and_one_without_a_gradient():
    training = Training(*FP32)
    program = compiled(training.optimizer.step, "aot_eager")
    training.backward(0)
    program()
    extra, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    training.optimizer.add_param_group({"params": [idle, extra]})
    extra.grad = torch.ones(3)
    program()
    assert (extra < 1).all()
    assert (idle == 1).all()


def test_calls_that_cause_a_graph_break():
    """A closure, an optimizer of torch, and what the host wants to know of a step: the program goes on after the call."""
    training = Training(*FP32)
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.backward(0)

    def asks():
        training.scaler.step(training.optimizer)
        norm = training.scaler.last_grad_norm
        training.scaler.update()
        return norm

    for function in (
        lambda: training.optimizer.step(lambda: None),
        lambda: (training.scaler.step(other), training.scaler.update()),
        asks,
    ):
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(function, backend="aot_eager", fullgraph=True)()
        torch.compile(function, backend="aot_eager")()
    norm = torch.stack([param.grad.norm() for param in training.model.parameters()]).norm()
    expected = norm / training.scaler.get_scale()
    torch.testing.assert_close(torch.compile(asks, backend="aot_eager")(), expected)
