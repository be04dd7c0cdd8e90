"""States of bitsandbytes' and torchao's optimizers, built by hand as their sources describe them."""

import pytest
import torch

import amp_kernels.optim as akopt

from ..helpers.generators import normal
from .optimizers import make

SHAPE = (65, 96)  # 24.4 blocks of 256
TABLE = torch.linspace(-1, 1, 256)


def coded(number, seed):
    """uint8 indices, their table and one scale for each 256; and the values."""
    index = torch.randint(256, SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    scale = normal(25, seed=seed).abs() + 0.1
    table = TABLE if number == 1 else TABLE.abs()
    values = torch.empty(SHAPE)
    for i, code in enumerate(index.view(-1).tolist()):
        values.view(-1)[i] = table[code] * scale[i // 256]
    return {f"state{number}": index, f"qmap{number}": table, f"absmax{number}": scale}, values


def saved(state, **group):
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0], **group}
    return {"state": {0: state}, "param_groups": [group]}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}])
def test_adamw_of_bitsandbytes(nested, options):
    (first, m), (second, v) = coded(1, 0), coded(2, 1)
    kept = {**first, **second}
    state = {"step": 7, "__bnb_optimizer_quant_state__": kept} if nested else {"step": 7, **kept}
    optimizer = akopt.AdamW([torch.nn.Parameter(normal(*SHAPE))], **options)
    optimizer.load_state_dict(saved(state))
    found = optimizer.state_dict()["state"][0]
    assert found.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert found["step"] == 7
    for name, wanted in (("exp_avg", m), ("exp_avg_sq", v)):
        error = (found[name] - wanted).abs()
        blocks = wanted.abs().view(-1, 32).amax(1, keepdim=True).view(-1, 1)
        allowed = (blocks * 2**-4).expand(-1, 32).reshape(SHAPE) if options else torch.zeros(SHAPE)
        assert (error <= allowed).all()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(SHAPE)
    optimizer.step()


@pytest.mark.parametrize(("name", "moment"), [("Lion", "exp_avg"), ("SGD", "momentum_buffer")])
def test_one_moment_and_32_bits_of_bitsandbytes(name, moment):
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = make(name, [torch.nn.Parameter(normal(*SHAPE))], **options)
    group = {"momentum": 0.9, "dampening": 0.0, "nesterov": False} if name == "SGD" else {}
    state, values = coded(1, 0)
    optimizer.load_state_dict(saved({"step": 2, **state}, **group))
    assert torch.equal(optimizer.state_dict()["state"][0][moment], values)
    optimizer.load_state_dict(saved({"step": 2, "state1": values}, **group))
    assert torch.equal(optimizer.state_dict()["state"][0][moment], values)


class Packed(torch.Tensor):
    """A wrapper as torchao's: codes, scales and a table, or fp8 codes; its class is not known here."""

    @staticmethod
    def __new__(cls, codes, scale, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, table):
        self.codes, self.scale, self.table = codes, scale, table

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function}: nobody may compute with codes")

    def dequantize(self, output_dtype=None):
        blocks = self.table[self.codes.long()].view(-1, 240) * self.scale.view(-1, 1)
        return blocks.view(self.codes.shape)


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}])
def test_adamw_of_torchao(options):
    codes = torch.arange(65 * 96).view(SHAPE).to(torch.uint8)
    packed = [Packed(codes, normal(26, seed=i).abs(), table) for i, table in enumerate((TABLE, TABLE.abs()))]
    optimizer = akopt.AdamW([torch.nn.Parameter(normal(*SHAPE))], **options)
    optimizer.load_state_dict(saved({"step": torch.tensor(3.0), "exp_avg": packed[0], "exp_avg_sq": packed[1]}))
    found, dtype = optimizer.state_dict()["state"][0], options.get("state_dtype", torch.float32)
    assert torch.equal(found["exp_avg"], packed[0].dequantize().to(dtype))
    assert torch.equal(found["exp_avg_sq"], packed[1].dequantize().to(dtype))
    assert found["step"] == 3


@pytest.mark.parametrize(
    "change", [lambda s: s.pop("qmap1"), lambda s: s.pop("absmax1"), lambda s: s.update(absmax1=torch.ones(24))]
)
def test_codes_that_cannot_be_read_are_refused(change):
    state, _ = coded(1, 0)
    change(state)
    optimizer = akopt.Lion([torch.nn.Parameter(normal(*SHAPE))])
    with pytest.raises(
        ValueError, match=r"state1 is uint8 of shape \[65, 96\]; accepted: with qmap1, and with absmax1 of 25"
    ):
        optimizer.load_state_dict(saved({"step": 1, **state}))
    assert not optimizer.state
