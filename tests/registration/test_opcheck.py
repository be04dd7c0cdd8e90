"""Every op of the registry, on its own samples: torch's opcheck, backends against the reference, fake tensors,
aot_eager. The twins on the emulator too: so the host code of the CUDA ops runs, and is checked, without a GPU."""

import copy

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli.check import available_backends, check_backend

from ..ops import composites

NAMES = sorted(REGISTRY)
KERNELS = [name for name in NAMES if not REGISTRY[name].composite]
#: Compilers see torch's operations instead of these. They round at other places; everything else has the bits of eager calls.
DECOMPOSED = ("activation", "norm")
#: The checks of ``torch.library.opcheck``.
UNTRACED, TRACED = ("test_schema", "test_autograd_registration", "test_faketensor"), "test_aot_dispatch_dynamic"


def samples(name):
    return list(composites.samples(REGISTRY[name], "cpu"))


def detached(values):
    """Clones without autograd, so that a mutating op may write to them."""
    return copy.deepcopy(
        [[t.detach() for t in v] if isinstance(v, list) and v and isinstance(v[0], torch.Tensor) else v for v in values]
    )


def tolerance(name, args, kwargs):
    """Tolerance of a compiled result against the eager one. Each rounds once; a gradient that meets another in a 16-bit residual stream
    is rounded three times by torch's operations."""
    floats = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if name not in DECOMPOSED or floats[0].dtype == torch.float64:
        return {"rtol": 0, "atol": 0}
    dtypes = {t.dtype for t in floats} | {value for value in kwargs.values() if isinstance(value, torch.dtype)}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return dict.fromkeys(("rtol", "atol"), 4 * eps)


def test_every_op_has_samples():
    assert {"adamw_", "check_and_norm", "gemm", "lamb_", "lion_", "sgd_", "unscale_", "update_scale_"} <= set(NAMES)
    for name in NAMES:
        assert samples(name), name


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    for args, kwargs in samples(name):
        torch.library.opcheck(REGISTRY[name].overload, args, kwargs, test_utils=UNTRACED)


#: Tracing takes a hundred times as long as the call, so every run traces one sample in six of each op.
each_sixth = pytest.mark.parametrize(
    "first", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 6))]
)


@pytest.mark.slow
@each_sixth
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_of_aot_dispatch(name, first):
    for args, kwargs in samples(name)[first::6]:
        given = tolerance(name, args, kwargs) if name in DECOMPOSED else {}  # else torch's
        torch.library.opcheck(REGISTRY[name].overload, args, kwargs, test_utils=TRACED, **given)


@each_sixth
@pytest.mark.parametrize("name", KERNELS)
def test_opcheck_on_the_emulator(name, first):
    for args, kwargs in samples(name)[first::6]:
        torch.library.opcheck(REGISTRY[name].emulated, args, kwargs)


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_backends_agree_with_the_reference(name):
    for backend in available_backends(REGISTRY[name], "cpu"):
        if backend != "triton":  # it has tests of its own, with their own process settings
            assert check_backend(REGISTRY[name], backend, "cpu") == len(samples(name))


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_seeded(name):
    for first, second in zip(samples(name), samples(name), strict=True):
        torch.testing.assert_close([*flat(first)], [*flat(second)], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in NAMES if REGISTRY[n].mutated])
def test_mutating_op_bumps_versions_of_what_it_mutates_and_of_nothing_else(name):
    op = REGISTRY[name]
    for run in (op, op.overload, op.emulated, ak.backend("reference")(op)):
        args, kwargs = samples(name)[0]
        args = detached(args)
        mutated = {position for position, _ in op.mutated}
        before = [[t._version for t in flat(value)] for value in args]
        run(*args, **kwargs)
        for i, value in enumerate(args):
            for old, tensor in zip(before[i], flat(value), strict=True):
                if tensor.numel():
                    assert (tensor._version > old) == (i in mutated), (name, i)


@pytest.mark.parametrize("name", NAMES)
def test_aot_eager_gives_the_eager_result(name):
    op = REGISTRY[name]
    for args, kwargs in samples(name)[:3]:
        eager_args, compiled_args = detached(args), detached(args)
        torch._dynamo.reset()
        expected = op(*eager_args, **kwargs)
        actual = torch.compile(lambda *a, op=op, kw=kwargs: op(*a, **kw), backend="aot_eager", fullgraph=True)(
            *compiled_args
        )
        given = tolerance(name, args, kwargs)
        torch.testing.assert_close([actual, compiled_args], [expected, eager_args], **given, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors(name):
    """Shapes and dtypes without data: what deferred initialisation and shape propagation need."""
    args, kwargs = samples(name)[0]
    names = (argument.name for argument in REGISTRY[name].schema.arguments)
    meta = [value if argument == "layout" else to_meta(value) for argument, value in zip(names, args, strict=False)]
    with ak.backend("reference"):
        expected = REGISTRY[name](*detached(args), **kwargs)
    for overload in filter(None, (REGISTRY[name].overload, REGISTRY[name].emulated)):
        actual = overload(*meta, **{key: to_meta(value) for key, value in kwargs.items()})
        for e, a in zip(flat(expected), flat(actual), strict=True):
            assert (a.shape, a.dtype, a.device.type) == (e.shape, e.dtype, "meta")


def to_meta(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    return [to_meta(v) for v in value] if isinstance(value, list) else value


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return flat(list(value.values()))
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else []
