"""Constructor, groups and bad input: what torch accepts is accepted, what cannot work is refused before anything changes."""

import inspect
import pydoc
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

import amp_kernels.optim as akopt

from .optimizers import (
    EACH,
    ELEMENTWISE,
    NAMES,
    REFERENCES,
    TORCHS,
    copies,
    f16,
    f32,
    fill,
    make,
    same,
    snapshot,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optim.md"
HINTS = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
NAN = float("nan")


def params(n=2, dtype=f32):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(n)]


def matrices():
    return [torch.nn.Parameter(torch.ones(3, 2))]


# ---- signatures ----


@EACH
def test_completion_shows_documented_names_only(name):
    (documented,) = re.findall(r"inherited_members: \[(.*)\]", PAGE.read_text())
    theirs = set(dir(torch.optim.SGD(params())))
    shown = {name for name in dir(make(name, matrices())) if not name.startswith("_")} - theirs
    assert shown == {*akopt.MixedPrecision.__annotations__, *documented.split(", ")} - theirs


@EACH
def test_signature_starts_with_the_references(name):
    ours, theirs = (inspect.signature(kind).parameters for kind in (getattr(akopt, name), REFERENCES[name]))
    positional = [[k for k, v in side.items() if v.kind is v.POSITIONAL_OR_KEYWORD] for side in (ours, theirs)]
    assert positional[0] == positional[1]
    assert {k: ours[k].default for k in HINTS} == HINTS
    assert all(ours[key].default == parameter.default for key, parameter in theirs.items())


@ELEMENTWISE
def test_the_shared_options_are_in_every_signature(name):
    """One by one, with types and defaults, for help(), inspect and tools that read annotations."""
    kind = getattr(akopt, name)
    shown = inspect.signature(kind).parameters
    options = akopt.MixedPrecision.__annotations__
    assert list(shown)[-len(options) :] == list(options)
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]
    for key, annotation in options.items():
        assert shown[key].annotation == typing.get_type_hints(kind.__init__)[key] == annotation
        assert getattr(kind(params()), key) == shown[key].default
    assert "master_weights: Literal['fp32', 'split', 'split24', 'none', 'none_rne'] = 'fp32'" in pydoc.render_doc(kind)
    assert all(f"\n    {key}: " in inspect.getdoc(akopt.MixedPrecision) for key in options)

    class Derived(kind):
        def __init__(self, params, extra=1, **kwargs):
            super().__init__(params, **kwargs)

    assert list(inspect.signature(Derived).parameters) == ["params", "extra", "kwargs"]


@TORCHS
def test_isinstance_and_group_keys(name):
    ours, theirs = make(name, params()), getattr(torch.optim, name)(params(), lr=1e-2, fused=True)
    assert isinstance(ours, getattr(torch.optim, name))
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert ours.defaults == theirs.defaults


@pytest.mark.parametrize(("name", "own"), [("Lion", set()), ("LAMB", {"eps", "bias_correction", "use_nvlamb"})])
def test_group_keys_where_torch_has_no_such_optimizer(name, own):
    keys = make("AdamW", params()).param_groups[0].keys() - {"eps", "amsgrad", "decoupled_weight_decay"}
    assert make(name, params()).param_groups[0].keys() == keys | own


@ELEMENTWISE
def test_named_parameters_repr_and_zero_grad(name):
    model = torch.nn.Linear(2, 2)
    optimizer = make(name, model.named_parameters(), master_weights="split", max_grad_norm=0.5)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    shown = repr(optimizer)
    assert shown.startswith(f"{name} (\n    master_weights: split\n    shadow_dtype: None\n")
    assert "    max_grad_norm: 0.5\n" in shown
    assert "\nParameter Group 0\n" in shown
    for set_to_none in (False, True):
        fill(model.parameters(), 1.0)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())


@EACH
def test_hints_without_effect_are_accepted(name):
    hints = [{"foreach": True}, {"foreach": False}, {"fused": False}, {"fused": True}]
    for hint in hints + [{"capturable": True}] * (name != "SGD"):
        group = make(name, params(), **hint).param_groups[0]
        assert group["fused"] is True
        assert group["foreach"] is None


# ---- numbers and options ----

#: For every optimizer that has the argument. If there are two texts, the first is torch's constructor's.
BAD = [
    ("lr", -1.0, ValueError, "Invalid learning rate: -1.0"),
    ("lr", torch.ones(2), ValueError, "Tensor lr must be 1-element|lr is a tensor of 2 elements; accepted: 1-element"),
    ("eps", -1.0, ValueError, "Invalid epsilon value: -1.0"),
    ("eps", torch.tensor(1e-6), ValueError, r"eps is a tensor; accepted: a number \(only lr may be a tensor\)"),
    ("betas", (1.0, 0.9), ValueError, "Invalid beta parameter at index 0: 1.0"),
    ("betas", (0.9, -0.1), ValueError, "Invalid beta parameter at index 1: -0.1"),
    ("betas", (0.9, NAN), ValueError, "nan"),
    ("betas", (0.9, torch.tensor(0.9)), ValueError, r"both floats or both Tensors|betas\[1\] is a tensor"),
    ("betas", (torch.tensor(0.9), torch.tensor(0.9)), ValueError, r"betas\[0\] is a tensor"),
    *(("betas", betas, ValueError, "betas is .*; accepted: 2 numbers") for betas in (0.9, (0.9,), (0.9, 0.99, 0.999))),
    ("betas", ("a", 0.9), TypeError, r"betas\[0\] is 'a', of type str; accepted: a number"),
    ("lr", None, TypeError, "lr is None, of type NoneType; accepted: a number"),
    ("lr", np.ones(2), TypeError, r"lr is array\(\[1., 1.\]\), of type numpy.ndarray; accepted: a number"),
    ("eps", None, TypeError, "eps is None, of type NoneType; accepted: a number"),
    ("weight_decay", [0.1], TypeError, r"weight_decay is \[0.1\], of type list; accepted: a number"),
    ("momentum", -1.0, ValueError, "Invalid momentum value: -1.0"),
    ("nesterov", True, ValueError, "Nesterov momentum requires a momentum and zero dampening"),
    ("weight_decay", -1.0, ValueError, "Invalid weight_decay value: -1.0"),
    ("weight_decay", torch.tensor(0.1), ValueError, "weight_decay is a tensor"),
    *((key, NAN, ValueError, "nan") for key in ("lr", "eps", "weight_decay", "momentum", "dampening")),
    ("differentiable", True, RuntimeError, "differentiable is True; accepted: False"),
    ("foreach", True, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
    (
        "sede",
        3,
        TypeError,
        "got an unexpected keyword argument 'sede'; the options of every optimizer here are master_w",
    ),
    ("sede", "3", TypeError, "got an unexpected keyword argument 'sede'"),
    ("shard_group", "world", TypeError, "shard_group is 'world', of type str; accepted: None, a process group"),
    ("master_weights", "bf16", ValueError, "is 'bf16'; accepted: 'fp32', 'split', 'split24', 'none', 'none_rne'"),
    ("shadow_dtype", f32, ValueError, "shadow_dtype is torch.float32; accepted: None, float16, bfloat16"),
    ("state_dtype", f16, ValueError, "state_dtype is torch.float16; accepted: float32, bfloat16, '8bit'"),
    ("max_grad_norm", -1.0, ValueError, "max_grad_norm is -1.0"),
    ("max_grad_norm", NAN, ValueError, "max_grad_norm is nan"),
    ("ema_decay", 1.0, ValueError, "ema_decay is 1.0; accepted: None, a number from 0 to below 1"),
    ("ema_decay", -0.1, ValueError, "ema_decay is -0.1"),
    ("ema_decay", NAN, ValueError, "ema_decay is nan"),
    ("ema_decay", torch.tensor(0.9), ValueError, "ema_decay is a tensor"),
    ("ema_decay", "0.9", TypeError, "ema_decay is '0.9', of type str; accepted: None, a number from 0 to below 1"),
    (
        "max_grad_norm",
        torch.ones(2),
        TypeError,
        r"max_grad_norm is tensor\(\[1., 1.\]\), of type torch.Tensor; accepted",
    ),
    ("skip_nonfinite", "no", TypeError, "skip_nonfinite is 'no', of type str; accepted: True, False"),
    ("spike_action", "skip", ValueError, "spike_action is 'skip', and there is no spike_zscore; accepted: with one"),
    ("seed", -1, ValueError, r"seed is -1; accepted: an integer from 0 to 2\*\*63 - 1"),
    ("seed", 2**63, ValueError, "seed is 9223372036854775808"),
    ("seed", 0.5, ValueError, "seed is 0.5"),
]
CASES = [
    (n, *b)
    for n in NAMES
    for b in BAD
    if (b[0] in inspect.signature(getattr(akopt, n)).parameters or b[0] == "sede") and (n, b[0]) != ("Muon", "nesterov")
]


@pytest.mark.parametrize(("name", "key", "value", "error", "text"), CASES)
def test_bad_options(name, key, value, error, text):
    with pytest.raises(error, match=text):
        make(name, matrices(), **{"lr": 1e-2, key: value}, **({"fused": True} if key == "foreach" else {}))
    optimizer = make(name, matrices())
    if error is ValueError and key in optimizer.param_groups[0]:  # the same in a group added later
        with pytest.raises(ValueError):  # noqa: PT011  (the wording is the constructor's)
            optimizer.add_param_group({"params": matrices(), key: value})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", 0.1),
        ("master_weights", "split"),
        ("shadow_dtype", f16),
        ("skip_nonfinite", True),
        ("unscale_grads", True),
        ("zero_grads", True),
    ],
)
def test_an_option_of_the_optimizer_is_not_ignored_in_a_group(option, value):
    refused = f"AdamW: {option} is an option of the optimizer, where it is .* ema_decay, seed"
    with pytest.raises(ValueError, match=refused):
        make("AdamW", [{"params": params(), option: value}])
    optimizer = make("AdamW", params(), **{option: value})
    optimizer.add_param_group({"params": params(1), option: value})  # what holds anyway
    assert option not in optimizer.param_groups[1]
    saved = make("AdamW", [{"params": params(1)}, {"params": params(1)}]).state_dict()
    for group in saved["param_groups"]:
        group[option] = value
    loading = make("AdamW", [{"params": params(1)}, {"params": params(1)}])
    if option != "max_grad_norm":
        with pytest.raises(ValueError, match=refused):
            loading.load_state_dict(saved)
        return
    loading.load_state_dict(saved)  # Apex keeps it there
    assert loading.max_grad_norm == value
    saved["param_groups"][0][option] = 0.2
    with pytest.raises(ValueError, match=r"groups have the max_grad_norms \[0.1, 0.2\]; accepted: the same one in all"):
        loading.load_state_dict(saved)


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("master_weight", "master_weights (in the constructor)"),
        ("max_gradnorm", "max_grad_norm (in the constructor)"),
        ("maxGradNorm", "max_grad_norm (in the constructor)"),
        ("zero_grad", "zero_grads (in the constructor)"),
        ("EMA_decay", "ema_decay (in a group)"),
        ("weigth_decay", "weight_decay (in a group)"),
        ("weight_decays", "weight_decay (in a group)"),
        ("amsgard", "amsgrad (in a group)"),
        ("LR", "lr (in a group)"),
    ],
)
def test_a_misspelt_option_in_a_group_is_refused(key, right):
    text = re.escape(f"AdamW: param_groups[1] has the key {key!r}, which is no option; accepted: {right}")
    with pytest.raises(ValueError, match=text):
        make("AdamW", [{"params": params(1)}, {"params": params(1), key: 0.1}])
    optimizer, group = make("AdamW", params(1)), {"params": params(1), key: 0.1}
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert group.keys() == {"params", key}


#: Keys that schedulers, model libraries, Apex and optimizers elsewhere keep in groups.
FOREIGN = """
    name names group_name layer layer_id layer_name lr_scale lr_mult lr_decay lr_max initial_lr max_lr min_lr swa_lr
    base_momentum max_momentum initial_weight_decay weight_decay_scale weight_decay_mult no_weight_decay wd decay
    decay_mult beta beta1 beta3 d0 rho adaptive use_muon trust_clip always_adapt caution clip adam_w_mode step_size
    grad_averaging use_nvlamb max_norm grad_norm param_group ema is_bias frozen k r
"""
TORCH_OPTIMIZERS = [
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind.__module__ != "torch.optim.optimizer"
]


@ELEMENTWISE
def test_keys_of_others_stay_in_a_group(name):
    """torch keeps keys that it does not know, and its optimizers hand over groups with all of theirs."""
    foreign = dict.fromkeys(FOREIGN.split(), True) | {0: "a key that is no text"}
    for kind in TORCH_OPTIMIZERS:
        foreign.update(kind([torch.nn.Parameter(torch.ones(2, 2))]).defaults)
    foreign = {key: value for key, value in foreign.items() if key not in make(name, params(1)).param_groups[0]}
    optimizer = make(name, [{"params": params(1), **foreign}])
    optimizer.add_param_group({"params": params(1), **foreign})
    loading = make(name, [{"params": params(1)}, {"params": params(1)}])
    loading.load_state_dict(optimizer.state_dict())
    for group in (*optimizer.param_groups, *loading.param_groups):
        assert {key: group[key] for key in foreign} == foreign


def test_a_loaded_group_keeps_every_key():
    saved = torch.optim.AdamW(params(1)).state_dict()
    saved["param_groups"][0]["weight_decays"] = 0.1
    optimizer = make("AdamW", params(1))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weight_decays"] == 0.1


@EACH
@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("lr", NAN, "lr is nan"),
        ("lr", np.float32("nan"), "lr is nan"),
        ("weight_decay", np.float32("nan"), "weight_decay is nan"),
        ("lr", None, "lr is None, of type NoneType"),
        ("eps", [1e-8], r"eps is \[1e-08\], of type list"),
        ("betas", 0.9, "betas is 0.9; accepted: 2 numbers"),
        ("lr", "0.1", "lr is '0.1', of type str; accepted: a number"),
        ("weight_decay", "0.1", "weight_decay is '0.1', of type str; accepted: a number"),
        ("betas", (0.9, NAN), r"betas is \(0.9, nan\)"),
        ("betas", [0.9, NAN], r"betas is \[0.9, nan\]"),
        ("betas", (0.9, "0.99"), r"betas is \(0.9, '0.99'\), of type str; accepted: a number"),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_scheduler_that_writes_no_number_changes_nothing(name, key, value, text, steps):
    """Before the first step, and where only addresses are read anew."""
    p = params(1)[0]
    optimizer = make(name, [p])
    if key not in optimizer.param_groups[0]:
        return
    for _ in range(steps):
        fill([p], 1.0)
        optimizer.step()
    fill([p], 1.0)
    before = snapshot(optimizer)
    optimizer.param_groups[0][key] = value
    with pytest.raises((ValueError, TypeError), match=f"{name}: {text}"):
        optimizer.step()
    assert same(before, snapshot(optimizer))
    if text.endswith("a number"):
        with pytest.raises(TypeError, match=f"{name}: {key}.* is '0.*', of type str; accepted: a number"):
            make(name, [{"params": copies([p]), key: value}])


# ---- parameters and gradients ----


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameter_dtypes_that_are_refused(name, dtype):
    tensor = torch.zeros(3, dtype=dtype, requires_grad=True)
    with pytest.raises(TypeError, match=f"params\\[0\\] is {dtype}; accepted: float16, bfloat16, float32"):
        make(name, [tensor])


LEAF = torch.ones(3, requires_grad=True)


@ELEMENTWISE
@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([LEAF * 2], ValueError, "can't optimize a non-leaf Tensor"),
        ([], ValueError, "optimizer got an empty parameter list"),
        (LEAF, TypeError, "params argument given to the optimizer should be"),
        ([{"params": [LEAF]}, {"params": [LEAF]}], ValueError, "is the same parameter as"),
        (["x"], TypeError, "optimizer can only optimize Tensors"),
        ([LEAF, LEAF], ValueError, "is the same parameter as"),
    ],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_lists_that_are_refused(name, bad, error, text):
    with pytest.raises(error, match=text):
        make(name, bad)


@ELEMENTWISE
@pytest.mark.parametrize("gaps", [lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6)], ids=["strided", "expanded"])
def test_parameters_with_gaps_are_refused(name, gaps):
    bad = gaps(torch.ones(4, 6)).requires_grad_()
    with pytest.raises(ValueError, match=r"params\[1\] is float32\[4, .\] with strides .* which leaves gaps in memory"):
        make(name, [LEAF, bad])
    optimizer = make(name, [LEAF])
    with pytest.raises(ValueError, match=r"params\[0\] is float32"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    make(name, [LEAF, bad.detach()])  # frozen, it is never read
    with pytest.raises(ValueError, match=r"head\.weight is float32\[4, .\] with strides"):
        make(name, [("body.weight", LEAF), ("head.weight", bad)])


@EACH
@pytest.mark.parametrize(
    ("kind", "error", "text"), [("sparse", RuntimeError, "sparse gradients"), ("complex", TypeError, "complex64")]
)
def test_bad_gradients_change_nothing(name, kind, error, text):
    good, bad = params(2)
    optimizer = make(name, [good, bad])
    for _ in range(3):
        fill([good, bad], 1.0)
        optimizer.step()
    before = snapshot(optimizer)
    bad.grad, bad.grad_dtype = None, None
    bad.grad = torch.ones(3).to_sparse() if kind == "sparse" else torch.ones(3, dtype=torch.complex64)
    with pytest.raises(error, match=text):
        optimizer.step()
    assert same(before, snapshot(optimizer))
