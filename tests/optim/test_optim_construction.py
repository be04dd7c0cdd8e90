"""Constructor, groups and bad input: what torch accepts is accepted, what cannot work is refused before anything
changes."""

import inspect
import pickle
import pydoc
import re
import typing

import numpy as np
import pytest
import torch

import amp_kernels.optim as akopt

NAMES = ["AdamW", "Adam", "Lion", "SGD"]
EACH = pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])


def params(n=2, dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(n)]


def make(name, *args, **kw):
    return getattr(akopt, name)(*args, **kw)


@EACH
def test_signature_starts_with_torchs(name):
    ours = inspect.signature(getattr(akopt, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    positional = [k for k, v in theirs.items() if v.kind is v.POSITIONAL_OR_KEYWORD]
    assert [k for k, v in ours.items() if v.kind is v.POSITIONAL_OR_KEYWORD] == positional
    assert set(theirs) <= set(ours)
    for key, parameter in theirs.items():
        assert ours[key].default == parameter.default, key


@pytest.mark.parametrize("name", [*NAMES, "LAMB"])
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
    assert "master_weights: Literal['fp32', 'split', 'none', 'none_rne'] = 'fp32'" in pydoc.render_doc(kind)
    assert all(f"\n        {key}: " in akopt.MixedPrecision.__doc__ for key in options)

    class Derived(kind):
        def __init__(self, params, extra=1, **kwargs):
            super().__init__(params, **kwargs)

    assert list(inspect.signature(Derived).parameters) == ["params", "extra", "kwargs"]


@pytest.mark.parametrize("name", [*NAMES, "LAMB"])
def test_an_unknown_option_is_named(name):
    with pytest.raises(TypeError, match=f"{name} got an unexpected keyword argument 'sede'"):
        make(name, params(), sede=3, lr=0.1)


@pytest.mark.parametrize("name", [*NAMES, "LAMB"])
def test_repr_shows_the_options(name):
    shown = repr(make(name, params(), master_weights="split", max_grad_norm=0.5))
    assert shown.startswith(f"{name} (\n    master_weights: split\n    shadow_dtype: None\n")
    assert "    max_grad_norm: 0.5\n" in shown
    assert "\nParameter Group 0\n" in shown


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", 0.1),
        ("master_weights", "split"),
        ("state_dtype", torch.bfloat16),
        ("shadow_dtype", torch.float16),
        ("skip_nonfinite", True),
        ("zero_grads", True),
    ],
)
def test_an_option_of_the_optimizer_is_not_ignored_in_a_group(option, value):
    with pytest.raises(
        ValueError, match=f"AdamW: {option} is an option of the optimizer, where it is .* ema_decay, seed"
    ):
        make("AdamW", [{"params": params(), option: value}])
    optimizer = make("AdamW", params(), **{option: value})
    optimizer.add_param_group({"params": params(1), option: value})  # what holds anyway
    assert option not in optimizer.param_groups[1]
    saved = make("AdamW", params()).state_dict()
    saved["param_groups"][0][option] = value
    loading = make("AdamW", params())
    if option == "max_grad_norm":  # Apex keeps it there
        loading.load_state_dict(saved)
        assert loading.max_grad_norm == value
        two = make("AdamW", [{"params": params(1)}, {"params": params(1)}])
        saved = two.state_dict()
        saved["param_groups"][0][option], saved["param_groups"][1][option] = 0.1, 0.2
        with pytest.raises(ValueError, match=r"groups have the max_grad_norms \[0.1, 0.2\]"):
            two.load_state_dict(saved)
    else:
        with pytest.raises(ValueError, match=f"AdamW: {option} is an option of the optimizer"):
            loading.load_state_dict(saved)


@EACH
def test_isinstance_and_group_keys(name):
    ours, theirs = make(name, params()), getattr(torch.optim, name)(params(), fused=True)
    assert isinstance(ours, getattr(torch.optim, name))
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert ours.defaults == theirs.defaults
    assert ours._step_supports_amp_scaling


@pytest.mark.parametrize("name", NAMES)
def test_named_parameters(name):
    model = torch.nn.Linear(2, 2)
    optimizer = make(name, model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


BAD = [
    ("AdamW", {"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ("AdamW", {"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
    ("AdamW", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    ("AdamW", {"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
    ("AdamW", {"weight_decay": -1.0}, ValueError, "Invalid weight_decay value: -1.0"),
    ("AdamW", {"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
    ("AdamW", {"betas": (0.9, torch.tensor(0.9))}, ValueError, "betas must be either both floats or both Tensors"),
    ("AdamW", {"betas": (torch.tensor(0.9), torch.tensor(0.9))}, ValueError, r"betas\[0\] is a tensor"),
    ("Adam", {"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
    ("Adam", {"differentiable": True}, RuntimeError, "differentiable is True; accepted: False"),
    ("Adam", {"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
    ("AdamW", {"differentiable": True}, RuntimeError, "differentiable is True; accepted: False"),
    ("AdamW", {"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
    ("Lion", {"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ("Lion", {"lr": torch.ones(2)}, ValueError, "lr is a tensor of 2 elements; accepted: 1-element"),
    ("Lion", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
    ("Lion", {"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
    ("Lion", {"betas": (0.9, float("nan"))}, ValueError, "nan"),
    ("Lion", {"betas": (0.9, torch.tensor(0.9))}, ValueError, r"betas\[1\] is a tensor"),
    ("Lion", {"weight_decay": -1.0}, ValueError, "Invalid weight_decay value: -1.0"),
    ("Lion", {"weight_decay": torch.tensor(0.1)}, ValueError, "weight_decay is a tensor"),
    ("Lion", {"differentiable": True}, RuntimeError, "differentiable is True; accepted: False"),
    ("Lion", {"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
    ("SGD", {"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
    ("SGD", {"momentum": -1.0}, ValueError, "Invalid momentum value: -1.0"),
    ("SGD", {"weight_decay": -1.0}, ValueError, "Invalid weight_decay value: -1.0"),
    ("SGD", {"nesterov": True}, ValueError, "Nesterov momentum requires a momentum and zero dampening"),
    ("SGD", {"weight_decay": torch.tensor(0.1)}, ValueError, "weight_decay is a tensor"),
    ("SGD", {"differentiable": True}, RuntimeError, "differentiable is True; accepted: False"),
    ("SGD", {"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
]
for _name, _keys in (
    ("AdamW", ("lr", "eps", "weight_decay")),
    ("Adam", ("lr", "eps", "weight_decay")),
    ("Lion", ("lr", "weight_decay")),
    ("SGD", ("lr", "momentum", "dampening", "weight_decay")),
):
    BAD += [(_name, {key: float("nan")}, ValueError, "nan") for key in _keys]
BAD.append(("AdamW", {"betas": (0.9, float("nan"))}, ValueError, "nan"))
for _name in NAMES:
    BAD += [
        (
            _name,
            {"master_weights": "bf16"},
            ValueError,
            "master_weights is 'bf16'; accepted: 'fp32', 'split', 'none', 'none_rne'",
        ),
        (_name, {"ema_decay": 1.0}, ValueError, "ema_decay is 1.0; accepted: None, a number from 0 to below 1"),
        (_name, {"ema_decay": -0.1}, ValueError, "ema_decay is -0.1"),
        (_name, {"ema_decay": float("nan")}, ValueError, "ema_decay is nan"),
        (_name, {"ema_decay": torch.tensor(0.9)}, ValueError, "ema_decay is a tensor"),
        (_name, {"seed": -1}, ValueError, r"seed is -1; accepted: an integer from 0 to 2\*\*63 - 1"),
        (_name, {"seed": 2**63}, ValueError, "seed is 9223372036854775808"),
        (_name, {"seed": 0.5}, ValueError, "seed is 0.5"),
        (_name, {"shadow_dtype": torch.float32}, ValueError, "shadow_dtype is torch.float32"),
        (_name, {"state_dtype": torch.float16}, ValueError, "state_dtype is torch.float16"),
        (_name, {"max_grad_norm": -1.0}, ValueError, "max_grad_norm is -1.0"),
        (_name, {"max_grad_norm": float("nan")}, ValueError, "max_grad_norm is nan"),
    ]


@pytest.mark.parametrize(("name", "options", "error", "text"), BAD)
def test_bad_options(name, options, error, text):
    with pytest.raises(error, match=text):
        make(name, params(), **options)
    group_options = {k: v for k, v in options.items() if k in make(name, params()).param_groups[0]}
    if group_options and error is ValueError and "both floats" not in text:  # the same in a group added later
        optimizer = make(name, params())
        with pytest.raises(ValueError):  # noqa: PT011  (the wording is the constructor's)
            optimizer.add_param_group({"params": params(1), **group_options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", NAMES)
def test_hints_without_effect_are_accepted(name):
    for hint in ({"foreach": True}, {"foreach": False}, {"fused": False}, {"fused": True}):
        group = make(name, params(), **hint).param_groups[0]
        assert group["fused"] is True
        assert group["foreach"] is None
    akopt.AdamW(params(), capturable=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_parameter_dtypes_that_are_refused(name, dtype):
    tensor = torch.zeros(3, dtype=dtype)
    with pytest.raises(TypeError, match=f"params\\[0\\] is {dtype}; accepted: float16, bfloat16, float32"):
        make(name, [tensor])


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_refusals(name):
    leaf = torch.ones(3, requires_grad=True)
    for bad, error, text in [
        ([leaf * 2], ValueError, "can't optimize a non-leaf Tensor"),
        ([], ValueError, "optimizer got an empty parameter list"),
        (leaf, TypeError, "params argument given to the optimizer should be"),
        (
            [{"params": [leaf]}, {"params": [leaf]}],
            ValueError,
            "some parameters appear in more than one parameter group",
        ),
        (["x"], TypeError, "optimizer can only optimize Tensors"),
    ]:
        with pytest.raises(error, match=text):
            make(name, bad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_duplicates_are_refused(name):
    p = params(1)[0]
    with pytest.raises(ValueError, match="appears twice"):
        make(name, [p, p])


@pytest.mark.parametrize("name", NAMES)
def test_parameters_with_gaps_are_refused_at_the_step(name):
    p = torch.ones(4, 6)[:, ::2].requires_grad_()
    optimizer = make(name, [p])
    p.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="leaves gaps in memory"):
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_bad_gradients_change_nothing(name, kind):
    good, bad = params(2)
    optimizer = make(name, [good, bad])
    for p in (good, bad):
        p.grad = torch.ones(3)
    optimizer.step()
    before = pickle.dumps([good.data, bad.data, optimizer.state_dict()])
    if kind == "sparse":
        bad.grad = torch.ones(3).to_sparse()
    else:
        bad.grad_dtype = None
        bad.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(
        RuntimeError if kind == "sparse" else TypeError, match="sparse gradients" if kind == "sparse" else "complex64"
    ):
        optimizer.step()
    assert pickle.dumps([good.data, bad.data, optimizer.state_dict()]) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan")], ids=["float", "numpy"])
def test_nan_that_a_scheduler_wrote_changes_nothing(name, nan):
    p = params(1)[0]
    optimizer = make(name, [p])
    p.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = nan
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize("name", [*NAMES, "LAMB"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas"])
def test_text_is_no_number(name, key):
    """In a group as in the constructor, also once a scheduler or a user wrote it there."""
    if name == "SGD" and key == "betas":
        return
    p, text = params(1)[0], (0.9, "0.99") if key == "betas" else "0.1"
    with pytest.raises(TypeError, match=re.escape(f"{name}: {'betas[1]' if key == 'betas' else key} is '0.")):
        make(name, [{"params": [p], key: text}])
    optimizer = make(name, [p])
    p.grad = torch.ones(3)
    for _ in range(3):
        optimizer.step()
    before, optimizer.param_groups[0][key] = p.detach().clone(), text
    with pytest.raises(TypeError, match=re.escape(f"{name}: {key} is {text!r}, a str; accepted: a number")):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_subclasses_are_refused(name):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return Wrapper(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    with pytest.raises(TypeError, match="Wrapper; accepted: plain tensors"):
        make(name, [Wrapper(torch.ones(3))])


@pytest.mark.parametrize("name", NAMES)
def test_repr_and_zero_grad(name):
    ps = params()
    optimizer = make(name, ps)
    assert name in repr(optimizer)
    for set_to_none in (False, True):
        for p in ps:
            p.grad = torch.ones(3)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in ps)
