"""The differentiable functions, modules and modes on the GPU, with both kinds of kernels. Numbers are integers wherever an
activation allows it, so that results and gradients are exact."""

import copy

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

from . import launches

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: rows, inner size, columns: multiples of 8, and not even multiples of 2
SIZES = ((200, 64, 72), (131, 61, 67))


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    with ak.backend(request.param):
        yield request.param


def integers(*shape: int, dtype: torch.dtype = F32, limit: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape) + seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator, device=DEVICE).to(dtype)


def gradients(function, *inputs):
    """The result and the gradients of its inputs."""
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    grad = integers(*out.shape, seed=5).to(out.dtype)
    out.backward(grad)
    return [out, *(t.grad for t in inputs if t is not None)]


def assert_exact(function, reference, *inputs):
    """Results and gradients, against the same in float64."""
    found = gradients(function, *inputs)
    wanted = gradients(reference, *(None if t is None else t.double() for t in inputs))
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other.to(one.dtype)), i


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_linear_is_exact(backend, dtype, sizes, activation):
    m, k, n = sizes
    act = F.relu if activation else lambda t: t

    def reference(x, w, b=None):
        return act(F.linear(x, w, b))

    def function(x, w, b=None):
        return ak.linear(x, w, b, activation=activation)

    def under_autocast(x, w, b=None):
        with torch.autocast(DEVICE, dtype):
            return function(x, w, b)

    for shape in ((m, k), (2, 3, k), (k,), (0, k)):
        for run, kind in ((function, dtype), (under_autocast, F32)):
            x, w, b = integers(*shape, dtype=kind), integers(n, k, dtype=kind), integers(n, dtype=kind)
            assert_exact(run, reference, x, w, b)
            assert_exact(run, reference, x, w)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mlp_is_exact(backend, sizes):
    m, k, n = sizes

    def function(x, w1, b1, w2, b2):
        with torch.autocast(DEVICE, BF16):
            return ak.mlp(x, w1, b1, w2, b2, activation="relu")

    def reference(x, w1, b1, w2, b2):
        return F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)

    assert_exact(
        function, reference, integers(m, k), integers(n, k), integers(n), integers(24, n, seed=1), integers(24)
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_smooth_activations(backend, sizes, activation):
    """The relative Frobenius error of bf16 is some 2^-9 for each rounding on the way; a wrong formula is far beyond 1e-2."""
    m, k, n = sizes
    hidden = 2 * n if activation == "swiglu" else n
    generator = torch.Generator().manual_seed(0)
    shapes = ((m, k), (hidden, k), (hidden,), (24, n), (24,))
    tensors = [torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(DEVICE, BF16) for shape in shapes]

    def act(z):
        if activation == "swiglu":
            gate, up = z.chunk(2, dim=-1)
            return F.silu(gate) * up
        return {"silu": F.silu, "gelu": F.gelu}.get(activation, lambda t: F.gelu(t, approximate="tanh"))(z)

    pairs = [
        (
            lambda *t: ak.mlp(*t, activation=activation),
            lambda x, w1, b1, w2, b2: F.linear(act(F.linear(x, w1, b1)), w2, b2),
            tensors,
        ),
        (lambda *t: ak.linear(*t, activation=activation), lambda x, w, b: act(F.linear(x, w, b)), tensors[:3]),
    ]
    for function, reference, inputs in pairs:
        found, wanted = gradients(function, *inputs), gradients(reference, *(t.double() for t in inputs))
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert ((one.double() - other).norm() <= 1e-2 * other.norm()).item(), i


MATMULS = [
    ((61,), (61,)),
    ((61,), (61, 40)),
    ((40, 61), (61,)),
    ((131, 61), (61, 67)),
    ((3, 72, 64), (64, 80)),
    ((72, 64), (3, 64, 80)),
    ((5, 1, 16, 61), (2, 61, 24)),
    ((2, 4, 16, 64), (2, 4, 64, 16)),
    ((3, 0, 64), (64, 8)),
    ((3, 8, 0), (0, 8)),
]


@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul_is_exact(backend, shapes):
    a, b = (integers(*shape, dtype=BF16, seed=i) for i, shape in enumerate(shapes))
    assert_exact(ak.matmul, torch.matmul, a, b)
    assert_exact(lambda a, b: ak.matmul(a, b, out_dtype=F32), torch.matmul, a, b)
    out = torch.empty_like(torch.matmul(a, b))
    assert ak.matmul(a, b, out=out) is out
    assert torch.equal(out, torch.matmul(a.double(), b.double()).to(BF16))


def test_baddbmm_is_exact(backend):
    c, a, b = (integers(*shape, dtype=F16) for shape in ((3, 40, 24), (3, 40, 61), (3, 61, 24)))
    assert_exact(
        lambda c, a, b: ak.baddbmm(c, a, b, beta=2, alpha=-1),
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=-1),
        *(c, a, b),
    )
    assert_exact(ak.addmm, torch.addmm, c[0], a[0], b[0])


def test_double_backward(backend):
    x, w = integers(40, 24, dtype=F32), integers(16, 24, dtype=F32)
    results = []
    for function in (lambda x, w: ak.linear(x, w, activation="silu"), lambda x, w: F.silu(F.linear(x, w))):
        x1, w1 = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast(DEVICE, BF16):
            out = function(x1, w1)
        (grad,) = torch.autograd.grad(out.float().pow(2).sum(), x1, create_graph=True)
        grad.pow(2).sum().backward()
        results.append((grad.detach(), x1.grad, w1.grad))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_the_package_computes_what_the_mode_takes_over(backend):
    """torch's modules under autocast, forward and backward, on these kernels alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(61, 72), torch.nn.ReLU(), torch.nn.Linear(72, 24)).to(DEVICE)
    for param in model.parameters():
        param.data = integers(*param.shape, seed=3)
    x = integers(40, 61)

    def run(module, x):
        with torch.autocast(DEVICE, BF16):
            return module(x)

    plain = copy.deepcopy(model).double()
    with ak.override_matmul() as override:
        found = gradients(lambda x: run(model, x), x)
        batched = torch.bmm(x.to(BF16).expand(3, 40, 61), integers(3, 61, 8, dtype=BF16))
    wanted = gradients(plain, x.double())
    assert torch.equal(found[0], wanted[0].to(found[0].dtype))
    assert torch.equal(found[1], wanted[1].to(F32))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad.to(BF16).to(F32))  # autocast's cast rounds the gradient
    assert torch.equal(batched, (x.double() @ integers(3, 61, 8).double()).to(BF16))
    assert dict(override.calls) == {"addmm": 2, "mm": 4, "bmm": 1}


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_main_grad_over_micro_batches(backend, dtype):
    """Sums that bf16 could not hold; zero_grad in both its forms."""
    mlp = ak.nn.MLP(61, 72, 24, activation="relu", device=DEVICE, dtype=dtype)
    with torch.no_grad():
        for param in mlp.parameters():
            param.copy_(integers(*param.shape, seed=3))
    plain = copy.deepcopy(mlp).double()
    xs = [integers(40, 61, seed=i) for i in range(40)]
    with ak.nn.accumulate_fp32(mlp):
        for to_none in (True, False):
            mlp.zero_grad(set_to_none=to_none)
            plain.zero_grad()
            for x in xs:
                with torch.autocast(DEVICE, BF16, enabled=dtype == F32):
                    out = mlp(x.to(dtype))
                out.backward(torch.ones_like(out))
                wanted = plain(x.double())
                wanted.backward(torch.ones_like(wanted))
            for layer in (mlp.fc1, mlp.fc2):
                assert layer.weight.grad.data_ptr() == layer.weight.main_grad.data_ptr()
            for (name, one), other in zip(mlp.named_parameters(), plain.parameters(), strict=True):
                assert one.grad.dtype == F32
                assert torch.equal(one.grad.double(), other.grad), name


def model_and_data(dtype: torch.dtype):
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(61, 64),
        ak.nn.MLP(64, 128, activation="swiglu"),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 10),
    ]
    model = ak.convert(torch.nn.Sequential(*layers).to(DEVICE))
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-3, shadow_dtype=None if dtype == F32 else dtype)
    scaler = ak.GradScaler(DEVICE, init_scale=1024.0)
    return model, optimizer, scaler, torch.randn(4, 48, 61, device=DEVICE), torch.randint(10, (4, 48), device=DEVICE)


def iteration(model, optimizer, scaler, xs, ys, dtype=F16):
    optimizer.zero_grad()
    for x, y in zip(xs, ys, strict=True):
        with torch.autocast(DEVICE, dtype):
            loss = F.cross_entropy(model(x).float(), y) / len(xs)
        scaler.scale(loss).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return loss


@pytest.mark.parametrize("shadows", [False, True])
def test_training_with_main_grad_does_not_wait(backend, shadows):
    training = model_and_data(F16 if shadows else F32)
    losses = []
    with ak.nn.accumulate_fp32(training[0]):
        for _ in range(2):
            losses.append(iteration(*training))
        with launches.no_waits():
            for _ in range(30):
                losses.append(iteration(*training))
    assert losses[-1] < losses[0]
    assert all(loss.isfinite() for loss in losses)


def test_a_captured_iteration_with_main_grad_replays(backend):
    eager, captured = model_and_data(F32), model_and_data(F32)
    with ak.nn.accumulate_fp32(eager[0]), ak.nn.accumulate_fp32(captured[0]):
        for training in (eager, captured):
            for _ in range(3):
                iteration(*training)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            iteration(*captured)
        for number in range(3):
            for training in (eager, captured):
                training[3].mul_(-1 if number == 1 else 1.5)
            graph.replay()
            iteration(*eager)
    torch.testing.assert_close([*eager[0].parameters()], [*captured[0].parameters()], rtol=0, atol=0)


def test_rows_do_not_depend_on_the_batch(backend):
    """Through linear and mlp, forward and the rows' gradients."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(1000, 520, generator=generator, device=DEVICE).to(BF16)
    mlp = ak.nn.MLP(520, 264, activation="swiglu", device=DEVICE, dtype=BF16)
    linear = ak.nn.Linear(520, 264, device=DEVICE, dtype=BF16, activation="gelu")
    for function in (mlp, linear):
        with ak.batch_invariant():
            whole = x.clone().requires_grad_()
            out = function(whole)
            out.sum().backward()
            for rows in (1, 3, 64, 129, 999):
                part = x[:rows].clone().requires_grad_()
                some = function(part)
                some.sum().backward()
                assert torch.equal(some, out[:rows])
                assert torch.equal(part.grad, whole.grad[:rows])


def test_a_compiled_model_computes_the_same():
    model, _, _, xs, _ = model_and_data(F32)
    with torch.autocast(DEVICE, BF16):
        eager = model(xs)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(xs)
    assert torch.equal(eager, compiled)
    compiled.sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())
