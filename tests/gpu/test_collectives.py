"""NCCL with one rank: every collective of a step is called and captured, although alone a rank has nobody to agree with."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_kernels as ak
from amp_kernels._sharding.agreement import Agreement

from . import launches

pytestmark = pytest.mark.gpu
DEVICE, BACKEND = "cuda", "nccl"
#: And how many sums a step of each takes.
OPTIMIZERS = {"AdamW": (ak.optim.AdamW, 1), "LAMB": (ak.optim.LAMB, 2), "torch": (torch.optim.SGD, 2)}


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sums(monkeypatch):
    """The sums that were asked for. Within the test the only rank is one of several."""
    made, reduce = Agreement.__init__, dist.all_reduce
    asked = []

    def of_several(self, *args):
        made(self, *args)
        self.groups = self.tensor_groups = [dist.group.WORLD]

    def counted(*args, **kwargs):
        asked.append(args)
        return reduce(*args, **kwargs)

    monkeypatch.setattr(Agreement, "__init__", of_several)
    monkeypatch.setattr(dist, "all_reduce", counted)
    return asked


def make(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(DEVICE)
    optimizer = OPTIMIZERS[name][0](model.parameters(), lr=1e-2)
    scaler = ak.GradScaler(DEVICE, init_scale=8.0)
    scaler.scale(torch.ones((), device=DEVICE))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model, optimizer, scaler


def step(model, optimizer, scaler):
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


def same(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_agrees_without_a_host_sync(name, request):
    alone = make(name)
    for _ in range(4):
        step(*alone)
    sums = request.getfixturevalue("sums")
    together = make(name)
    step(*together)
    del sums[:]
    with launches.no_waits(name != "torch"):  # torch's optimizer asks whether to skip
        for _ in range(3):
            step(*together)
    assert len(sums) == 3 * OPTIMIZERS[name][1]
    # torch's function clips the gradients in place.
    near = {"rtol": 1e-6, "atol": 1e-8} if name == "torch" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close([*alone[0].parameters()], [*together[0].parameters()], **near)
    torch.testing.assert_close(alone[2].last_grad_norm, together[2].last_grad_norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_a_graph_holds_the_collectives(name, sums):
    eager, captured = make(name), make(name)
    for training in (eager, captured):
        for _ in range(3):
            step(*training)
    del sums[:]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks the GPU all the time
        step(*captured)
    assert len(sums) == OPTIMIZERS[name][1]
    for i in range(4):
        for (model, *_), value in ((eager, 1.0), (captured, 1.0)):
            model[0].bias.grad.fill_(torch.inf if i == 1 else value)  # one of the steps is skipped
        graph.replay()
        step(*eager)
    assert same(eager[0], captured[0])
    assert eager[2].get_scale() == captured[2].get_scale() == 4.0


def test_a_vocabulary_on_one_rank():
    torch.manual_seed(0)
    logits = torch.randn(64, 1000, device=DEVICE).bfloat16()
    target = torch.randint(1000, (64,), device=DEVICE)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        loss = ak.distributed.vocab_parallel_cross_entropy(x, target, **options)
        expected = ak.cross_entropy(y.float(), target, **options)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, y.grad, rtol=2.0**-6, atol=1e-5)


def test_fp32_sums_are_reduced():
    torch.manual_seed(0)
    model = ak.nn.MLP(16, 64, dtype=torch.bfloat16, device=DEVICE)
    plain, x = copy.deepcopy(model), torch.randn(8, 16, device=DEVICE).bfloat16()
    handles = [ak.nn.accumulate_fp32(m) for m in (model, plain)]
    reducer = ak.distributed.GradReducer(model, bucket_mb=1e-3)
    for _ in range(2):
        for m in (model, plain):
            m(x).float().square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad)
    reducer.remove()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("sharded", ["fully_shard", "tensor parallel"])
def test_dtensors_train_as_plain_tensors(sharded):
    def make(place):
        torch.manual_seed(0)
        model = ak.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(DEVICE))
        place(model)
        return model, ak.optim.AdamW(model.parameters(), lr=1e-2), ak.GradScaler(DEVICE, init_scale=8.0)

    def place(model):
        mesh = dist.init_device_mesh(DEVICE, (1,))
        if sharded == "fully_shard":
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})

    x = torch.linspace(-1, 1, 24 * 16, device=DEVICE).view(24, 16)
    trainings = make(place), make(lambda model: None)
    for _ in range(3):
        for model, optimizer, scaler in trainings:
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(x).float().square().sum()
            scaler.scale(loss).backward()
            step(model, optimizer, scaler)
    for p, q in zip(trainings[0][0].parameters(), trainings[1][0].parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor() if hasattr(p, "full_tensor") else p, q, rtol=1e-4, atol=1e-4)
