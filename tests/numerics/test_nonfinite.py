"""find_nonfinite: planted infinities and NaNs, forward, backward, in the optimizer's state, under a loss scale; and that nothing
is left behind."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from torch import nn

import amp_kernels as ak
from amp_kernels.numerics import NonFiniteError, find_nonfinite

from ..scaled_gradient import ScaledGradient


class Plant(nn.Module):
    """Passes on what comes, with ``value`` in one place: forward, or of the gradient."""

    def __init__(self, value=None, grad=None):
        super().__init__()
        self.value, self.grad = value, grad

    def forward(self, x):
        y = x.clone()
        if self.value is not None:
            y.view(-1)[0] = self.value
        return y if self.grad is None else ScaledGradient.apply(y, self.grad)


def net(*planted):
    return nn.Sequential(nn.Linear(4, 4), *planted, nn.Linear(4, 2))


def report_of(model, *args, backward=True, **options):
    def step():
        with find_nonfinite(model, **options):
            out = model(*args)
            if backward:
                out.sum().backward()

    with pytest.raises(NonFiniteError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_the_producer_and_not_who_passes_it_on(value):
    report = report_of(net(Plant(value)), torch.randn(3, 4))
    assert report.startswith("step 0: made in the forward of '1' (Plant)")
    assert "passed on by '2' (Linear)" in report
    assert "also made by" not in report
    assert "input [0]: float32[3, 4]: finite" in report
    assert ("1 NaN, 0 inf of 12" if value != value else "0 NaN, 1 inf of 12") in report


def test_the_innermost_producer_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), nn.Sequential(Plant(torch.nan))))
    assert "made in the forward of '1.1.0' (Plant)" in report_of(model, torch.randn(2, 4))


def test_an_operation_between_modules_is_its_owners():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.second(self.first(x) / 0.0)

    report = report_of(Owner(), torch.randn(2, 4))
    assert "came in with input [0] of 'second' (Linear)" in report
    report = report_of(Owner(), torch.randn(2, 4), ops=True)
    assert "made in the forward of the model (aten.div" in report


@pytest.mark.parametrize("ops", [False, True])
def test_input_of_the_model(ops):
    report = report_of(net(), torch.full((2, 4), torch.nan), ops=ops)
    assert "came in with input [0] of the model (Sequential)" in report


def test_parameter():
    model = net()
    with torch.no_grad():
        model[1].weight[0, 0] = torch.inf
    assert "came in with parameter weight of '1' (Linear)" in report_of(model, torch.randn(2, 4))


def test_optimizer_state():
    """A NaN in a moment reaches the weight in the next update, and the forward after it."""
    model = net()
    optimizer = ak.optim.AdamW(model.parameters())

    def train():
        with find_nonfinite(model):
            for step in range(3):
                model(torch.randn(2, 4)).sum().backward()
                if step == 1:
                    optimizer.state[model[0].weight]["exp_avg"][1, 2] = torch.nan
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(NonFiniteError, match=r"step 2: came in with parameter weight of '0' \(Linear\)"):
        train()


class Chunks(dict):
    """A dict for everyone but pytree."""


@dataclasses.dataclass
class Found:
    """As models of transformers return."""

    loss: object
    states: object = None


class Several(nn.Module):
    """Outputs of different operations, arranged by ``arrange``, of which the last is ``bad``."""

    def __init__(self, arrange, bad=None):
        super().__init__()
        self.arrange, self.bad = arrange, bad or (lambda x: (x - x) / (x - x))

    def forward(self, x):
        return self.arrange(x.exp(), self.bad(x))


NESTED = {
    "tuple": (lambda good, bad: (good, bad), "[1]"),
    "list with integers": (lambda good, bad: [torch.ones(2, dtype=torch.int64), bad], "[1]"),
    "tuple in a dict": (lambda good, bad: {"a": good, "b": (None, 3, bad)}, "['b'][2]"),
    "dict of a class": (lambda good, bad: Chunks(a=good, b=[bad]), "['b'][0]"),
    "dataclass": (lambda good, bad: Found(good, (good, bad)), ".states[1]"),
    "dataclass in a dict": (lambda good, bad: {"a": [Found(good, Chunks(b=bad))]}, "['a'][0].states['b']"),
}


@pytest.mark.parametrize("case", NESTED)
def test_the_operation_is_that_of_the_bad_output(case):
    arrange, place = NESTED[case]
    report = report_of(Several(arrange), torch.ones(2, requires_grad=True), backward=False)
    assert report.startswith("step 0: made in the forward of the model (Several), last operation DivBackward0\n")
    assert f"output {place}: float32[2]: 2 NaN" in report


def test_a_bad_output_without_an_operation_names_none():
    model = Several(lambda good, bad: (good, bad), bad=lambda x: torch.full_like(x, torch.nan))
    report = report_of(model, torch.ones(2, requires_grad=True), backward=False)
    assert report.startswith("step 0: made in the forward of the model (Several)\n")


def test_the_receiver_of_a_bad_input_did_not_make_it():
    assert "last operation" not in report_of(net(), torch.full((2, 4), torch.nan))


def step_of_outputs(arrange, loss):
    with find_nonfinite(Several(arrange, bad=torch.sin)) as finder:
        loss(finder._model(torch.ones(2, requires_grad=True))).backward()


def test_gradients_name_the_output_that_they_came_into():
    def loss(found):
        return found.loss.sum() + found.states["b"].sum() * torch.inf

    with pytest.raises(NonFiniteError) as caught:
        step_of_outputs(lambda good, other: Found(good, Chunks(b=other)), loss)
    first, second, *_ = str(caught.value).splitlines()
    assert first.endswith("as the gradient of an output of the model (Several), last operation SinBackward0")
    assert second.startswith("  gradient of output .states['b']: float32[2]")


def test_a_backward_names_the_operations_of_all_outputs_that_had_a_gradient():
    class Root(nn.Module):
        def forward(self, x):
            return x.exp(), x.cos(), x.sqrt()

    def step():
        model = Root()
        with find_nonfinite(model):
            _, cosine, root = model(torch.zeros(2, requires_grad=True))
            (cosine.sum() + root.sum()).backward()

    with pytest.raises(
        NonFiniteError, match=r"(?m)made in the backward of the model .Root., last operations Sqrt.* and CosBackward0$"
    ):
        step()


def test_an_output_that_holds_itself():
    def around(good, bad):
        found = Found(good)
        found.states = [found, bad]
        return found

    report = report_of(Several(around), torch.ones(2, requires_grad=True), backward=False)
    assert "output .states[1]: float32[2]: 2 NaN" in report


def test_backward_of_a_module():
    class Root(nn.Module):
        def forward(self, x):
            return x.abs().sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    report = report_of(model, torch.randn(3, 4))  # the derivative of the root at zero
    assert report.startswith("step 0: made in the backward of '1' (Root)")
    assert "gradient of output: float32[3, 4]: finite" in report
    assert "not finite, of 4 gradients of parameters:" in report
    assert "0.weight" in report.splitlines()[-1]
    assert "2.weight" not in report.splitlines()[-1]


def test_gradient_that_came_from_the_loss():
    model = net()
    with pytest.raises(NonFiniteError, match="came into the model from the loss"), find_nonfinite(model):
        (model(torch.randn(2, 4)).sum() * torch.inf).backward()


def test_gradient_made_between_modules():
    model = net(Plant(grad=torch.inf))
    assert "made in the backward of '1' (Plant)" in report_of(model, torch.randn(2, 4))


def test_warns_and_goes_on():
    model = net(Plant(torch.nan))
    with warnings.catch_warnings(record=True) as caught, find_nonfinite(model, on_detect="warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(2, 4))
    assert [str(w.message)[:7] for w in caught] == ["step 0:", "step 1:", "step 2:"]


def test_check_reads_at_once():
    model = net(Plant(torch.nan))
    with find_nonfinite(model) as finder:
        model(torch.randn(2, 4))
        with pytest.raises(NonFiniteError):
            finder.check()
        finder.check()  # what was reported is forgotten


def hooks_of(model):
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
    found = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind)]
    return found + [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or ())]


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left(fails):
    class Fails(nn.Module):
        def forward(self, x):
            if fails:
                raise ValueError("on purpose")
            return x

    model = net(Fails())
    with contextlib.suppress(ValueError), find_nonfinite(model):
        out = model(torch.randn(2, 4))
    assert not hooks_of(model)
    if not fails:
        out.sum().backward()


def test_an_exception_of_the_users_keeps_its_place_and_the_report_is_a_warning():
    def step(model):
        with find_nonfinite(model):
            model(torch.randn(2, 4))
            raise KeyError("the user's own")

    with pytest.raises(KeyError), pytest.warns(UserWarning, match="made in the forward of '1'"):
        step(net(Plant(torch.nan)))


# ---- with a loss scale


def overflowing(scaler, steps, finder_options=None, grad=torch.inf):
    """Steps whose backward overflows; the model's forward is finite."""
    model = net(Plant(grad=grad))
    optimizer = ak.optim.SGD(model.parameters(), lr=0.1)
    with find_nonfinite(model, scaler, **(finder_options or {})):
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("make", [ak.GradScaler, torch.amp.GradScaler])
def test_an_overflow_that_the_scaler_skips_is_no_fault(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overflowing(make("cpu"), 6)


def test_overflows_in_a_row_at_the_minimum_scale_are():
    scaler = ak.GradScaler("cpu", init_scale=4.0, min_scale=1.0)
    with pytest.raises(NonFiniteError, match="the last 3 steps overflowed with the scale at its minimum") as caught:
        overflowing(scaler, 20, {"patience": 3})
    # Two steps to back off to 1; the second one is read when the scale is there already.
    assert str(caught.value).startswith("step 3:")


def test_a_finite_step_between_begins_the_count_again():
    scaler = ak.GradScaler("cpu", init_scale=1.0, min_scale=1.0)
    for _ in range(3):
        overflowing(scaler, 2, {"patience": 3})


def test_a_forward_that_is_not_finite_is_a_fault_with_a_scaler_too():
    model, scaler = net(Plant(torch.inf)), ak.GradScaler("cpu")
    assert "made in the forward of '1' (Plant)" in report_of(model, torch.randn(2, 4), backward=False, scaler=scaler)


def test_fp16_that_overflows_under_autocast():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(200.0)
        model[1].weight.fill_(200.0)
    with torch.autocast("cpu", torch.float16):
        report = report_of(model, torch.ones(2, 4), backward=False)
    assert "made in the forward of '1' (Linear)" in report


def test_a_converted_model():
    model = ak.convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Plant(torch.nan), nn.Linear(4, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        report = report_of(model, torch.randn(2, 4))
    assert "made in the forward of '2' (Plant)" in report


def test_a_healthy_run_says_nothing_and_changes_nothing():
    def train(watch):
        torch.manual_seed(0)
        model = net(nn.ReLU())
        optimizer = ak.optim.AdamW(model.parameters(), lr=0.1)
        finder = find_nonfinite(model, ops=True) if watch else torch.no_grad.__class__
        with finder if watch else torch.enable_grad():
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 3}, TypeError, "model has type int"),
        ({"on_detect": "stop"}, ValueError, "on_detect is 'stop'; accepted: 'raise' and 'warn'"),
        ({"patience": 0}, ValueError, "patience is 0"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        find_nonfinite(**{"model": net(), **options})
