"""``ak.graph_step``: the bits of the plain loop, and a warm-up that leaves no trace."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels.ops._shadows import fresh_shadow
from amp_kernels.optim._state import Place

from ..gpu.test_optimizers import OPTIMIZERS
from ..helpers.generators import normal
from ..reliability.loop import assert_same, flat

BATCHES = [normal(6, 4, seed=i) for i in range(6)]
BATCHES[2][1, 1] = torch.inf


class Run:
    """A model with buffers and random numbers, two groups of parameters, a scaler that grows and skips, and a schedule."""

    def __init__(self, kind=ak.optim.AdamW, dtype=torch.float32, options=None, lr=0.05):
        torch.manual_seed(0)
        wide = 2048 if (options or {}).get("state_dtype") == "8bit" else 8
        layers = torch.nn.Linear(4, wide), torch.nn.BatchNorm1d(wide), torch.nn.Dropout(0.3), torch.nn.Linear(wide, 2)
        self.dtype, self.calls = dtype, 0
        self.model = ak.convert(torch.nn.Sequential(*layers).to(dtype))
        first, *rest = self.model.parameters()
        groups = [{"params": [first]}, {"params": rest}]
        self.optimizer = kind(groups, **{**(options or {}), "lr": lr})
        self.scaler = ak.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        self.scheduler = ak.amp.SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5), self.scaler)

    def train(self, x):
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.model(x.to(self.dtype)).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        return {"loss": loss}

    def graphed(self, function=None, **options):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return ak.graph_step(function or self.train, **{**parts, **options})

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "scheduler": self.scheduler}
        states = {name: part.state_dict() for name, part in parts.items()}
        grads = [param.grad for param in self.model.parameters()]
        return dict(flat({"random": torch.get_rng_state(), "grads": grads, **states}))


def tensor_rates(run):
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return run


def train(run, step, batches=BATCHES):
    losses = []
    for x in batches:
        losses.append(str(step(x)["loss"].item()))
        run.scheduler.step()
    return losses


UNITS = {"independent_groups": True, "spike_zscore": 2.5, "spike_warmup": 2}
MORE = {
    "adamw unscale_grads": (ak.optim.AdamW, torch.float32, {"unscale_grads": True}),
    "adamw 8 bits": (
        ak.optim.AdamW,
        torch.bfloat16,
        {"master_weights": "split24", "state_dtype": "8bit", "cautious": True, "decouple_lr": True, "weight_decay": 0.2},
    ),
    "adamw units": (ak.optim.AdamW, torch.float32, UNITS),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS | MORE)
def test_the_bits_are_those_of_the_plain_loop(name):
    """Also where it begins in the middle of a run, with gradients there and a weight that was just written."""
    kind, dtype, options = (OPTIMIZERS | MORE)[name]
    found = []
    for graphed in (False, True):
        run = tensor_rates(Run(kind, dtype, options))
        losses = train(run, run.train, BATCHES[:2])
        with torch.no_grad():
            run.model[3].weight.mul_(0.75)
            run.model[3].weight[0, 0] = 0.0
        losses += train(run, run.graphed() if graphed else run.train, BATCHES[2:])
        found.append((losses, run.state()))
    (losses, state), (expected_losses, expected) = found
    assert losses == expected_losses
    assert_same(state, expected)
    assert run.calls == 2 + 3 + 4  # prepared once


@pytest.mark.parametrize("options", [{}, UNITS])
def test_from_the_first_step_on(options):
    """State and scale do not exist yet; learning rates are numbers, and become tensors."""
    plain, run = tensor_rates(Run(options=options)), Run(options=options)
    torch.manual_seed(5)
    losses = train(plain, plain.train)
    expected = plain.state()
    torch.manual_seed(5)
    step = run.graphed(warmup=2)
    assert train(run, step) == losses
    assert run.calls == 2 + 6
    assert_same(run.state(), expected)
    assert run.scaler.skipped_steps == 1
    assert step(BATCHES[0]) is step(BATCHES[1])


def test_numbers_that_change():
    """A rate or a decay that is put into a group as a number is written through; another number makes the step anew."""
    plain, run = tensor_rates(Run(options={"weight_decay": 0.1})), Run(options={"weight_decay": 0.1})
    step = run.graphed()
    calls = []
    for i, x in enumerate(BATCHES):
        for one, function in ((plain, plain.train), (run, step)):
            torch.manual_seed(i)
            if i in (1, 2):
                one.optimizer.param_groups[1]["lr"] = torch.tensor(0.01) if one is plain else 0.01
            if i in (3, 5):
                one.optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            if i == 4:
                one.optimizer.param_groups[0]["betas"] = 0.8, 0.9
            function(x)
        calls.append(run.calls)
        assert_same(run.state(), plain.state())
    assert calls == [4, 5, 6, 7, 11, 12]


def loads_the_optimizer(run, source):
    run.optimizer.load_state_dict(source.optimizer.state_dict())


def loads_the_model(run, source):
    run.model.load_state_dict(source.model.state_dict())


def replaces_a_state(run, source):
    param = run.model[3].weight
    run.optimizer.state[param] = {key: value + 1 for key, value in run.optimizer.state[param].items()}


def steps_a_part(run, source):
    run.model[3].weight.grad = None
    run.optimizer.step()


@pytest.mark.parametrize(
    ("change", "anew"), [(loads_the_optimizer, 3), (loads_the_model, 0), (replaces_a_state, 3), (steps_a_part, 3)]
)
def test_changes_between_steps_count(change, anew):
    """``anew``: the steps of another warm-up, where there must be another graph."""
    options = OPTIMIZERS["adamw master"]
    source, plain, run = (tensor_rates(Run(*options)) for _ in range(3))
    train(source, source.train, BATCHES[:2])
    step = run.graphed()
    for one, function in ((plain, plain.train), (run, step)):
        torch.manual_seed(1)
        function(BATCHES[0])
        change(one, source)
        function(BATCHES[1])
    assert_same(run.state(), plain.state())
    assert run.calls == 3 + 1 + anew + 1


def test_the_warm_up_neither_reports_nor_counts():
    """Its first step overflows and the others do not."""
    run = Run(lr=0.125)
    run.scaler = ak.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-100, max_consecutive_skips=2)
    run.scheduler = ak.amp.SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5), run.scaler)
    step = run.graphed()
    rates = []
    for _ in range(3):
        step(1000.0 * BATCHES[0])
        run.scheduler.step()
        rates.append(run.optimizer.param_groups[0]["lr"].item())
    assert rates == [0.125, 0.0625, 0.03125]
    assert run.scaler.skipped_steps == 1


def test_too_many_skips_are_those_of_the_run():
    run = Run()
    run.scaler = ak.GradScaler("cpu", init_scale=2.0**126, backoff_factor=0.5, max_consecutive_skips=2)
    step = run.graphed()
    step(1000.0 * BATCHES[0])
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        step(1000.0 * BATCHES[0])


def test_masters_and_shadows_are_up_to_date_after_it(monkeypatch):
    """Else a captured step would bring them up to date in every replay."""
    adopted, found = [], []
    for name in ("adamw shadow", "adamw split bf16"):
        run = tensor_rates(Run(*OPTIMIZERS[name]))

        def train(x, run=run):
            found.append(fresh_shadow(run.model[0].weight, torch.bfloat16) is not None)
            return run.train(x)

        step = run.graphed(train)
        real = Place.adopt_write
        with monkeypatch.context() as patch:
            patch.setattr(Place, "adopt_write", lambda place, real=real: (adopted.append(place), real(place)))
            step(BATCHES[0])
    assert found == [False, True, True, True] + [False] * 4
    assert len(adopted) == len(set(adopted)) == 2 * len(list(run.model.parameters()))


def test_release_and_inputs_of_another_shape():
    run = Run()
    step = run.graphed()
    step(BATCHES[0])
    before = run.state()
    for wrong in ((BATCHES[0][:3],), (BATCHES[0].double(),), (), ([BATCHES[0]],)):
        with pytest.raises(ValueError, match=r"graph_step: the inputs are .*; accepted: those of the first call"):
            step(*wrong)
    with pytest.raises(TypeError, match=r"graph_step: inputs\[0\] has type int; accepted: tensors"):
        step(3)
    assert_same(run.state(), before)
    step.release()
    step(BATCHES[0][:3])


# ---- the layers ----


class Head(torch.nn.Module):
    """Every module of ``ak.nn`` that takes a batch of tokens, and both losses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(15, -1, -1))
        self.embed = ak.nn.Embedding(32, 16)
        self.body = torch.nn.Sequential(
            ak.nn.LayerNorm(16), ak.nn.Linear(16, 16, activation="gelu"), ak.nn.MLP(16, 32), ak.nn.RMSNorm(16)
        )
        self.out = ak.nn.Linear(16, 32)
        self.loss, self.fused_loss = ak.nn.CrossEntropyLoss(), ak.nn.LinearCrossEntropyLoss(16, 32)

    def forward(self, tokens, targets):
        x = self.body(self.embed(tokens))
        x = ak.matmul(ak.matmul(x, x.mT).softmax(-1), x)
        flat, wanted = x.flatten(0, 1)[self.order], targets.flatten()[self.order]
        logits = self.out(flat)
        return self.loss(logits, wanted) + self.fused_loss(flat, wanted)


@pytest.mark.parametrize(
    ("dtype", "main_grad"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_no_layer_reads_on_the_host(dtype, main_grad):
    torch.manual_seed(0)
    model = Head()
    if dtype != torch.float32:
        ak.nn.to_half(model, dtype)
    if main_grad:
        ak.nn.accumulate_fp32(model)
    optimizer = ak.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=1.0)
    tokens = torch.randint(0, 32, (2, 8))

    def train(tokens, targets):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    step = ak.graph_step(train, model=model, optimizer=optimizer)
    losses = [step(tokens, tokens.roll(1, 1)).item() for _ in range(5)]
    assert losses[-1] < losses[0]
