"""The tables of addresses that optimizers hand to the compiled ops: what guards them, and what the ops still refuse."""

from array import array

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels._dispatch import nodes
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw import check_and_norm
from amp_kernels._raw.update_scale import op as update_scale_
from amp_kernels._updates.adamw import adamw_
from amp_kernels._updates.lamb import lamb_
from amp_kernels._updates.state import LAYOUT_COLUMNS, TABLE_DTYPES, Column

from ..helpers.emulator import launches
from .optimizers import bf16, f16
from .pairs import launches_of

pytestmark = pytest.mark.skipif(nodes.step_walk() is None, reason="the module _nodes was not built for this torch")


def test_columns_are_those_of_cpp():
    _host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")
    assert [column.name.lower() for column in Column] == _host.table_columns()


def test_gradients_that_are_given():
    """Those that a list gives are compared with what was remembered, and their addresses are written."""
    walk, params = nodes.step_walk(), [torch.zeros(4, 4), torch.zeros(3, dtype=bf16)]
    grads = [torch.ones(4, 4), torch.ones(3, dtype=bf16)]
    known, words = walk.remember_tensors(params, grads), array("q", [0, 0, 0, 0])
    assert walk.refresh_addresses(known, params, grads, words, 1, 2)
    assert list(words) == [0, grads[0].data_ptr(), 0, grads[1].data_ptr()]
    others = [
        torch.zeros(4, 4).t(), torch.zeros(4, 5)[:, :4], torch.zeros(4, 4, dtype=f16), torch.zeros(16), None,
        torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4, device="meta"),
    ]  # fmt: skip
    for other in others:
        assert not walk.refresh_addresses(known, params, [other, grads[1]], words, 1, 2)
        if other is not None:
            assert not walk.refresh_addresses(known, [other, params[1]], grads, words, 1, 2)
    assert not walk.refresh_addresses(known, params, grads[::-1], words, 1, 2)
    assert not walk.refresh_addresses(known, [p.clone() for p in params], grads, words, 1, 2)  # moved
    assert not walk.refresh_addresses(known, params, None, words, 1, 2)  # they have none


def test_a_call_below_autograd_bumps_versions():
    scale, tracker, left = torch.tensor(8.0), torch.zeros((), dtype=torch.int32), torch.ones((), dtype=torch.int32)
    versions = [t._version for t in (scale, tracker, left)]
    update_scale_(scale, tracker, left, [torch.tensor(0.0)], 2.0, 0.5, 2000, 0.0, 1e9, 1)
    assert [t._version for t in (scale, tracker, left)] == [version + 1 for version in versions]


def table_of(params, kind=akopt.AdamW):
    optimizer = kind(params, lr=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    ((batch, _, table),) = launches_of(optimizer)
    packed = optimizer._plan.hyper.packed(optimizer.param_groups)
    numbers = packed.options[batch.op.declared.name], packed.ema_decays, packed.flags
    tail = ([], [], None, None, None, *numbers, 0.0, 0, None)
    state = batch.state(packed.used, packed.averaged)
    return [p.grad for p in params], table.tensor.clone(), state, tail


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 0, "params\\[1\\] is at address 0"),
        (1, 2, "grads\\[1\\] is at address 2"),
        (2, 1 << 40, "needs 1099511627776 elements"),
        (2, -1, "has -1 elements"),
        (3, 7, "params\\[1\\] must have dtype float16, bfloat16, float32; got float64"),
        (4, 3, "grads\\[1\\] must have dtype"),
        (4, 261, "grads\\[1\\] must have dtype"),
        (5, 1, "names block 1; there are 1"),
        (6, -16, "from element -16"),
        (6, 64, "from element 64"),
        (7, 2, "steps"),
        (8, 1, "names group 1"),
        (9, -1, "index -1"),
        (10, 32, "width 32 and pitch 0"),
        (11, 32, "width 0 and pitch 32"),
        (12, 0, "16 elements and matrices of 0 by 16"),
        (13, 0, "16 elements and matrices of 1 by 0"),
        (13, 5, "16 elements and matrices of 1 by 5"),
        (13, 17, "16 elements and matrices of 1 by 17"),
    ],
)
@pytest.mark.skipif(not REGISTRY["adamw_"].built.cpu, reason="the C++ library is not built")
def test_rows_are_checked(column, value, message):
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(16))]
    _, table, state, tail = table_of(params)
    table[1, column] = value
    before = [p.clone() for p in params]
    with pytest.raises(RuntimeError, match=message):
        adamw_.of_table(table, *state, *tail)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.skipif(not REGISTRY["check_and_norm"].built.cpu, reason="the C++ library is not built")
def test_check_and_norm_reads_the_table():
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(16))]
    grads, table, *_ = table_of(params)
    scale = torch.tensor(4.0)
    for per_tensor in (False, True):
        results = check_and_norm.of_table(grads[0], table, scale, per_tensor)
        for one, other in zip(check_and_norm.op(grads, scale, per_tensor=per_tensor), results, strict=True):
            assert torch.equal(one, other)
    for wrong in (table[:, :11], table.int(), table.t().contiguous()[:3]):
        with pytest.raises(RuntimeError, match="check_and_norm: table must"):
            check_and_norm.of_table(grads[0], wrong, None, False)
    assert TABLE_DTYPES[torch.float64] == 7


@pytest.mark.skipif(not adamw_.op.built.emulate, reason="the emulated library is not built")
def test_on_the_emulator_a_table_reaches_the_emulated_kernels():
    params = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(16))]
    with ak.backend("emulate"):
        grads, table, state, tail = table_of(params)
        before = [p.clone() for p in params]
        check_and_norm.of_table(grads[0], table, None, False)
        assert [launch.name for launch in launches()] == ["check_and_norm"]
        adamw_.of_table(table, *state, *tail)
        assert [launch.name for launch in launches()] == ["update_prepare", "adamw_"]
    assert all(not torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "emulate"])
def test_halves_of_a_step_from_a_table(backend):
    """LAMB over pieces of tensors: each half does what it does with lists."""
    if not getattr(REGISTRY["lamb_half_"].built, backend):
        pytest.skip(f"the {backend} library is not built")
    found = []
    with ak.backend(backend):
        for from_table in (False, True):
            params = [torch.nn.Parameter(torch.full((n,), 2.0)) for n in (5, 16)]
            grads, table, state, tail = table_of(params, akopt.LAMB)
            layout = table[:, LAYOUT_COLUMNS].contiguous()
            squares = torch.zeros(2, 2, dtype=torch.float64)
            for second in (False, True):
                if from_table:
                    lamb_.half_of_table(table, *state, *tail, squares, second)
                else:
                    lamb_.half_op([p.detach() for p in params], grads, *state, layout, *tail, squares, second)
            found.append([squares, *(p.detach() for p in params), *(buffer.clone() for buffer in state[0])])
        assert all(map(torch.equal, *found))
        assert found[0][0].count_nonzero() == 4
        with pytest.raises(
            RuntimeError, match=r"lamb_half_: squares must be contiguous with shape \(2, 2\); got shape \(3, 2\)"
        ):
            lamb_.half_of_table(table, *state, *tail, torch.zeros(3, 2, dtype=torch.float64), False)
