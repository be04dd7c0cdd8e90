"""Two GPUs in one process: what is known of one, and kept for it, serves no other."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host

from ..ops import raw
from .preloaded import machine, set_chip

machine()
PAIRS = [((90, 4), (90, 6)), ((90, 4), (80, 3))]  # capability, SMs


@pytest.fixture(autouse=True)
def two_alike_again():
    yield
    for device in (0, 1):
        set_chip(90, 2, device)


def split_product(device):
    """Splits count, in counters of the stream, who has come last."""
    a, b = torch.ones(8, 4096).half().to(device), torch.ones(16, 4096).half().to(device).T
    c = torch.zeros(8, 16).to(device)
    raw.gemm_accumulate_(c, a, b)
    return [c]


def product(device):
    a = (torch.arange(600 * 64).reshape(600, 64) % 5).half()
    return [raw.gemm(a.to(device), a[:200].to(device).T)]


def step(device):
    """Norm of the gradients, and an update that it clips."""
    params = [torch.ones(n).to(device).requires_grad_() for n in (20_000, 70)]
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + i)
    optimizer = ak.optim.AdamW(params, lr=0.5)
    ak.GradScaler("cuda", enabled=False).step(optimizer, max_norm=1.0)
    return params


def norm(device):
    x = (torch.arange(64 * 96).reshape(64, 96) % 7).float().to(device).requires_grad_()
    weight = torch.ones(96).to(device).requires_grad_()
    y = ak.nn.functional.layer_norm(x, (96,), weight)
    y.backward(x.detach())
    return [y, x.grad, weight.grad]


WORK = [split_product, product, step, norm]


def done(work, device):
    """The result and its launches: kernels and blocks."""
    it = machine()
    it.seed = 0
    first = len(it.prepared)
    with torch.cuda.device(0):  # tensors say where it is done, whatever device is current
        results = [t.detach().cpu() for t in work(device)]
        assert torch.cuda.current_device() == 0
    launches = it.prepared[first:]
    assert {launch.device for launch in launches} == {device.index}
    return results, [(launch.kernel.name, launch.grid) for launch in launches]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("chips", PAIRS, ids=str)
def test_a_device_does_the_same_with_another_at_work(work, chips):
    devices = [torch.device("cuda", i) for i in range(2)]
    alone = []
    for chip in chips:
        set_chip(*chip)
        alone.append(done(work, devices[0]))
    assert alone[0][1] != alone[1][1]  # so that one chip's plan would show on the other
    for device, chip in enumerate(chips):
        set_chip(*chip, device=device)
    for i in (0, 1, 0, 1):
        results, launches = done(work, devices[i])
        assert launches == alone[i][1]
        torch.testing.assert_close([*results], [*alone[i][0]], rtol=0, atol=0)


def test_split_products_of_both_devices_take_turns():
    """Each has a null stream, which are told apart by their devices alone."""
    for device in (0, 1):
        set_chip(90, 4, device)
    assert _host.plan_gemm(8, 16, 4096, sm_count=4, out_bytes=8)["splits"] > 1
    for i in range(4):
        (c,) = split_product(torch.device("cuda", i % 2))
        assert c.cpu().eq(4096).all()


def test_each_device_is_asked_once_for_its_properties():
    it = machine()
    for device in (0, 1):
        set_chip(90, 4, device)
    counts = []
    for i in (0, 1, 0, 1):
        split_product(torch.device("cuda", i))
        counts.append([it.calls(name) for name in ("cudaDeviceGetAttribute", "cudaFuncSetAttribute")])
    assert counts[0] < counts[1] == counts[2] == counts[3]


@pytest.mark.parametrize("streams", ["null", "of the device"])
def test_a_stream_of_the_tensors_device_is_used(streams):
    set_chip(90, 3, device=1)
    device = torch.device("cuda", 1)
    stream = torch.cuda.Stream(device) if streams != "null" else torch.cuda.default_stream(device)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        (c,) = split_product(device)
    assert c.cpu().eq(4096).all()


@pytest.mark.parametrize("work", [product, step, norm], ids=lambda work: work.__name__)
def test_tritons_kernels_are_launched_on_the_device_of_the_tensors(work):
    with ak.backend("triton"):
        there, here = (done(work, torch.device("cuda", i))[0] for i in (1, 0))
    torch.testing.assert_close([*there], [*here], rtol=0, atol=0)


def test_whole_steps_in_graphs_of_each_device():
    """The GPU of the parameters is captured, whatever device is current, and whichever was captured first."""
    it = machine()
    it.seed = 0
    found = {}
    for index in (0, 1, 0):
        device = torch.device("cuda", index)
        param = torch.nn.Parameter(torch.ones(70).to(device))
        optimizer = ak.optim.SGD([param], lr=0.25)

        def update(grad, param=param, optimizer=optimizer):
            param.grad = grad
            optimizer.step()

        step = ak.graph_step(update, model=torch.nn.ParameterList([param]), optimizer=optimizer)
        for grad in (1.0, 2.0):
            step(torch.full((70,), grad).to(device))
            first = len(it.prepared)
        assert param.detach().cpu().eq(0.25).all()
        found[index] = step
        assert torch.cuda.current_device() == 0
        assert len(it.prepared) == first  # the second call prepared nothing: it replays
    assert all(step._graph is not None for step in found.values())


def test_a_graph_of_one_device_while_the_other_is_current():
    """The graph reads a table of tensors that lives as long as the process, whatever is called in between."""
    from amp_kernels._triton import _tables

    device = torch.device("cuda", 1)
    grads = [torch.ones(300).to(device), torch.ones(70).half().to(device)]
    found, inverse = torch.zeros(()).to(device), torch.tensor(0.5).to(device)
    param = torch.nn.Parameter(torch.ones(40).to(device))
    param.grad = torch.ones(40).to(device)
    optimizer = ak.optim.SGD([param], lr=0.25)
    with ak.backend("triton"):
        optimizer.step()
    kept = len(_tables._captured)
    graph = torch.cuda.CUDAGraph()
    with ak.backend("triton"), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)), torch.cuda.device(0):
        ak._raw.unscale.unscale_(grads, found, inverse)
        ak._raw.check_and_norm.check_and_norm(grads, None)
        assert len(_tables._captured) == kept + 4  # two tables, and what they are filled from
        optimizer.step()
    assert len(_tables._captured) == kept + 10  # three more
    graph.replay()
    assert all(grad.cpu().eq(0.5).all() for grad in grads)
    assert param.detach().cpu().eq(0.5).all()


def test_tensors_of_two_devices_are_refused():
    a = torch.ones(16, 16).half()
    with pytest.raises(ValueError, match="b is on cuda:1, but a is on cuda:0"):
        ak.matmul(a.to("cuda:0"), a.to("cuda:1"))
    with pytest.raises(RuntimeError, match=r"grads\[1\] must be on cuda:0 like the other arguments"):
        torch.ops.amp_kernels.check_and_norm([a.to("cuda:0"), a.to("cuda:1")], None)


def test_backward_runs_on_the_device_of_the_model():
    """In a thread of autograd's own."""
    found = []
    for place in ("cpu", "cuda:1", "cuda:0"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            ak.nn.Linear(40, 48, activation="relu"), ak.nn.LayerNorm(48), ak.nn.Linear(48, 8)
        ).to(place)
        with torch.autocast(torch.device(place).type, dtype=torch.bfloat16):
            loss = model(torch.ones(24, 40).to(place)).float().square().mean()
        loss.backward()
        found.append([p.grad.cpu() for p in model.parameters()])
    for got in found[1:]:
        torch.testing.assert_close([*got], [*found[0]], rtol=2e-2, atol=2e-3)
