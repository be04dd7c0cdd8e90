"""The table of docs/guide/autocast.md tells what autocast does: every op of it is called and its dtypes looked at, on the CPU and on a
GPU that is only pretended, whose autocast rules are the real ones."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

LOWER = torch.bfloat16
GUIDE = (Path(__file__).parents[2] / "docs/guide/autocast.md").read_text(encoding="utf-8")
#: Of this package's ops and of torch's: the rule on a GPU and on a CPU.
TABLES = {"ak": {}, "torch": {}}
for who, ops, cuda, cpu in re.findall(r"^\| (ak|torch): (.*?) \| (.*?) \| (.*?) \|", GUIDE, re.MULTILINE):
    TABLES[who] |= {op: {"cuda": cuda, "cpu": cpu} for op in re.findall("`(.*?)`", ops)}
#: (dtype of the result, whether a 16-bit input was cast) from 16 bits, and the same from fp32.
SIGNATURES = {
    ((LOWER, False), (LOWER, True)): "lower",
    ((LOWER, False), (LOWER, False)): "fp32 inside",
    ((torch.float32, False), (torch.float32, False)): "fp32 result",
    ((torch.float32, True), (torch.float32, False)): "fp32",
    ((LOWER, False), (torch.float32, False)): "input dtype kept",
    # Ops that torch composes (attention on an unknown GPU, rms_norm on the CPU) widen 16 bits on the way.
    ((LOWER, True), (LOWER, True)): "lower",
    ((LOWER, True), (torch.float32, False)): "input dtype kept",
}


def _target(x):
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


def _ctc(x):
    lengths = torch.tensor([2] * x.shape[1]), torch.tensor([1] * x.shape[1])
    return F.ctc_loss(x, torch.ones(x.shape[1], 1, dtype=torch.int64, device=x.device), *lengths)


#: A call of each op: a function of fresh random tensors in the dtype under test.
OURS = {
    "linear": lambda new: ak.linear(new(4, 8), new(8, 8)),
    "matmul": lambda new: ak.matmul(new(4, 8), new(8, 8)),
    "grouped_mm": lambda new: ak.grouped_mm(new(2, 4, 8), new(2, 8, 8), bias=new(2, 8)),
    "addmm": lambda new: ak.addmm(new(4, 8), new(4, 8), new(8, 8)),
    "baddbmm": lambda new: ak.baddbmm(new(2, 4, 8), new(2, 4, 8), new(2, 8, 8)),
    "mlp": lambda new: ak.mlp(new(4, 8), new(8, 8), None, new(8, 8)),
    "layer_norm": lambda new: ak.layer_norm(new(4, 8), 8, new(8), new(8)),
    "rms_norm": lambda new: ak.rms_norm(new(4, 8), 8, new(8)),
    "rotary": lambda new: ak.rotary(new(1, 2, 4, 8), new(1, 1, 4, 8), new(4, 8), new(4, 8))[0],
    "gelu": lambda new: ak.gelu(new(4, 8)),
    "silu": lambda new: ak.silu(new(4, 8)),
    "swiglu": lambda new: ak.swiglu(new(4, 8)),
    "embedding": lambda new: ak.embedding(torch.zeros(2, dtype=torch.int64, device=(w := new(4, 4)).device), w),
    "cross_entropy": lambda new: ak.cross_entropy(x := new(4, 8), _target(x)),
    "linear_cross_entropy": lambda new: ak.linear_cross_entropy(x := new(4, 8), new(8, 8), _target(x)),
    "linear_log_probs": lambda new: ak.linear_log_probs(x := new(4, 8), new(8, 8), _target(x)),
}
TORCHS = {
    "linear": lambda new: F.linear(new(4, 8), new(8, 8)),
    "matmul": lambda new: new(4, 8) @ new(8, 8),
    "mm": lambda new: torch.mm(new(4, 8), new(8, 8)),
    "bmm": lambda new: torch.bmm(new(2, 4, 8), new(2, 8, 8)),
    "addmm": lambda new: torch.addmm(new(4, 8), new(4, 8), new(8, 8)),
    "baddbmm": lambda new: torch.baddbmm(new(2, 4, 8), new(2, 4, 8), new(2, 8, 8)),
    "conv1d": lambda new: F.conv1d(new(2, 4, 8), new(4, 4, 3)),
    "conv2d": lambda new: F.conv2d(new(2, 4, 8, 8), new(4, 4, 3, 3)),
    "conv3d": lambda new: F.conv3d(new(2, 4, 8, 8, 8), new(4, 4, 3, 3, 3)),
    "conv_transpose2d": lambda new: F.conv_transpose2d(new(2, 4, 8, 8), new(4, 4, 3, 3)),
    "scaled_dot_product_attention": lambda new: F.scaled_dot_product_attention(*(new(2, 4, 8, 8) for _ in range(3))),
    "prelu": lambda new: F.prelu(new(4, 8), new(1)),
    "softmax": lambda new: F.softmax(new(4, 8), -1),
    "log_softmax": lambda new: F.log_softmax(new(4, 8), -1),
    "layer_norm": lambda new: F.layer_norm(new(4, 8), (8,)),
    "group_norm": lambda new: F.group_norm(new(4, 8), 2),
    "rms_norm": lambda new: F.rms_norm(new(4, 8), (8,)),
    "cross_entropy": lambda new: F.cross_entropy(x := new(4, 8), _target(x)),
    "nll_loss": lambda new: F.nll_loss(x := new(4, 8), _target(x)),
    "mse_loss": lambda new: F.mse_loss(new(4, 8), new(4, 8)),
    "l1_loss": lambda new: F.l1_loss(new(4, 8), new(4, 8)),
    "smooth_l1_loss": lambda new: F.smooth_l1_loss(new(4, 8), new(4, 8)),
    "kl_div": lambda new: F.kl_div(new(4, 8), new(4, 8), reduction="sum"),
    "binary_cross_entropy_with_logits": lambda new: F.binary_cross_entropy_with_logits(new(4, 8), new(4, 8)),
    "ctc_loss": lambda new: _ctc(new(5, 2, 4)),
    "exp": lambda new: new(4).exp(),
    "log": lambda new: new(4).log(),
    "pow": lambda new: new(4).pow(2),
    "rsqrt": lambda new: new(4).rsqrt(),
    "logsumexp": lambda new: new(4, 4).logsumexp(1),
    "softplus": lambda new: F.softplus(new(4)),
    "sum": lambda new: new(4).sum(),
    "cumsum": lambda new: new(4).cumsum(0),
    "prod": lambda new: new(4).prod(),
    "interpolate": lambda new: F.interpolate(new(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "embedding": lambda new: F.embedding(torch.zeros(2, dtype=torch.int64, device=(w := new(4, 4)).device), w),
    "dropout": lambda new: F.dropout(new(4), 0.5),
    "batch_norm": lambda new: F.batch_norm(new(4, 4), None, None, training=True),
    "relu": lambda new: F.relu(new(4)),
    "gelu": lambda new: F.gelu(new(4)),
    "silu": lambda new: F.silu(new(4)),
    "tanh": lambda new: new(4).tanh(),
}
PAIRS = {"cat": torch.cat, "stack": torch.stack}


class Casts(TorchDispatchMode):
    """True if a tensor of the dtype under test was cast."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.seen = dtype, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == self.dtype != result.dtype:
            self.seen = True
        return result


@contextlib.contextmanager
def autocast(device):
    """torch.autocast without its check that the device is there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, LOWER)
    try:
        with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
            yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def observed(call, device):
    def once(dtype):
        new = lambda *shape: torch.rand(shape, device=device).to(dtype)  # noqa: E731
        with autocast(device), Casts(dtype) as casts:
            result = call(new)
            return result.dtype, casts.seen

    return once(LOWER), once(torch.float32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("who", "calls"), [("ak", OURS), ("torch", TORCHS)], ids=["ak", "torch"])
def test_the_rules_are_those_of_the_dispatcher(who, calls, device):
    calls, rules, wanted = dict(calls), {}, {op: rule[device] for op, rule in TABLES[who].items()}
    if who == "torch" and torch.__version__ < "2.12":
        wanted["rms_norm"] = "input dtype kept"
    if who == "torch" and device == "cuda":  # no shape function of ctc_loss
        del calls["ctc_loss"]
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::ctc_loss.IntList", "AutocastCUDA")
        rules["ctc_loss"] = "input dtype kept"
    if who == "ak" and device == "cuda" and torch.version.cuda is None:  # there no slice of a pretended tensor
        for name in ("linear_cross_entropy", "linear_log_probs"):
            del calls[name], wanted[name]
    for name, call in calls.items():
        found = observed(call, device)
        rules[name] = SIGNATURES.get(found, found)
    for name in {"linear_cross_entropy", "linear_log_probs"} & set(rules):  # products of lower, the result fp32
        assert rules[name] == ((torch.float32, False), (torch.float32, True))
        rules[name] = "lower"
    if who == "torch":
        for name, op in PAIRS.items():
            with autocast(device):
                x = torch.ones(2, device=device)
                assert [op([x.to(LOWER), x]).dtype, op([x.to(LOWER)] * 2).dtype] == [torch.float32, LOWER]
            rules[name] = "promote"
    assert rules == wanted


def test_every_op_with_a_rule_is_in_the_table():
    has_rule = {
        name
        for name in REGISTRY
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_kernels::{name}", "AutocastCUDA")
    }
    public = {"layer_norm": "norm", "rms_norm": "norm", "addmm": "baddbmm"}
    has_rule.discard("linear_split")  # linear with split=
    in_table = {public.get(op, op) for op, rule in TABLES["ak"].items() if rule["cuda"] != "input dtype kept"}
    assert in_table == has_rule


def test_every_rule_has_a_meaning():
    used = {rule for table in TABLES.values() for row in table.values() for rule in row.values()}
    assert all(f"\n| {rule} | " in GUIDE for rule in used)
