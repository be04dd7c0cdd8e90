"""Launches of every persistent kernel on an H200, recorded and not run: its blocks are those that the multiprocessors hold at once, by the
registers of the built library, and rings of shared memory have enough bytes in flight."""

import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.exponent_histogram import exponent_histogram
from amp_kernels._raw.unscale import unscale_
from tools.ptx import host
from tools.ptx.cuobjdump import cuobjdump

from ..build.kernel_budgets import BUDGETS, FLOOR
from ..build.test_kernel_budgets import LIBRARY, held, kernel_of
from .preloaded import machine, set_chip

machine()

SMS, SHARED = 132, 228 * 1024
F16, F32 = torch.bfloat16, torch.float32
# Persistent kernels that launch fewer blocks than an SM holds, and the reason.
FEWER = {
    "embedding_pieces_kernel": "a grid for all of its types, which do not overlap the kernel before",
    "embedding_joints_kernel": "the grid of embedding_pieces_kernel",
    "embedding_in_order_kernel": "the grid of embedding_pieces_kernel",
    "rotary_gradient_kernel": "the order of sums depends on the grid, so all types have one",
}


def empty(*size, dtype=F16, grad=False):
    return torch.empty(*size, dtype=dtype, device="cuda", requires_grad=grad)


def norm(columns: int, dtype=F16):
    x, weight = empty(2**24 // columns, columns, dtype=dtype, grad=True), empty(columns, dtype=dtype, grad=True)
    y = ak.layer_norm(x, (columns,), weight, weight)
    y.backward(torch.empty_like(y))


def loss(columns: int, dtype=F16):
    x = empty(2**24 // columns, columns, dtype=dtype, grad=True)
    ak.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device="cuda"), reduction="sum").backward()


def step(name: str, **options):
    param = torch.nn.Parameter(empty(4096, 4096))
    param.grad = torch.empty_like(param)
    getattr(ak.optim, name)([param], lr=0.1, **options).step()


def embedding():
    weight = empty(50304, 768, grad=True)
    y = ak.embedding(torch.zeros(16384, dtype=torch.long, device="cuda"), weight)
    y.backward(torch.empty_like(y))


CALLS = {
    "check_and_norm": lambda: check_and_norm([empty(2**25)]),
    "check_and_norm per tensor": lambda: check_and_norm([empty(2**25)], per_tensor=True),
    "unscale": lambda: unscale_([empty(2**25)], empty((), dtype=F32), empty((), dtype=F32)),
    "histogram": lambda: exponent_histogram([empty(2**25)]),
    "cast": lambda: REGISTRY["cast_"]([empty(2**25)], [empty(2**25, dtype=F32)]),
    "cast, stochastic": lambda: REGISTRY["cast_"]([empty(2**25)], [empty(2**25, dtype=F32)], seed=1),
    "column_sums": lambda: REGISTRY["column_sums"](empty(16384, 4096)),
    "activation sums": lambda: REGISTRY["activation_backward"](
        empty(4096, 4096), empty(4096, 4096), activation="gelu", bias_grad=True
    ),
    "embedding": embedding,
    "linear": lambda: ak.linear(empty(4096, 4096), empty(4096, 4096)),
    "repack": lambda: ak.linear(empty(4095, 4097), empty(4099, 4097)),
    **{f"norm {n} {dtype}": lambda n=n, dtype=dtype: norm(n, dtype) for n in (768, 2048, 4096, 8192) for dtype in (F16, F32)},
    **{f"norm {n}": lambda n=n: norm(n) for n in (16384, 32768, 40000, 1001, 9001)},
    **{f"loss {n} {dtype}": lambda n=n, dtype=dtype: loss(n, dtype) for n in (1000, 8192, 32000, 128256) for dtype in (F16, F32)},
    **{
        f"{name} {options}": lambda name=name, options=options: step(name, **options)
        for name in ("AdamW", "SGD", "Lion", "LAMB", "Muon")
        for options in ({}, {"state_dtype": "8bit"}, {"ema_decay": 0.99}, {"independent_groups": True})
    },
}  # fmt: skip
# Kernels of one block a tensor or a row, or of work that the sizes here do not fill.
NOT_PERSISTENT = {
    "per_tensor_finish_kernel", "update_prepare_kernel", "lamb_rates_kernel", "gemm_column_sums_kernel", "row_squares_kernel",
    "scale_rows_kernel", "norm_forward_kernel", "judge_units_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def usage() -> dict[str, dict[str, int]]:
    """Registers and static shared memory of the functions for sm_90a."""
    found, arch, symbol = {}, "", ""
    for line in cuobjdump("-res-usage", str(LIBRARY)).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\S+):", line):
            symbol = match[1]
        elif "REG:" in line and arch == "sm_90a":
            found[symbol] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_persistent_kernel_launches_what_is_resident(name, usage, monkeypatch):
    class NotRun:
        def __init__(self, *args, **options):
            pass

        def run(self):
            return self

    monkeypatch.setattr(host, "Launch", NotRun)
    it = set_chip(90, SMS)
    before = len(it.prepared)
    CALLS[name]()
    assert len(it.prepared) > before
    for launch in it.prepared[before:]:
        kernel, of = kernel_of(launch.kernel.name), usage[launch.kernel.name]
        shared = max(of["SHARED"], 1024) + launch.shared_bytes
        resident = min(held(launch.block[0], of["REG"]), SHARED // shared)
        if BUDGETS[kernel].ring:
            assert resident * launch.shared_bytes >= FLOOR, kernel
        if kernel in NOT_PERSISTENT:
            continue
        launched = -(-launch.grid[0] // SMS)
        whole_waves = launched % resident == 0  # one, but for unaligned rows of norm_backward_sums_kernel
        assert whole_waves or (launched < resident and kernel in FEWER), kernel
