"""cast_: torch's copy_ bit for bit over mixed pairs of dtypes, and stochastic rounding whose mean is the value."""

import contextlib
import itertools

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import load, nodes
from amp_kernels.ops.cast import op

from ..helpers.generators import normal

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PAIRS = list(itertools.product(DTYPES, DTYPES))


@pytest.fixture(params=[None, "cpu", "emulate", "reference"])
def backend(request):
    """``None``: no choice, and on the CPU the module ``_nodes`` where there is one."""
    with contextlib.nullcontext() if request.param is None else ak.backend(request.param):
        yield request.param


def test_equals_torchs_copy(backend):
    """A list of all pairs and sizes, some after an odd offset on one side or both; what lies around them stays."""
    sizes = [0, 1, 8, 1023, 1025, 16385]
    # Of 8 and 1023 elements: from the second on.
    sources = [(normal(n + 1, dtype=of, seed=n) * 100)[n // 5 % 2 :][:n] for n in sizes for _, of in PAIRS]
    memory = [torch.full((n + 3,), 7.0, dtype=to) for n in sizes for to, _ in PAIRS]
    ak.cast_(
        [whole[i % 3 : i % 3 + s.numel()] for i, (whole, s) in enumerate(zip(memory, sources, strict=True))], sources
    )
    for i, (whole, source) in enumerate(zip(memory, sources, strict=True)):
        want = torch.full_like(whole, 7.0)
        want[i % 3 : i % 3 + source.numel()].copy_(source)
        assert torch.equal(whole, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_unbiased(dtype):
    """Only the two neighbours occur, and the upper one as often as the fraction says: 5 standard deviations."""
    n, fraction = 2**16, 0.3
    low = torch.ones((), dtype=dtype)
    high = torch.nextafter(low, low * 2)
    source = torch.full((n,), 1 + fraction * (high.double() - 1).item())
    out = torch.empty(n, dtype=dtype)
    ak.cast_([out], [source], seed=1)
    assert ((out == low) | (out == high)).all()
    share = (out == high).double().mean().item()
    assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / n) ** 0.5


def test_results_in_fp32_need_no_random_bits(backend):
    sources = [normal(1500, dtype=dtype) for dtype in DTYPES]
    out = [torch.empty(1500) for _ in sources]
    ak.cast_(out, sources, seed=1)
    for result, source in zip(out, sources, strict=True):
        assert torch.equal(result, source.float())


def test_random_bits_depend_on_seed_step_position_and_element_alone(backend):
    source = normal(3000)

    def cast(count=2, at=0, **key):
        out = [torch.zeros(3000, dtype=torch.bfloat16) for _ in range(count)]
        ak.cast_(out, [source] * count, **key)
        return out[at]

    step = torch.tensor(2.0)
    first = cast(seed=5, step=step)
    assert torch.equal(first, cast(1, seed=5, step=step))
    for other in (
        {"seed": 6, "step": step},
        {"seed": 5 + 2**32, "step": step},
        {"seed": 5, "step": step + 1},
        {"seed": 5},
    ):
        assert not torch.equal(first, cast(**other)), other
    assert not torch.equal(first, cast(at=1, seed=5, step=step))
    with ak.backend("reference"):
        assert torch.equal(first, cast(seed=5, step=step))


def test_a_list_longer_than_a_launch(backend):
    """Stochastic, so that each tensor's place in the list counts; some are empty."""
    sources = [normal(i % 7, seed=i) for i in range(935)]
    out, want = ([torch.zeros(s.shape, dtype=torch.bfloat16) for s in sources] for _ in range(2))
    ak.cast_(out, sources, seed=2**40 + 3)
    with ak.backend("reference"):
        ak.cast_(want, sources, seed=2**40 + 3)
    assert all(map(torch.equal, out, want))


def test_autograd_sees_the_write():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    ak.cast_([weight], [torch.zeros(3, dtype=torch.bfloat16)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif("nodes" in load.absent(), reason=f"no _nodes: {load.absent().get('nodes')}")
def test_plain_lists_are_cast_in_cpp_and_others_left_to_python():
    memory = torch.zeros(16)  # whose halves touch
    assert nodes.cast_lists([memory[:8], torch.empty(0)], (memory[8:], torch.empty(0, dtype=torch.float16)))
    with torch.inference_mode():
        written = torch.zeros(4, dtype=torch.float16)
    assert nodes.cast_lists([written], [ONE])  # it has no version counter
    assert (written == 1).all()

    out = torch.zeros(4)
    others = [
        ([], []),
        (out, ONE),
        ([out], [ONE, ONE]),
        ([out], [1.0]),
        ([out], [ONE.double()]),
        ([out], [torch.ones(5)]),
        ([out], [torch.ones(2, 2)]),
        ([out], [torch.ones(4, device="meta")]),
        ([out], [torch.ones(4).to_sparse()]),
        ([out[::2]], [ONE[::2]]),
        ([out, memory[:4]], [ONE, memory[3:7]]),
        ([out, out], [ONE, HALF]),
    ]
    for destinations, sources in others:
        assert nodes.cast_lists(destinations, sources) is None
    with ak.backend("cpu"):
        assert nodes.cast_lists([out], [ONE]) is None
    assert (out == 0).all()


def test_compiled():
    destinations = [torch.zeros(9, dtype=torch.float16), torch.zeros(4)]
    sources = [normal(9), normal(4, dtype=torch.bfloat16)]
    torch.compile(lambda d, s: ak.cast_(d, s), backend="aot_eager", fullgraph=True)(destinations, sources)
    assert torch.equal(destinations[0], sources[0].half())
    assert torch.equal(destinations[1], sources[1].float())


ONE, HALF = torch.ones(4), torch.ones(4, dtype=torch.float16)
SHARED = torch.ones(8)


@pytest.mark.parametrize(
    ("destinations", "sources", "options", "error", "text"),
    [
        ([], [], {}, ValueError, "destinations is an empty list"),
        (ONE, [ONE], {}, TypeError, "destinations has type torch.Tensor"),
        ([HALF], [ONE, ONE], {}, ValueError, "there are 1 destinations and 2 sources"),
        ([HALF], [ONE.double()], {}, TypeError, r"sources\[0\] is torch.float64; accepted: float16, bfloat16, float32"),
        ([HALF], [torch.ones(5)], {}, ValueError, r"destinations\[0\] is float16\[4\].*sources\[0\] float32\[5\]"),
        ([torch.ones(2, 3)], [torch.ones(3, 2).t()], {}, ValueError, ".*accepted: one shape and the same strides"),
        ([HALF], [torch.ones(4, device="meta")], {}, ValueError, "sources are on meta and destinations on cpu"),
        ([SHARED[:4], SHARED[3:7]], [ONE, ONE], {}, ValueError, r"destinations\[0\] and destinations\[1\] share memory"),
        ([HALF, SHARED[:4]], [ONE, SHARED[2:6]], {}, ValueError, r"destinations\[1\] and sources\[1\] share memory"),
        ([HALF], [ONE], {"seed": -1}, ValueError, "seed is -1"),
        ([HALF], [ONE], {"step": torch.ones(())}, ValueError, "step was given without seed"),
        ([HALF], [ONE], {"seed": 1, "step": torch.ones(2)}, TypeError, "step is float32"),
    ],
)  # fmt: skip
def test_bad_calls_change_nothing(destinations, sources, options, error, text):
    with pytest.raises(error, match=f"cast_: {text}"):
        ak.cast_(destinations, sources, **options)
    assert all((t == 1).all() for t in destinations)


def test_one_source_may_fill_several_destinations():
    out = [torch.empty(4, dtype=dtype) for dtype in DTYPES]
    ak.cast_(out, [ONE] * 3)
    assert all((t == 1).all() for t in out)


@pytest.mark.parametrize(
    ("destinations", "sources", "text"),
    [
        ([HALF], [ONE, ONE], "there are 1 destinations and 2 sources"),
        ([HALF], [ONE.double()], r"sources\[0\] must have dtype .* got float64"),
        ([torch.ones(4)[::2]], [torch.ones(4)[::2]], r"destinations\[0\] must cover"),
        ([torch.ones(2, 3)], [torch.ones(3, 2).t()], r"destinations\[0\] has shape .*; they must be the same"),
    ],
)
def test_the_raw_op_guards_memory(destinations, sources, text):
    for overload in (op.overload, op.emulated):
        with pytest.raises(RuntimeError, match=f"cast_: {text}"):
            overload(destinations, sources)
