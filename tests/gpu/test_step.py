"""A whole training step on the GPU: no host sync, capturable, and the same as on the CPU."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.capture import capture

from . import launches

pytestmark = pytest.mark.gpu


def make(device="cuda", seed=0, limit=None):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(device)
    model = ak.convert(model)
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = ak.GradScaler(device, init_scale=1024.0, max_consecutive_skips=limit)
    x = torch.randn(32, 64).to(device)
    y = torch.randint(8, (32,)).to(device)
    return model, optimizer, scaler, x, y


def step(model, optimizer, scaler, x, y):
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(x.device.type, dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return loss


@pytest.mark.parametrize("limit", [None, 5])
def test_no_host_sync(limit):
    training = make(limit=limit)
    step(*training)  # first call: state is created, kernels are loaded
    assert training[2].last_step_skipped in (None, False)
    with launches.no_waits():
        for _ in range(3):
            step(*training)
            training[2].last_step_skipped  # noqa: B018


def test_graph_capture_replays_the_same_training():
    eager, captured = make(), make()
    for training in (eager, captured):
        for _ in range(3):
            step(*training)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        step(*captured)
    for _ in range(5):
        graph.replay()
        step(*eager)
    torch.testing.assert_close([*eager[0].parameters()], [*captured[0].parameters()], rtol=0, atol=0)


def test_overflow_skips_and_backs_off():
    model, optimizer, scaler, x, y = make()
    step(model, optimizer, scaler, x, y)
    before = [p.detach().clone() for p in model.parameters()]
    scale = scaler.get_scale()
    step(model, optimizer, scaler, x * float("inf"), y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == scale / 2


def test_training_follows_the_cpu():
    gpu, cpu = make("cuda"), make("cpu")
    for _ in range(20):
        losses = step(*gpu).item(), step(*cpu).item()
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


# A step of 161 float32 tensors under a scaler, with clipping, and the update of the scale: at most these kernels.
KERNELS = (
    "check_and_norm_kernel",  # reads all gradients
    "update_prepare_kernel",  # skip, clip, step counts and their bias corrections
    "update_kernel",  # reads gradients, reads and writes weights and moments
    "update_scale_kernel",  # the scale, and the counters of skipped steps
)


def many(device="cuda", tensors=161, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(1 + 37 * i % 5000, device=device)) for i in range(tensors)]
    return params, ak.optim.AdamW(params, lr=1e-3), ak.GradScaler(device, init_scale=1024.0, **options)


def iterate(params, optimizer, scaler):
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


def fill(params, scaler, bad=False):
    scaler.scale(torch.ones((), device=params[0].device))
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    if bad:
        params[7].grad[0] = torch.inf


@pytest.mark.parametrize("bad", [False, True])
def test_number_of_kernels(bad):
    training = many()
    for _ in range(2):
        fill(training[0], training[2])
        iterate(*training)
    fill(training[0], training[2], bad)
    names = launches.kernels(lambda: iterate(*training))
    for wanted in KERNELS:
        assert sum(wanted in name for name in names) == 1, (wanted, names)
    assert len(names) <= len(KERNELS), names


def test_the_abort_names_the_tensor():
    """At the second skip or after it, whenever the host hears of it."""
    params, optimizer, scaler = many(max_consecutive_skips=2)
    fill(params, scaler, bad=True)
    iterate(params, optimizer, scaler)

    def one_more_and_a_good_one():
        for bad in (True, False):
            fill(params, scaler, bad)
            iterate(params, optimizer, scaler)
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match=r"2 steps in a row.*1 of 161 gradients.*group 0, parameter 7, shape"):
        one_more_and_a_good_one()


def test_a_scheduler_follows_the_steps_taken():
    params, optimizer, scaler = many(tensors=8)
    inner = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
    scheduler = ak.amp.SkipAwareScheduler(inner, scaler)
    outcomes = (1, 0, 0, 1, 0, 1, 1, 0)
    for i, bad in enumerate(outcomes):
        fill(params, scaler, bad=bool(bad))
        with launches.no_waits(i == 2):  # state is created, kernels are loaded
            iterate(params, optimizer, scaler)
            scheduler.step()
    scheduler.drain()
    assert scheduler.last_epoch == 4
    assert (scaler.skipped_steps.item(), scaler.consecutive_skips.item(), scaler.last_step_skipped) == (4, 0, False)


def test_a_capture_that_fails_leaves_no_trace():
    """Random numbers continue from where they were, a graph made before replays, and the step can be captured once it is mended."""
    model, optimizer, scaler, x, y = make()
    earlier, count = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with capture(earlier):
        count += 1 + torch.rand(1, device="cuda")
    reads = True

    def train(x, y):
        loss = step(model, optimizer, scaler, x, y)
        if reads and torch.cuda.is_current_stream_capturing():
            loss.item()
        return loss

    stream, generator = torch.cuda.current_stream(), torch.cuda.default_generators[0]
    state = generator.get_state()
    drawn = torch.rand(9, device="cuda", generator=generator)
    generator.set_state(state)
    graphed = ak.graph_step(train, model=model, optimizer=optimizer, scaler=scaler)
    with pytest.raises(torch.AcceleratorError):
        graphed(x, y)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(9, device="cuda", generator=generator), drawn)
    earlier.replay()
    assert 1 <= count.item() < 2
    reads = False
    losses = [graphed(x, y).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_captured_update_counts_and_is_not_reported():
    training = make()
    for _ in range(3):
        step(*training)
    scaler = training[2]
    torch.cuda.synchronize()
    assert scaler.last_step_skipped is False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*training)
    training[3].fill_(float("inf"))
    for _ in range(3):
        graph.replay()
    assert (scaler.skipped_steps.item(), scaler.consecutive_skips.item()) == (3, 3)
    assert scaler.get_scale() == 128.0
    assert scaler.last_step_skipped is False


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_results_per_tensor(norm_type):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [0, 1, 7, 16_384, 16_385, 5_000_011, 0, 33] * 200
    grads = [torch.randn(n, device="cuda", generator=generator) for n in sizes]
    grads[5][4_999_999], grads[-1][32] = float("nan"), float("inf")
    op = ak._raw.check_and_norm.op
    wanted = ak.backend("reference")(op)(grads, norm_type=norm_type, per_tensor=True)
    for backend in ("cuda", "triton"):
        first = ak.backend(backend)(op)(grads, norm_type=norm_type, per_tensor=True)
        again = ak.backend(backend)(op)(grads, norm_type=norm_type, per_tensor=True)
        torch.testing.assert_close(first[0], wanted[0], rtol=1e-5, atol=0, equal_nan=True)
        assert torch.equal(first[1], wanted[1])
        torch.testing.assert_close(first[0], again[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_small_squares(backend):
    grads = [torch.full((1_000_000,), 1.7 * 2.0**-75, device="cuda")]
    sum_sq, _ = ak.backend(backend)(ak._raw.check_and_norm.op)(grads)
    assert sum_sq.item() == pytest.approx((1.7 * 2.0**-75) ** 2 * 1e6, rel=1e-5)
