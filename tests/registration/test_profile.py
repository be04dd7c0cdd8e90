"""Profiles of `tune`, against a fake timer: which products get a winner, what is read back, and what the policy does with it."""

import functools
import itertools
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import amp_kernels as ak
from amp_kernels._dispatch import nodes, policy, profile
from amp_kernels._dispatch.policy import Built
from amp_kernels._dispatch.product_call import ProductCall, described
from amp_kernels._raw.gemm import gemm_op
from amp_kernels.cli import tune

pytestmark = pytest.mark.own_backend

MACHINE = {"gpu": "Some GPU 80GB", "driver": "13000", "torch": "2.11.0", "amp_kernels": "0.1.0"}
CALL = ProductCall(64, 32, 16)
BUILT = Built(cuda=True, cuda_archs=("8.0+PTX", "9.0a", "12.0"), triton=True, aten=True, tensor_cores=True)
CALLS = [
    *(
        ProductCall(5, 6, 7, batch, layout, dtype=d, out=d)
        for batch in (1, 3)
        for layout in ("NN", "NT", "TN", "TT")
        for d in ("fp16", "bf16")
    ),
    *(ProductCall(8, 16, 24, activation="swiglu", bias=b, residual=r, preact=z) for b, r, z in itertools.product((False, True), repeat=3)),
    *(ProductCall(8, 16, 24, 1, "NN", "gemm_dact", activation=x, bias=bias) for x in ("gelu", "swiglu") for bias in (False, True)),
    ProductCall(8, 16, 24, 1, "TN", "gemm_accumulate_", out="fp32"),
    ProductCall(8, 16, 24, 2, "TN", out="fp32"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The backends of products on a CPU; the policy's choice is the first."""
    monkeypatch.setattr(profile, "BACKENDS", ("cpu", "aten", "triton"))


def tune_with(samples, calls=(CALL,)):
    """A profile by a timer that runs what it is given and says `samples`."""

    def timer(candidates):
        assert candidates.keys() == samples.keys()
        for candidate in candidates.values():
            candidate()
        return samples

    return tune.tuned(list(calls), MACHINE, torch.device("cpu"), timer)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_arguments_make_the_call(call):
    args, kwargs = call.arguments(torch.device("cpu"))
    assert described(call.op, args, kwargs) == call


def test_names_of_calls_differ():
    assert len({str(call) for call in CALLS}) == len(CALLS)


def test_calls_that_a_profile_does_not_know():
    a = torch.zeros(17, 16, dtype=torch.bfloat16)
    assert described("gemm", (a[:, ::2], a[:8]), {}) is None  # stride 2
    assert described("gemm", (a.flatten()[1:257].view(16, 16), a[:16]), {}) is None  # not aligned
    assert described("gemm", (a[:0], a[:16]), {}) is None


@pytest.mark.parametrize(
    ("samples", "winner"),
    [
        ({"cpu": [102.5] * 9, "aten": [100.0] * 9}, "aten"),
        ({"cpu": [101.5] * 9, "aten": [100.0] * 9}, None),  # within the margin
        ({"cpu": [100.0] * 9, "aten": [200.0] * 9}, None),
        # The clock falls between the second round's samples: the medians differ by 4 %, the ratios of two rounds not at all.
        ({"cpu": [100, 104, 104], "aten": [100, 100, 104]}, None),
        ({"cpu": [101, 101, 101, 900, 900], "aten": [100] * 5}, None),  # two slow samples are no reason
    ],
)
def test_a_winner_is_ahead_by_more_than_the_margin(on_a_cpu, samples, winner):
    assert tune_with(samples).winners == ({str(CALL): winner} if winner else {})


def test_a_new_measurement_replaces_the_old_one_and_keeps_other_products(on_a_cpu):
    other = replace(CALL, m=128)
    tune_with({"cpu": [200.0], "aten": [100.0]}, (CALL, other)).save()
    found = tune_with({"cpu": [100.0], "aten": [100.0]})
    assert found.winners == {str(other): "aten"}
    assert found.times[str(CALL)] == {"cpu": 100.0, "aten": 100.0}


def test_an_older_profile_loads_without_its_rates_and_triton(caplog):
    path = profile.Profile(MACHINE, winners={"x": "aten", "y": "triton"}).save()
    path.write_text(json.dumps({**json.loads(path.read_text()), "rates": {"clock": 1500.0, "power": 1e8, "dram": 3e6}}))
    assert profile.read(MACHINE) == profile.Profile(MACHINE, winners={"x": "aten"})
    assert not caplog.records


def test_a_backend_that_fails_is_left_out(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setattr(gemm_op, "aten", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no handle")))
    found = tune_with({"cpu": [1.0]})
    assert found.times == {str(CALL): {"cpu": 1.0}}
    assert "aten is left out: no handle" in capsys.readouterr().err


def test_a_profile_is_read_as_it_was_written(cache):
    written = profile.Profile(MACHINE)
    samples = {"cuda": [3.0, 3.0, 3.0], "aten": [1.0, 2.0, 1.0], "a tile": [2.0, 2.5, 2.0]}
    written.add(CALL, "cuda", samples, {"a tile": [2, 3, 1, 0]})
    assert written.plans == {str(CALL): (CALL, [2, 3, 1, 0])}
    assert written.winners == {str(CALL): "aten"}
    assert written.save() == cache / "amp_kernels" / "some-gpu-80gb.json"
    assert profile.read(MACHINE) == written
    assert [path.name for path in (cache / "amp_kernels").iterdir()] == ["some-gpu-80gb.json"]


@pytest.mark.parametrize("name", MACHINE, ids="another {}".format)
def test_a_profile_of_another_machine_is_ignored_with_one_warning(name, caplog):
    path = profile.Profile({**MACHINE, name: "another"}, {"x": {"aten": 1.0}}, {"x": "aten"}).save()
    path.rename(profile.path_of(MACHINE["gpu"]))
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        assert profile.read(MACHINE) == profile.Profile(MACHINE)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"measured with {name} another, this is {MACHINE[name]}" in record.message


GOOD = {"machine": MACHINE, "times": {}, "winners": {}, "plans": {}}


def test_an_empty_profile_is_not_damaged(caplog):
    """The next test's texts differ from it in one thing each."""
    path = profile.path_of(MACHINE["gpu"])
    path.parent.mkdir()
    path.write_text(json.dumps({**GOOD, "plans": {"x": [{"m": 1, "n": 2, "k": 3}, [2, 0, 1, 1]]}}))
    assert profile.read(MACHINE).plans == {"x": (ProductCall(1, 2, 3), [2, 0, 1, 1])}
    assert not caplog.records


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"machine": 3}',
        json.dumps({**GOOD, "winners": 3}),
        json.dumps({**GOOD, "winners": {"x": "tpu"}}),
        json.dumps({**GOOD, "winners": {"x": ["aten"]}}),
        json.dumps({"machine": MACHINE}),
        json.dumps({key: value for key, value in GOOD.items() if key != "plans"}),
        *(
            json.dumps({**GOOD, "plans": {"x": plan}})
            for plan in (
                3,
                [{"m": 1, "n": 2}, [2, 0, 1, 0]],
                [{"m": 0, "n": 2, "k": 3}, [2, 0, 1, 0]],
                [{"m": 1, "n": 2, "k": 3}, []],
                [{"m": 1, "n": 2, "k": 3}, [3, 0, 1, 0]],
                [{"m": 1, "n": 2, "k": 3}, [2, -1, 1, 0]],
                [{"m": 1, "n": 2, "k": 3}, [2, 0, 0, 0]],
                [{"m": 1, "n": 2, "k": 3}, [2, 0, 1.0, 0]],
            )
        ),
    ],
)
def test_a_damaged_profile_is_ignored_with_one_warning(text, caplog):
    path = profile.path_of(MACHINE["gpu"])
    path.parent.mkdir()
    path.write_text(text)
    assert profile.read(MACHINE) == profile.Profile(MACHINE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert profile.TUNE in caplog.text


def test_no_profile_is_no_warning(caplog):
    assert profile.read(MACHINE) == profile.Profile(MACHINE)
    assert not caplog.records


@pytest.fixture
def gpu(monkeypatch):
    """A tensor on a GPU, of a call that its profile gives to torch's product."""
    monkeypatch.setattr(policy, "described", lambda *args: CALL)
    monkeypatch.setattr(policy, "_select", lambda *args: "cuda")
    monkeypatch.setattr(policy, "capability_of", lambda *args: (9, 0))
    monkeypatch.setattr(profile, "of_device", lambda index: profile.Profile(MACHINE, winners={str(CALL): "aten"}))
    for cached in (policy._looks, policy._winner):
        monkeypatch.setattr(policy, cached.__name__, cached.__wrapped__)
    return SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda", index=0))


def test_the_policy_takes_the_winner_and_says_so_once(gpu, caplog, monkeypatch):
    monkeypatch.setattr(policy, "_winner", functools.cache(policy._winner))
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        assert [policy.select_product(gemm_op, gpu, (), {}) for _ in range(2)] == ["aten", "aten"]
    (record,) = caplog.records
    assert f"{CALL} on cuda: aten (faster than cuda" in record.message


def test_the_winner_does_not_run_against_what_was_asked_for(gpu, monkeypatch):
    assert policy.select_product(gemm_op, gpu, (), {"batch_invariant": True}) == "cuda"
    with ak.backend("cuda"):
        assert policy.select_product(gemm_op, gpu, (), {}) == "cuda"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert policy.select_product(gemm_op, gpu, (), {}) == "cuda"


def test_a_winner_that_is_not_here_does_not_run(gpu, monkeypatch):
    monkeypatch.setattr(policy, "why_not", lambda *args: {"aten": "absent"})
    assert policy.select_product(gemm_op, gpu, (), {}) == "cuda"


PLAIN = ProductCall(128, 256, 512)
#: Products that the kernels of mma.sync take where no GPU of that capability was timed.
OURS = {
    "bias": {"bias": True},
    "activation": {"activation": "gelu"},
    "residual": {"residual": True},
    "pre-activation": {"preact": True},
    "fp32 result": {"out": "fp32"},
    "unaligned rows": {"k": 511},
    "unaligned result": {"n": 255},
    "derivative": {"op": "gemm_dact"},
    "sum": {"op": "gemm_accumulate_", "out": "fp32"},
}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("timed", [False, True])
def test_plain_products_are_torchs_where_no_product_was_timed(capability, timed, gpu, monkeypatch):
    measured = profile.Profile(MACHINE, times={str(CALL): {"cuda": 1.0}} if timed else {})
    monkeypatch.setattr(profile, "of_device", lambda index: measured)
    monkeypatch.setattr(policy, "capability_of", lambda *args: capability)
    untimed = capability != (9, 0) and not timed
    for changed in ({}, {"batch": 3, "layout": "TN"}, *OURS.values()):
        call = replace(PLAIN, **changed)
        monkeypatch.setattr(policy, "described", lambda *args, call=call: call)
        winner = policy.select_product(gemm_op, gpu, (), {})
        assert winner == ("aten" if untimed and changed not in OURS.values() else "cuda"), call
        assert policy.select_product(gemm_op, gpu, (), {"batch_invariant": True}) == "cuda"
    chosen = policy.choose("gemm", "cuda", capability, BUILT)
    assert ("until" in chosen.reason) == (capability != (9, 0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_holds_the_winner(dynamic, monkeypatch):
    """The winner is the one for the sizes of the program. A program for any sizes keeps the op, as other products do."""
    called = []

    def compiler(graph, _):
        called.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(policy, "_looks", lambda index: True)
    monkeypatch.setattr(policy, "_winner", lambda op, index, call: "aten" if call == replace(CALL, bias=True) else None)
    select = policy.select_product
    on_gpu = lambda t: SimpleNamespace(is_cuda=True, device=t.device)  # noqa: E731
    monkeypatch.setattr(policy, "select_product", lambda op, tensor, *call: select(op, on_gpu(tensor), *call))
    layer = ak.nn.Linear(16, 32).bfloat16()
    x = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    torch.compiler.reset()
    program = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=compiler))
    program(x).sum().backward()
    forward, backward = called
    assert ("aten.addmm.default" in forward) == (not dynamic)
    assert ("amp_kernels.gemm.default" in forward) != ("aten.addmm.default" in forward)
    assert "amp_kernels.gemm.default" in backward


@pytest.mark.parametrize(
    ("capability", "winners", "serve"),
    [((9, 0), {}, True), ((9, 0), {str(CALL): "aten"}, False), ((8, 0), {}, False)],
    ids=["none", "one", "untimed"],
)
def test_the_cpp_nodes_serve_a_gpu_without_winners(capability, winners, serve, monkeypatch):
    """They call the CUDA kernels, whatever the sizes."""
    served = []
    monkeypatch.setattr(policy, "_looks", policy._looks.__wrapped__)
    monkeypatch.setattr(nodes, "serve_gpu", served.append)
    monkeypatch.setattr(policy, "capability_of", lambda *args: capability)
    monkeypatch.setattr(profile, "of_device", lambda index: profile.Profile(MACHINE, winners=winners))
    op = SimpleNamespace(name="gemm", built=BUILT)
    assert policy._select.__wrapped__(op, "cuda", 5, None, False) == "cuda"
    assert served == [5] * serve


def test_products_of_a_model():
    layer, x = ak.nn.Linear(16, 32).bfloat16(), torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    found = tune.products(None, lambda: layer(x).square().sum().backward())
    forward, *backward = found
    assert forward == replace(CALL, bias=True)
    assert {(call.m, call.n, call.k) for call in backward} == {(64, 16, 32), (32, 16, 64)}
    with pytest.raises(ValueError, match="no matrix product"):
        tune.products(None, lambda: None)


def test_products_of_a_file(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps([{"m": 64, "n": 32, "k": 16}]))
    assert tune.products(path, None) == [CALL]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"m": 1}, "a list of objects"),
        ([{"m": 1, "n": 2, "k": 3, "sise": 4}], "'sise'"),
        ([{"m": 0, "n": 2, "k": 3}], "m is 0; accepted: whole numbers from 1 on"),
        ([{"m": 1, "n": 2, "k": 3, "layout": "TX"}], "layout is 'TX'; accepted: NN, NT, TN, TT"),
        ([{"m": 1, "n": 2, "k": 3, "dtype": "fp8"}], "dtype is 'fp8'"),
    ],
)
def test_a_wrong_file_says_what_is_accepted(tmp_path, rows, said):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=said):
        tune.products(path, None)


def test_tune_wants_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.run(SimpleNamespace()) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_machine_of_a_profile_is_described_by_public_means(monkeypatch, tmp_path):
    """The name of the GPU is all that is played: a machine without a driver has none, and the driver's library is asked otherwise."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    described = profile.machine(0)
    assert described["gpu"] == "Some GPU"
    assert described["driver"] == "none" or int(described["driver"]) >= 11000

    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, to):
            to._obj.value = 13010

    monkeypatch.setattr(profile.ctypes, "CDLL", Driver)
    assert profile.driver_version() == "13010"
