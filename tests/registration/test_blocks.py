"""Blocks of a setting that overlap: nested, in two threads, ended in any order, and mixed with the switch."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import nodes
from amp_kernels._dispatch.batch_invariant import is_batch_invariant
from amp_kernels._dispatch.policy import requested_backend

BLOCKS = {
    "backend": (ak.backend, requested_backend, ("reference", "cpu"), None),
    "batch_invariant": (ak.batch_invariant, is_batch_invariant, (True, False), False),
}


@pytest.fixture(params=BLOCKS)
def setting(request):
    return BLOCKS[request.param]


@pytest.fixture
def others():
    """Two threads beside this one, that live on: each call waits for its result."""
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield tuple(lambda f, *args, pool=pool: pool.submit(f, *args).result() for pool in (first, second))


def is_plain():
    """True if the C++ module serves a norm, as it does in no block; true where there is no module."""
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    out = ak.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), 8, weight)
    return nodes._module is None or not isinstance(out.grad_fn, torch.autograd.function.BackwardCFunction)


def test_each_thread_has_its_own_and_the_rest_what_was_entered_last(setting, others):
    block, now, (one, two), none = setting
    first, second = others
    mine, theirs = block(one), block(two)
    first(mine.__enter__)
    assert (first(now), second(now), now()) == (one, one, one)
    second(theirs.__enter__)
    assert (first(now), second(now), now()) == (one, two, two)
    inner = block(two)
    first(inner.__enter__)
    assert first(now) == two
    first(inner.__exit__, None, None, None)
    assert (first(now), second(now), now()) == (one, two, two)
    first(mine.__exit__, None, None, None)
    assert (first(now), second(now), now()) == (two, two, two)
    second(theirs.__exit__, None, None, None)
    assert (first(now), second(now), now()) == (none, none, none)
    assert is_plain()


def test_blocks_of_one_thread_end_in_any_order(setting):
    block, now, (one, two), none = setting
    outer, inner = block(one), block(two)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert now() == two
    inner.__exit__(None, None, None)
    assert now() == none
    assert is_plain()


def test_a_block_may_end_in_another_thread(setting, others):
    """As that of a generator which is collected there."""
    block, now, (one, two), none = setting
    mine = block(one)
    mine.__enter__()
    with block(two):
        others[0](mine.__exit__, None, None, None)
        assert now() == two
    assert now() == none


def test_many_threads_at_once(setting):
    block, now, values, none = setting
    gate = threading.Barrier(8)

    def run(value):
        gate.wait()
        for _ in range(200):
            with block(value):
                if now() != value:
                    return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, values * 4))
    assert now() == none
    assert is_plain()


@pytest.mark.parametrize("first", [False, True], ids=["off within", "on within"])
def test_the_switch_is_turned_within_a_block(first):
    layer, x = ak.nn.Linear(8, 8), torch.ones(1, 8)
    ak.set_enabled(first is False)
    with contextlib.ExitStack() as after:
        after.callback(ak.set_enabled, True)
        with ak.backend("reference"):
            ak.set_enabled(first)
        assert is_plain() == (first or nodes._module is None)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == (torch.bfloat16 if first else torch.float32)
    assert is_plain()


def test_a_compiled_function_follows_the_block_of_the_thread_that_calls_it(others):
    torch._dynamo.reset()
    graphs, w = [], torch.ones(8, 8, dtype=torch.bfloat16)

    def backend(graph, inputs):
        told = [node.kwargs["batch_invariant"] for node in graph.graph.nodes if "linear" in str(node.target)]
        return lambda *args: graphs.extend(told) or graph(*args)

    compiled = torch.compile(lambda x: ak.linear(x, w), fullgraph=True, backend=backend)
    theirs = ak.batch_invariant(False)
    with ak.batch_invariant():
        others[0](theirs.__enter__)
        for call in (lambda f, *args: f(*args), *others):
            call(compiled, w)
        others[0](theirs.__exit__, None, None, None)
        compiled(w)
    compiled(w)
    assert graphs == [True, False, False, True, False]
