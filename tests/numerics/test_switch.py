"""The package switched off: torch's results in FP32, whatever autocast and the scaler were asked for."""

import pytest
import torch
from torch import nn

import amp_kernels as ak

from ..helpers.processes import python


@pytest.fixture(autouse=True)
def _on_again():
    yield
    ak.set_enabled(True)


@pytest.fixture
def off():
    ak.set_enabled(False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def losses(model, optimizer, scaler, dtype):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        x, target = torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = model(x)
            loss = ak.cross_entropy(out, target) if dtype is not None else nn.functional.cross_entropy(out, target)
        assert out.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_run_is_torchs_in_fp32(dtype):
    """A product in 16 bits would be off by 2^-9 or 2^-11 and more; FP32 in another order by some 2^-24 a sum."""
    model, plain = ak.convert(network()), network()
    ours = losses(model, ak.optim.AdamW(model.parameters(), lr=1e-2), ak.GradScaler("cpu"), dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    theirs = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), scaler, None)
    assert ours == pytest.approx(theirs, rel=1e-5)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("off")
@pytest.mark.parametrize("through", [lambda f: f, lambda f: torch.compile(f, backend="eager")])
def test_every_function_of_the_package(through):
    """By its public function, and by the rule that a compiled program meets."""
    x, w, b = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    calls = {
        "linear": lambda: ak.linear(x, w, b),
        "matmul": lambda: ak.matmul(x, w),
        "baddbmm": lambda: ak.baddbmm(torch.zeros(2, 4, 8), x.expand(2, 4, 8), w.expand(2, 8, 8)),
        "mlp": lambda: ak.mlp(x, w, b, w, b),
        "layer_norm": lambda: ak.layer_norm(x, 8),
        "rms_norm": lambda: ak.rms_norm(x, 8),
    }
    for name, call in calls.items():
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            got = through(call)()
        assert got.dtype == torch.float32, name
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.usefixtures("off")
def test_the_scaler_is_off():
    assert not ak.GradScaler("cpu").is_enabled()
    assert not ak.GradScaler("cpu", enabled=True).is_enabled()


@pytest.mark.usefixtures("off")
def test_16_bit_results_of_torchs_ops_are_widened():
    model = ak.convert(nn.Sequential(nn.Conv1d(2, 4, 1), nn.Linear(6, 3), nn.LayerNorm(3)))
    x = torch.randn(2, 2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        conv = model[0](x)
        out = model(x)
    assert conv.dtype == torch.bfloat16
    torch.testing.assert_close(out, model[2](nn.functional.linear(conv.float(), model[1].weight, model[1].bias)))


def test_on_again():
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = ak.linear(x, w)
        ak.set_enabled(False)
        off = ak.linear(x, w)
        ak.set_enabled(True)
        after = ak.linear(x, w)
    assert before.dtype == after.dtype == torch.bfloat16
    assert off.dtype == torch.float32
    assert torch.equal(before, after)
    assert ak.GradScaler("cpu").is_enabled()
    ak.set_enabled(False)
    ak.set_enabled(False)
    ak.set_enabled(True)  # twice off, once on: on
    assert ak.is_enabled()
    assert torch.equal(ak.linear(x.bfloat16(), w.bfloat16()), before)


def test_by_the_environment():
    code = "import amp_kernels as ak; assert not ak.is_enabled(); assert not ak.GradScaler('cpu').is_enabled()"
    python("-c", code, AMP_KERNELS_DISABLE="1")


def test_bad_argument():
    with pytest.raises(TypeError, match="enabled is 'off'; accepted: True and False"):
        ak.set_enabled("off")
    assert ak.is_enabled()
