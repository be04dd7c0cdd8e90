"""In-place writes to 16-bit parameters between two steps: they count, and what they leave alone keeps its master's bits."""

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

from .optimizers import bf16, f16, f32, fill

MODES = [("fp32", f16), ("fp32", bf16), ("split", f16), ("split", bf16)]
pytestmark = pytest.mark.parametrize(("mode", "dtype"), MODES)


def params(dtype, n=3):
    generator = torch.Generator().manual_seed(n)
    return [torch.nn.Parameter(torch.randn(5, 7 + i, generator=generator).to(dtype)) for i in range(n)]


def train(optimizer, ps, steps=3, grad=0.37):
    for _ in range(steps):
        fill(ps, grad)
        optimizer.step()


def masters(optimizer):
    return [values["master"].clone() for values in optimizer.state_dict()["state"].values()]


def trained(mode, dtype, **options):
    ps = params(dtype)
    optimizer = akopt.SGD(ps, lr=2.0**-11, master_weights=mode, **options)
    train(optimizer, ps)
    return optimizer, ps


@pytest.mark.parametrize("missed", [False, True], ids=["hit", "miss"])
def test_a_write_counts_and_its_neighbours_keep_their_bits(mode, dtype, missed):
    optimizer, ps = trained(mode, dtype)
    before = masters(optimizer)
    assert any((m != m.to(dtype).float()).any() for m in before), "the masters have no bits to lose"
    with torch.no_grad():
        ps[1].clamp_(-0.5, 0.5)
    clamped = ps[1].detach().float().abs() == 0.5
    assert 0 < clamped.sum() < clamped.numel()
    if missed:
        optimizer._plan.forget()
        ps[2].grad = None
    train(optimizer, ps, 1, grad=0.0)
    after = masters(optimizer)
    assert torch.equal(after[1][~clamped], before[1][~clamped])
    if mode == "fp32":
        assert torch.equal(after[1][clamped], ps[1].detach().float()[clamped])
    else:  # the bits that the weight lacks stay, wherever it went
        torch.testing.assert_close(after[1][clamped].abs(), torch.full_like(after[1][clamped], 0.5), rtol=2**-7, atol=0)
    assert ps[1].abs().max() <= 0.5
    assert all(torch.equal(after[i], before[i]) for i in (0, 2))


def test_a_write_that_changes_nothing_keeps_every_bit(mode, dtype):
    optimizer, ps = trained(mode, dtype)
    before = masters(optimizer)
    with torch.no_grad():
        for p in ps:
            p.mul_(1.0)
            p.copy_(p.clone())
    train(optimizer, ps, 1, grad=0.0)
    assert all(map(torch.equal, masters(optimizer), before))


def test_a_mask_leaves_nothing_in_the_export(mode, dtype):
    """Not even what is below the smallest weight; in the export before the next step, too."""
    ps = [torch.nn.Parameter(torch.full((64,), 2.0**-3, dtype=dtype))]
    optimizer = akopt.SGD(ps, lr=2.0**-20, master_weights=mode)
    train(optimizer, ps, 1, grad=-1.0)
    model = torch.nn.ParameterList(ps)
    assert ak.fp32_state_dict(model, optimizer)["0"].eq(2.0**-3 + 2.0**-20).all()
    with torch.no_grad():
        ps[0][:32] = 0
    exported = ak.fp32_state_dict(model, optimizer)["0"]
    assert exported[:32].eq(0).all()
    assert exported[32:].ne(0).all()
    assert torch.equal(exported, masters(optimizer)[0])


def test_infinities_are_what_was_written(mode, dtype):
    """Low bits beside an infinity would be a NaN, or a large finite number."""
    optimizer, ps = trained(mode, dtype)
    before = masters(optimizer)
    with torch.no_grad():
        ps[0][:2], ps[0][2:4] = torch.inf, -torch.inf
    infinite = ps[0].detach().float()
    exported = ak.fp32_state_dict(torch.nn.ParameterList(ps), optimizer)["0"]
    assert torch.equal(exported[:4], infinite[:4])
    assert torch.equal(exported[4:], before[0][4:])
    train(optimizer, ps, 1, grad=0.0)
    assert torch.equal(masters(optimizer)[0], exported)
    assert torch.equal(ps[0].float(), infinite)


def test_the_distance_of_a_master_from_a_written_weight(mode, dtype):
    """A split one half a unit in the last place, until it is told to take over the weights as they are."""
    optimizer, ps = trained(mode, dtype)
    with torch.no_grad():
        ps[0].fill_(1.0)
    distance = (masters(optimizer)[0] - 1).abs()
    assert distance.max() <= (torch.finfo(dtype).eps / 2 if mode == "split" else 0)
    optimizer.reload_model_params()
    assert masters(optimizer)[0].eq(1).all()


def test_memory_put_in_its_place_counts(mode, dtype):
    optimizer, ps = trained(mode, dtype)
    ps[0].data = torch.zeros_like(ps[0])
    train(optimizer, ps, 1, grad=0.0)
    assert not ps[0].any()
    assert not masters(optimizer)[0].any()


def test_each_write_is_seen_also_after_other_parameters_took_part(mode, dtype):
    optimizer, ps = trained(mode, dtype)
    for absent in (2, 1, 2):
        with torch.no_grad():
            ps[0].fill_(0.25 * (absent + 1))
            ps[absent].zero_()
        for i, p in enumerate(ps):
            p.grad = None if i == absent else torch.zeros_like(p)
        optimizer.step()
        assert ps[0].eq(0.25 * (absent + 1)).all()
        assert not ps[absent].any()
    train(optimizer, ps, 1, grad=0.0)
    assert not ps[1].any()
    assert not ps[2].any()


def test_a_loaded_master_wins_until_its_parameter_is_written(mode, dtype):
    optimizer, ps = trained(mode, dtype)
    saved, weights = optimizer.state_dict(), [p.detach().clone() for p in ps]
    fresh = params(dtype)
    other = akopt.SGD(fresh, lr=2.0**-11, master_weights=mode)
    other.load_state_dict(saved)
    with torch.no_grad():
        for p, w in zip(fresh, weights, strict=True):
            p.copy_(w)  # the model's checkpoint after the optimizer's: nothing is lost
    train(other, fresh, 1)
    train(optimizer, ps, 1)
    assert all(map(torch.equal, fresh, ps))
    assert all(map(torch.equal, masters(other), masters(optimizer)))


def test_a_skipped_step_takes_the_write(mode, dtype):
    optimizer, ps = trained(mode, dtype, skip_nonfinite=True)
    with torch.no_grad():
        ps[0].fill_(0.75)
    train(optimizer, ps, 1, grad=float("inf"))
    train(optimizer, ps, 1, grad=0.0)
    assert ps[0].eq(0.75).all()


def test_inference_tensors_have_no_counters(mode, dtype):
    with torch.inference_mode():
        ps = [torch.ones(5, dtype=dtype)]
        optimizer = akopt.SGD(ps, lr=0.5, master_weights=mode)
        ps[0].grad = torch.ones(5, dtype=dtype)
        optimizer.step()
        ps[0].grad = torch.ones(5, dtype=dtype)
        optimizer.step()
    assert ps[0].eq(0).all()
    assert optimizer.state[ps[0]].get("master", torch.zeros(1, dtype=f32)).eq(0).all()


def test_a_load_is_no_write_of_others(mode, dtype):
    """A split master sets its parameter, too; what is below the smallest weight stays."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = torch.tensor([smallest / 4, -smallest / 8, 1.0])
    optimizer, ps = trained(mode, dtype)
    state = optimizer.state_dict()
    for i, param in enumerate(ps):
        state["state"][i]["master"] = values.repeat(param.numel())[: param.numel()].view_as(param)
    optimizer.load_state_dict(state)
    before = masters(optimizer)
    assert all(map(torch.equal, before, (values["master"] for values in state["state"].values())))
    train(optimizer, ps, 1, grad=0.0)
    assert all(map(torch.equal, masters(optimizer), before))
