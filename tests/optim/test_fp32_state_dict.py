"""ak.fp32_state_dict: the float32 model behind the parameters, from masters or averages."""

import pytest
import torch

import amp_kernels as ak


class Model(torch.nn.Module):
    """Tied weights, a frozen layer, one that never gets a gradient, buffers of several dtypes, extra state."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.frozen = torch.nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.frozen(self.embed(x))))

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


def trained(dtype, *, steps=3, **options):
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = ak.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6)).float().square().mean().mul(step + 1).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["fp32", "split", "none", "none_rne"])
@pytest.mark.parametrize("ema", [False, True])
def test_weights_are_masters_or_averages(dtype, mode, ema):
    model, optimizer = trained(dtype, master_weights=mode, ema_decay=0.5)
    plain = model.state_dict()
    result = ak.fp32_state_dict(model, optimizer, ema=ema)
    assert list(result) == list(plain)
    assert result._metadata == plain._metadata
    state = dict(zip(map(id, optimizer.param_groups[0]["params"]), range(100), strict=False))
    saved = optimizer.state_dict()["state"]
    for key, param in model.named_parameters(remove_duplicate=False):
        values = saved.get(state.get(id(param)), {})
        wanted = values.get("ema" if ema else "master", param.detach())
        assert result[key].dtype == torch.float32
        assert torch.equal(result[key], wanted.float()), key
    assert ema == (not torch.equal(result["head.weight"].to(dtype), plain["head.weight"]))
    if dtype == torch.bfloat16 and mode in ("fp32", "split") and not ema:
        assert not torch.equal(result["head.weight"], plain["head.weight"].float())  # more than the parameter holds
    assert result["_extra_state"] == {"version": 3}


def test_buffers_keep_their_dtype_and_ties_stay_tied():
    model, optimizer = trained(torch.bfloat16)
    result = ak.fp32_state_dict(model, optimizer)
    for key, buffer in (("table", model.table), ("norm.running_mean", model.norm.running_mean)):
        assert result[key].dtype == torch.bfloat16
        assert torch.equal(result[key], buffer)
    assert result["norm.num_batches_tracked"].dtype == torch.int64
    assert result["head.weight"] is result["embed.weight"]


def test_a_float32_model_takes_it():
    model, optimizer = trained(torch.bfloat16, ema_decay=0.9)
    result = ak.fp32_state_dict(model, optimizer, ema=True)
    fresh = Model()
    fresh.load_state_dict(result)
    assert torch.equal(fresh.head.weight, result["embed.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_copy(dtype):
    model, optimizer = trained(dtype, ema_decay=0.9)
    results = [ak.fp32_state_dict(model, optimizer, ema=ema) for ema in (False, True)]
    kept = [{k: v.clone() for k, v in result.items() if isinstance(v, torch.Tensor)} for result in results]
    before = [p.detach().clone() for p in model.parameters()]
    for result in results:
        for value in result.values():
            if isinstance(value, torch.Tensor):
                assert not value.requires_grad
    optimizer.param_groups[0]["lr"] = 1.0
    model(torch.arange(6)).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before[0])
    for result, old in zip(results, kept, strict=True):
        assert all(torch.equal(result[key], value) for key, value in old.items())


def test_a_remainder_of_another_dtype_is_not_used():
    """The model was converted after the last step; what is left of a split master then belongs to no weight."""
    model, optimizer = trained(torch.bfloat16, master_weights="split")
    model.float()
    result = ak.fp32_state_dict(model, optimizer)
    assert torch.equal(result["head.weight"], model.head.weight)


def test_before_the_first_step():
    model, optimizer = trained(torch.bfloat16, steps=0, ema_decay=0.9)
    for ema in (False, True):
        result = ak.fp32_state_dict(model, optimizer, ema=ema)
        assert torch.equal(result["head.weight"], model.head.weight.float())


def test_refusals():
    model, optimizer = trained(torch.bfloat16)
    with pytest.raises(ValueError, match="ema=True, but the optimizer keeps no averages"):
        ak.fp32_state_dict(model, optimizer, ema=True)
    with pytest.raises(ValueError, match="none of the 7 parameters of the model is in the optimizer"):
        ak.fp32_state_dict(Model(), optimizer)
    with pytest.raises(
        TypeError, match=r"optimizer has type torch\.optim\.sgd\.SGD; accepted: one of amp_kernels\.optim"
    ):
        ak.fp32_state_dict(model, torch.optim.SGD(model.parameters()))
