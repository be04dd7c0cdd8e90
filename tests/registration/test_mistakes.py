"""Common mistakes of users: the error names the argument, its value and what is accepted."""

import re
import subprocess
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

import amp_kernels as ak
from amp_kernels._requirements import check_torch

from ..helpers.processes import python

X, W, B = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4)
IDS = torch.zeros(4, dtype=torch.int64)

#: A right call of each public function, by keyword; the tensors that it may lack.
CALLS = {
    ak.matmul: ({"a": X, "b": W.t()}, ()),
    ak.linear: ({"x": X, "weight": W, "bias": B}, ("bias",)),
    ak.addmm: ({"input": B, "mat1": X, "mat2": W.t()}, ()),
    ak.baddbmm: ({"input": B, "batch1": X[None], "batch2": W.t()[None]}, ()),
    ak.grouped_mm: ({"a": X, "b": W.t()[None], "offs": torch.tensor([4], dtype=torch.int32), "bias": B}, ("offs", "bias")),
    ak.mlp: ({"x": X, "weight1": W, "bias1": B, "weight2": W[:, :4], "bias2": B}, ("bias1", "bias2")),
    ak.layer_norm: ({"x": X, "normalized_shape": 8, "weight": X[0], "bias": X[0]}, ("weight", "bias")),
    ak.rms_norm: ({"x": X, "normalized_shape": 8, "weight": X[0], "residual": X}, ("weight", "residual")),
    ak.rotary: ({"q": X[None, None], "k": X[None, None], "cos": X, "sin": X, "q_weight": X[0], "k_weight": X[0]}, ("q_weight", "k_weight")),
    ak.cross_entropy: ({"logits": X, "target": IDS, "weight": torch.ones(8)}, ("weight",)),
    ak.linear_cross_entropy: ({"input": X, "linear_weight": W, "target": IDS, "linear_bias": B, "weight": B}, ("linear_bias", "weight")),
    ak.gelu: ({"input": X}, ()),
    ak.silu: ({"input": X}, ()),
    ak.swiglu: ({"input": X}, ()),
    ak.embedding: ({"input": IDS, "weight": W}, ()),
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_an_operand_that_is_no_tensor_is_named(function: Callable) -> None:
    arguments, optional = CALLS[function]
    function(**arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            for wrong in (np.ones((4, 8)), None):
                if wrong is None and name in optional:
                    continue
                text = f"{function.__name__}: {name} has type {'NoneType' if wrong is None else 'numpy.ndarray'}; accepted: a tensor"
                with pytest.raises(TypeError, match=re.escape(text)):
                    function(**{**arguments, name: wrong})


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_an_operand_without_dimensions_is_named(function: Callable) -> None:
    """Some may have none, such as those that broadcast."""
    arguments, _ = CALLS[function]
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            said = _error(function, **{**arguments, name: value.flatten()[0]})
            assert said is None or said.startswith(f"{function.__name__}: ")


def _error(function: Callable, **arguments: object) -> str | None:
    try:
        function(**arguments)
    except (TypeError, ValueError, IndexError) as error:
        return str(error)
    return None


def _model() -> torch.nn.Module:
    model = torch.nn.Linear(8, 4)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model


def _on_cuda() -> None:
    with ak.backend("cuda"):
        ak.matmul(X, W.t())


def _units() -> ak.optim.AdamW:
    groups = [{"params": [param], "unit": str(i)} for i, param in enumerate(MODEL.parameters())]
    return ak.optim.AdamW(groups, independent_groups=True)


MODEL, SCALER = _model(), ak.GradScaler("cpu")
ADAMW = ak.optim.AdamW(MODEL.parameters())
SCALER.scale(torch.ones(()))
MISTAKES = [
    (lambda: ak.optim.AdamW(MODEL, lr=1e-3), TypeError, "AdamW: params is a module; accepted: model.parameters()"),
    (lambda: ak.optim.Lion(MODEL.state_dict()), TypeError, "Lion: params is a state_dict; accepted: model.parameters()"),
    (lambda: ak.optim.SGD(MODEL.parameters(), "1e-3"), TypeError, "SGD: lr is '1e-3', of type str; accepted: a number"),
    (lambda: ak.optim.Adam(MODEL.parameters(), eps="1e-8"), TypeError, "Adam: eps is '1e-8', of type str"),
    (lambda: ak.optim.LAMB([MODEL.weight, MODEL.bias, MODEL.weight]), ValueError,
        "LAMB: params[2] of group 0, of shape [4, 8], is the same parameter as params[0] of group 0; accepted: each"),
    (lambda: ak.optim.AdamW([{"params": MODEL.named_parameters()}, {"params": [("tied", MODEL.weight)]}]), ValueError,
        "AdamW: tied of group 1, of shape [4, 8], is the same parameter as weight of group 0"),
    (lambda: ak.convert(torch.jit.script(torch.nn.Linear(8, 4))), TypeError, "convert: model is a torch.jit.ScriptModule"),
    (
        lambda: ak.cross_entropy(X, torch.zeros(4)),
        ValueError,
        "target has dtype float32, that of probabilities, and shape [4]; accepted: [4, 8], the shape of the logits, or class ids",
    ),
    (lambda: ak.clip_grad_norm_(MODEL.parameters(), float("nan")), ValueError, "clip_grad_norm_: max_norm is nan"),
    (lambda: ak.clip_grad_norm_(MODEL.parameters(), -1.0), ValueError, "clip_grad_norm_: max_norm is -1.0; accepted"),
    (lambda: ak.clip_grad_norm_(MODEL.parameters(), "1"), TypeError, "clip_grad_norm_: max_norm is '1', of type str"),
    (lambda: ak.GradScaler(True), TypeError, "GradScaler: device is True; accepted: a device type"),
    (lambda: ak.GradScaler(65536.0), TypeError, "GradScaler: device is 65536.0; accepted: a device type"),
    (lambda: ak.GradScaler("gpu"), ValueError, "GradScaler: device is 'gpu'; accepted: a device type"),
    (lambda: ak.optim.AdamW(MODEL.parameters()).load_state_dict(MODEL.state_dict()), ValueError,
        "AdamW: state_dict has no 'state'; accepted: the state_dict of an optimizer"),
    (lambda: ak.optim.AdamW(MODEL.parameters()).load_state_dict({"state": {}}), ValueError,
        "AdamW: state_dict has no 'param_groups'; accepted"),
    (lambda: ak.batch_invariant(8), TypeError, "batch_invariant: enabled is 8; accepted: True, False; k_blocks is passed by"),
    (lambda: ak.batch_invariant(len), TypeError, "accepted: True, False; as a decorator: @ak.batch_invariant()"),
    (lambda: ak.recommended_dtype("gpu"), ValueError, "device is 'gpu'; accepted: None, 'cpu', 'cuda'"),
    (lambda: ak.linear(X, W, split=3), TypeError, "linear: split is 3, of type int; accepted: a sequence of whole"),
    (lambda: ak.linear(X, W, split=[1.0, 3.0]), TypeError, "linear: split is [1.0, 3.0], of type list; accepted"),
    (lambda: ak.cross_entropy(X, IDS, label_smoothing=None), TypeError,
        "cross_entropy: label_smoothing is None, of type NoneType; accepted: a number from 0 to 1"),
    (lambda: ak.cross_entropy(X, IDS, z_loss="1"), TypeError, "cross_entropy: z_loss is '1', of type str; accepted"),
    (lambda: ak.linear_cross_entropy(X, W, IDS, chunk_size=2.5), TypeError,
        "linear_cross_entropy: chunk_size is 2.5, of type float; accepted: a whole number from 1"),
    (lambda: ak.addmm(B, X, W.t(), alpha=None), TypeError, "addmm: alpha is None, of type NoneType; accepted: a number"),
    (lambda: ak.addmm(B, X, W.t(), beta="1"), TypeError, "addmm: beta is '1', of type str; accepted: a number"),
    (lambda: ak.cast_(X.clone(), X), TypeError, "cast_: destinations has type torch.Tensor; accepted: a list"),
    (lambda: ak.cast_([X.clone()], X), TypeError, "cast_: sources has type torch.Tensor; accepted: a list"),
    (lambda: ak.numerics.StepMonitor(None), TypeError, "StepMonitor: optimizer has type NoneType; accepted: an opt"),
    (lambda: ak.distributed.GradReducer(None), TypeError, "GradReducer: model has type NoneType; accepted: a torch"),
    (lambda: ak.refresh_shadows(None), TypeError, "refresh_shadows: model has type NoneType; accepted: a torch.nn"),
    (lambda: ak.numerics.parity(None), TypeError, "parity: train has type NoneType; accepted: a function"),
    (lambda: ak.clip_grad_norm_(MODEL, 1.0), TypeError, "clip_grad_norm_: parameters is a module; accepted: model.par"),
    (lambda: ak.distributed.vocab_parallel_cross_entropy(X, IDS), ValueError,
        "vocab_parallel_cross_entropy: group is None without an initialised process group; accepted: a process group"),
    (lambda: ak.swiglu(X, X), TypeError, "swiglu: got 2 tensors; accepted: one, [..., 2 F], gates before values"),
    *(
        (
            partial(make, MODEL),
            TypeError,
            f"GradScaler.{make.__name__}: optimizer has type torch.nn.modules.linear.Linear; acc",
        )
        for make in (SCALER.step, SCALER.unscale_)
    ),
    (lambda: SCALER.step(None), TypeError, "GradScaler.step: optimizer has type NoneType; accepted: an optimizer, which has"),
    *(
        (
            partial(SCALER.step, make(MODEL.parameters(), lr=1e-3), 1.0),
            TypeError,
            "second argument is 1.0, which is no argument of",
        )
        for make in (ak.optim.AdamW, torch.optim.AdamW)
    ),
    (lambda: ak.optim.AdamW(None), TypeError, "AdamW: params has type NoneType; accepted: model.parameters()"),
    (lambda: ak.optim.Muon(3), TypeError, "Muon: params has type int; accepted: model.parameters()"),
    *(
        (
            partial(ak.optim.AdamW(MODEL.parameters()).add_param_group, {"params": value}),
            TypeError,
            f"param_groups[1]['params'] {text}",
        )
        for value, text in (
            (None, "has type NoneType; accepted: a tensor, model.parameters()"),
            (MODEL, "is a module; accepted: a tensor, model.parameters()"),
            (MODEL.state_dict(), "is a state_dict; accepted"),
        )
    ),
    *(
        (
            partial(make, [{"param": [MODEL.weight]}]),
            KeyError,
            f"{make.__name__}: param_groups[0] has no 'params', only 'param'",
        )
        for make in (ak.optim.AdamW, ak.optim.Muon, ak.optim.LAMB)
    ),
    *(
        (partial(function, value, *more), TypeError, f"{function.__name__}: {text}")
        for function, name, more in (
            (ak.clip_grad_norm_, "parameters", (1.0,)),
            (ak.get_total_norm, "tensors", ()),
        )
        for value, text in (
            (None, f"{name} has type NoneType; accepted: "),
            (MODEL.state_dict(), f"{name} is a state_dict; accepted"),
            ([MODEL.weight, None], f"{name}[1] has type NoneType; accepted: a tensor"),
            (MODEL.named_parameters(), f"{name}[0] has type tuple; accepted: a tensor"),
        )
    ),
    *(
        (partial(load, value), TypeError, f"state_dict has type {text}; accepted: the state_dict of a")
        for load in (ak.optim.AdamW(MODEL.parameters()).load_state_dict, SCALER.load_state_dict)
        for value, text in ((None, "NoneType"), (MODEL, "torch.nn.modules.linear.Linear"))
    ),
    *(
        (
            partial(SCALER.load_state_dict, state),
            ValueError,
            "GradScaler.load_state_dict: state_dict has no 'scale', only 'st",
        )
        for state in ({"state": {}, "param_groups": []}, {"step": 3})
    ),
    (lambda: ak.fp32_state_dict(None, None), TypeError, "fp32_state_dict: model has type NoneType; accepted: a torch.nn"),
    (_on_cuda, ak.BackendUnavailable, "the tensors are on cpu. Available here: "),
    *((partial(setattr, ADAMW, name, value), ValueError, f"AdamW: {name} is {value!r}; accepted: ") for name, value in (
        ("max_grad_norm", float("nan")), ("ema_decay", 3.0), ("master_weights", "fp16"),
    )),
    (lambda: _units().step(units=0), TypeError, "AdamW: units has type int; accepted: '0', '1', in a list"),
    (lambda: ak.GradScaler("cpu", init_scale=float("inf")), ValueError, "GradScaler: init_scale is inf; accepted: a number above 0 to"),
    (SCALER.update, AssertionError, "Call step(optimizer) or unscale_(optimizer) of this scaler first"),
    (lambda: SCALER.load_state_dict(SCALER.state_dict() | {"_growth_tracker": "x"}), TypeError, "_growth_tracker is 'x', of"),
    *((call, TypeError, f"{name}: shard_group is 'world', of type str; accepted: None, a process group") for call, name in (
        (lambda: ak.GradScaler("cpu", shard_group="world"), "GradScaler"),
        (lambda: ak.get_total_norm([X], shard_group="world"), "get_total_norm"),
        (lambda: ak.clip_grad_norm_(MODEL.parameters(), 1.0, shard_group="world"), "clip_grad_norm_"),
    )),
    (lambda: ak.route(IDS[None], "3"), TypeError, "route: num_groups is '3', of type str; accepted: a whole number from 0"),
    (lambda: ak.syrk(X, alpha="1"), TypeError, "syrk: alpha is '1', of type str; accepted: a number"),
    (lambda: ak.syrk(X, beta=1.0), ValueError, "syrk: beta is 1.0 and c is None; accepted: 0 without c"),
    (lambda: ak.newton_schulz(None), TypeError, "newton_schulz: x has type NoneType; accepted: a tensor, a list"),
    (lambda: ak.layer_norm(X, None), TypeError, "layer_norm: normalized_shape is None, of type NoneType; accepted: an int"),
    (lambda: ak.rms_norm(X, 8.0), TypeError, "rms_norm: normalized_shape is 8.0, of type float; accepted: an int"),
    (lambda: ak.convert(MODEL, skip=3), TypeError, "convert: skip has type int; accepted: names of modules, classes"),
    (lambda: ak.convert(MODEL, report="x"), TypeError, "convert: report is 'x'; accepted: True, False, a function"),
    (lambda: ak.backend("gpu"), ValueError, "backend: name is 'gpu'; accepted: cpu, cuda"),
    *((partial(ak.checkpoint.save, "x.pt", **{name: part}), TypeError, f"checkpoint: {name} has type {text}") for name, part, text in (
        ("model", ADAMW, "amp_kernels.optim.adamw.AdamW; accepted: as optimizer="),
        ("optimizer", MODEL, "torch.nn.modules.linear.Linear; accepted: as model="),
        ("scaler", ADAMW, "amp_kernels.optim.adamw.AdamW; accepted: as optimizer="),
    )),
    *((partial(make, *first, 3), TypeError, f"{make.__name__}: scaler has type int; accepted: None, a gradient") for make, *first in (
        (ak.numerics.StepMonitor, ADAMW), (ak.numerics.GradientHistogram, MODEL), (ak.numerics.find_nonfinite, MODEL),
    )),
    (lambda: ak.numerics.StepMonitor(ADAMW, show="x"), TypeError, "StepMonitor: show has type str; accepted: None, a function"),
    (lambda: ak.numerics.parity(len, show=3), TypeError, "parity: show has type int; accepted: None, a function"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES, ids=[text.partition(";")[0] for _, _, text in MISTAKES])
def test_a_mistake_is_named(call: Callable, error: type[Exception], text: str) -> None:
    gradients = [param.grad.clone() for param in MODEL.parameters()]
    with pytest.raises(error, match=re.escape(text)):
        call()
    assert all(map(torch.equal, gradients, [param.grad for param in MODEL.parameters()]))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (16,)])
def test_a_gradient_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    param = torch.nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    param.grad.data = torch.ones(shape)
    optimizer = ak.optim.AdamW([param])
    text = f"AdamW: the gradient of a parameter of shape [4, 4] has shape {list(shape)}; accepted: the shape of the"
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer.step()
    assert torch.equal(param.data, torch.ones(4, 4))
    assert not optimizer.state


def test_a_backend_for_another_device_is_not_to_be_built() -> None:
    with pytest.raises(ak.BackendUnavailable) as caught:
        _on_cuda()
    assert "It takes tensors on cuda." in str(caught.value)
    assert "To build it" not in str(caught.value)


def test_scripted_modules_inside_a_model_stay() -> None:
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 4))
    ak.convert(model)
    assert isinstance(model[0], torch.jit.ScriptModule)
    assert type(model[1]) is ak.nn.Linear


def _scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def _hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "prepared", [lambda optimizer: optimizer, _hooked, _scheduled, lambda o: _scheduled(_hooked(o))]
)
@pytest.mark.parametrize("scaler", [None, ak.GradScaler("cpu")])
def test_a_step_without_gradients_warns_once(prepared: Callable, scaler: ak.GradScaler | None) -> None:
    """It names the line of the program, through torch's wrappers of a step and the scaler."""
    optimizer = prepared(ak.optim.AdamW(torch.nn.Linear(2, 2).parameters()))
    if scaler is not None:
        scaler.scale(torch.ones(()))
    step = optimizer.step if scaler is None else partial(scaler.step, optimizer)
    with pytest.warns(UserWarning, match="AdamW: no parameter has a gradient, so the step changes nothing") as caught:
        step()
    assert [warning.filename for warning in caught] == [__file__]
    if scaler is not None:
        scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_an_unfused_step_is_not_promised() -> None:
    with pytest.warns(UserWarning, match="Lion: fused=False has no effect") as caught:
        ak.optim.Lion(_model().parameters(), fused=False)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(("value", "printed"), [("Yes", "False"), ("on", "False"), ("0", "True"), ("off", "True")])
def test_the_environment_switches_the_package_off(value: str, printed: str) -> None:
    assert _enabled(value).stdout.strip() == printed


def test_an_unknown_value_of_the_switch_is_refused() -> None:
    assert "AMP_KERNELS_DISABLE is 'maybe'; accepted: 1, true, yes, on, 0" in _enabled("maybe").stderr


def _enabled(value: str) -> subprocess.CompletedProcess:
    return python("-c", "import amp_kernels; print(amp_kernels.is_enabled())", status=None, AMP_KERNELS_DISABLE=value)


def test_an_old_torch_is_refused() -> None:
    for version in ("2.10.0", "2.10.0a0+a36e1d39eb.nv26.1", "2.14.1+cu130", "3.0.0a0"):
        check_torch(version)
    with pytest.raises(ImportError, match=r"amp_kernels: torch is 2\.9\.1\+cpu; accepted: 2\.10 or newer"):
        check_torch("2.9.1+cpu")


def test_the_namespace_holds_what_is_documented_and_nothing_else() -> None:
    loaded_by_tests = {"cli"}
    assert {name for name in dir(ak) if not name.startswith("_")} - loaded_by_tests == {*ak.__all__} - {"__version__"}


def test_help_groups_all_names_by_job() -> None:
    listed = re.findall(r"\w+", "".join(line.split(":", 1)[1] for line in ak.__doc__.splitlines() if line[:1] == "-"))
    assert sorted(listed) == sorted({*ak.__all__} - {"__version__"})
