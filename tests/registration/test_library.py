"""Promises of the registry for every op: version counters, dispatch of an explicit backend, import without side effects."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_kernels
from amp_kernels import __main__
from amp_kernels._checks import operands
from amp_kernels._dispatch import cpu_isa, load
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli import doctor

from ..helpers.processes import python
from ..ops.composites import samples

MUTATING = [name for name, op in REGISTRY.items() if op.mutated]
LISTS = ("check_and_norm", "exponent_histogram")  # of tensors, for which autograd keeps no graph of a raw op
RAW = [name for name, op in REGISTRY.items() if not op.mutated and not op.composite and name not in LISTS]


def mutated_tensors(op, args, kwargs):
    for position, name in op.mutated:
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from [value] if isinstance(value, torch.Tensor) else value or ()


@pytest.mark.parametrize("name", [name for name, op in REGISTRY.items() if not op.composite])
def test_the_compiled_kernels_are_there(name):
    """An op without CUDA kernels, or whose glue knows CUDA alone, is not finished; and tests run over what was built."""
    assert REGISTRY[name].built.cpu
    assert REGISTRY[name].built.emulate


def test_the_optional_module_is_there():
    """Nothing fails where torch's C++ interface has changed and it does not compile: it is missed by the host's time alone."""
    if load.build_info().get("torch") != torch.__version__:
        pytest.skip("built for another torch; make abi compiles it against this one")
    assert "nodes" not in load.absent(), load.absent()["nodes"]


#: Arguments of a sample in which two written tensors are one.
SHARED = {
    "unscale_": lambda a: {"grads": [a["grads"][0], a["grads"][0]]},
    "cast_": lambda a: {"destinations": [a["destinations"][0]] * 2, "sources": [a["sources"][0]] * 2},
    "adamw_": lambda a: {"moments": [a["moments"][0]] * len(a["moments"])},
    "update_scale_": lambda a: {"hysteresis_tracker": a["growth_tracker"]},
}


@pytest.mark.parametrize("namespace", ["amp_kernels", "amp_kernels_emulated"])
@pytest.mark.parametrize("name", MUTATING)
def test_raw_ops_refuse_to_write_one_place_twice(namespace, name):
    """Whichever backend serves them: blocks of a kernel would race, and the reference would write one after the other."""
    op = REGISTRY[name]
    names = [argument.name for argument in op.schema.arguments]
    args, kwargs = next(iter(op.samples("cpu")))
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    written = {n: v if isinstance(v, torch.Tensor) else v[0] for _, n in op.mutated if (v := call.get(n)) is not None}
    first, tensor = next(iter(written.items()))
    twice = torch.zeros(2, 3, dtype=tensor.dtype)[:1].expand(2, 3) if tensor.dtype.is_floating_point else tensor
    changes = [({first: twice if isinstance(call[first], torch.Tensor) else [twice, *call[first][1:]]}, "so elements")]
    changes += [(SHARED[name](call), "and")] if name in SHARED else []
    for change, text in changes:
        spoiled = {**call, **change}
        before = [t._version for t in mutated_tensors(op, (), spoiled)]
        with pytest.raises(ValueError, match=rf"{name}: .* {text} .*share memory; accepted: (a tensor|tensors)"):
            getattr(getattr(torch.ops, namespace), name)(**spoiled)
        assert [t._version for t in mutated_tensors(op, (), spoiled)] == before


@pytest.mark.parametrize("strides", [(3, 1), (1, 4), (2, 3), (1, 1), (0, 1), (5, 2), (3, 5), (4, 2), (12, 0)])
def test_what_shares_memory_with_itself(strides):
    places = {i * strides[0] + j * strides[1] for i in range(4) for j in range(3)}
    assert operands._overlaps_itself(torch.zeros(60).as_strided((4, 3), strides)) == (len(places) < 12)


def test_the_ops_that_take_addresses_are_named():
    """A reader of SECURITY.md has to know which ops can touch any memory."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("amp_kernels::")]
    tables = {s.name.split("::")[1] for s in schemas if any(argument.name == "table" for argument in s.arguments)}
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert set(re.findall("`(_[a-z_]+)`", text)) == tables


@pytest.mark.parametrize("name", RAW)
def test_backward_through_a_raw_op_raises(name):
    """Instead of silently giving no gradient."""
    op = REGISTRY[name]
    args, kwargs = next(iter(op.samples("cpu")))
    args = tuple(a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args)
    out = op(*args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    with pytest.raises(NotImplementedError, match="raw kernel without an autograd formula"):
        out.sum().backward()


def test_every_op_has_samples_of_more_than_one_dtype():
    for name, op in REGISTRY.items():
        lists = [
            value if isinstance(value, (list, tuple)) else [value] for args, _ in samples(op, "cpu") for value in args
        ]
        dtypes = {t.dtype for values in lists for t in values if isinstance(t, torch.Tensor)}
        assert {torch.float32, torch.float16, torch.bfloat16} <= dtypes or name in (
            "judge_units_",
            "segmented_gemm",
            "syrk",
            "update_scale_",
        ), (name, dtypes)


def test_import_touches_no_device_and_loads_no_triton():
    said = "print(torch.cuda.is_initialized(), 'triton' in sys.modules)"
    baseline = python("-c", f"import sys, torch; {said}").stdout  # torch itself may import it
    assert python("-c", f"import sys, torch; import amp_kernels; {said}").stdout == baseline
    assert baseline.startswith("False")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["info", "--check"], ["all backends agree"]),
        (["doctor"], ["dtype", "AMP_KERNELS_CPU_ISA"]),
        (["doctor", "--device", "meta"], ["there is no rule for devices of type 'meta'"]),
        (["--version"], [f"amp_kernels {amp_kernels.__version__}"]),
        (["bench", "--list", "--op", "unscale", "--device", "cpu"], ["unscale_"]),
    ],
)
def test_commands(command, expected):
    said = python("-m", "amp_kernels", *command).stdout
    assert all(text in said for text in expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without CUDA")
@pytest.mark.parametrize(
    ("backend", "status", "expected"),
    [
        ("foo", 2, "AMP_KERNELS_BACKEND is 'foo'; accepted: cpu"),
        ("cuda", 0, "cuda was asked for: the tensors are on cpu\n"),
    ],
)
def test_info_of_a_backend_that_cannot_run_takes_a_line(backend, status, expected):
    result = python("-m", "amp_kernels", "info", status=status, AMP_KERNELS_BACKEND=backend)
    assert expected in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert max(map(len, result.stdout.splitlines()), default=0) < 200


def test_doctor_of_an_instruction_set_that_is_not_there_takes_a_line():
    told = python("-m", "amp_kernels", "doctor", status=2, AMP_KERNELS_CPU_ISA="foo").stderr
    assert "AMP_KERNELS_CPU_ISA is 'foo'; this machine has: portable" in told
    assert "Traceback" not in told


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP prints its settings")
def test_threads_of_benchmarks_do_not_spin_at_barriers():
    command = [sys.executable, "-m", "amp_kernels", "bench", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    told = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    assert told.rpartition("GOMP_SPINCOUNT = ")[2].startswith("'0'")


MODELS = """
import torch
from torch.nn import BatchNorm1d, Linear

def good():
    return torch.nn.Sequential(Linear(20, 64), BatchNorm1d(64), Linear(64, 64), torch.nn.Conv1d(64, 64, 3, groups=64))

ready = good()[2]

def bad():
    return 3
"""


@pytest.mark.parametrize(
    ("name", "status", "expected"),
    [
        (
            "good",
            0,
            ["model: Sequential, 5,888 parameters", "    0 (Linear): 20 (next: 24)\n  convert:\n",
                "    is left alone: there is no replacement for it (2): 1 (BatchNorm1d), 3 (Conv1d)\n",
                "    is now amp_kernels.nn.linear.Linear (2): 0, 2\n"],
        ),
        ("ready", 0, ["Tensor Cores load slower: none", "is now amp_kernels.nn.linear.Linear (1): the model"]),
        ("bad", 2, ["doctor: --model returned a value of type int; accepted: a torch.nn.Module"]),
        ("absent", 2, ["has no function 'absent'"]),
    ],
)  # fmt: skip
def test_doctor_judges_a_model(tmp_path, capsys, name, status, expected):
    (tmp_path / "some_models.py").write_text(MODELS)
    try:
        returned = __main__.main(["doctor", "--device", "cpu", "--model", f"{tmp_path / 'some_models.py'}:{name}"])
    except SystemExit as error:
        returned = error.code
    printed = "".join(capsys.readouterr())
    assert returned == status
    assert all(text in printed for text in expected), printed


def test_unknown_option_is_an_error():
    assert "--chekc" in python("-m", "amp_kernels", "info", "--chekc", status=2).stderr


def test_doctor_says_what_each_instruction_set_means(capsys):
    for isa in cpu_isa.available():
        with cpu_isa.cpu_isa(isa):
            doctor.run(argparse.Namespace(model=None, device="cpu"))
        said = capsys.readouterr().out
        assert f"matmul        {isa} (" in said
        assert doctor.INSTRUCTIONS[isa] in said
