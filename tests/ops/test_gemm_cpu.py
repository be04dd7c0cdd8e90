"""The CPU's 16-bit products on each instruction set: exact at the edges of every block, the same bits for any number of
threads and rows, nothing read beyond the operands."""

import itertools
import os
import threading

import pytest
import torch

from amp_kernels._dispatch import cpu_isa

from ..helpers.generators import HALF_DTYPES, integers, operand
from ..helpers.patience import PATIENCE
from ..helpers.processes import python
from .raw import gemm, gemm_accumulate_, gemm_dact

#: Around tiles (4, 8, 16, 32; 16, 24, 32, 48), units of 64 rows, blocks of 192 columns, depths of 192 to 512.
ROWS = (1, 3, 8, 17, 33, 63, 64, 65, 130)
COLUMNS = (1, 15, 17, 24, 31, 33, 47, 48, 49, 97, 191, 193, 290)
DEPTHS = (0, 1, 2, 15, 31, 32, 33, 191, 193, 255, 256, 257, 513)


def problems():
    """Every size of each dimension, beside sizes of the others that go round."""
    sizes = ROWS, COLUMNS, DEPTHS
    for i in range(3 * max(map(len, sizes))):
        yield tuple(dimension[(i * step) % len(dimension)] for dimension, step in zip(sizes, (1, 2, 3), strict=True))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_exact_around_every_block(every_cpu_isa, generator, dtype):
    layouts = itertools.cycle(itertools.product(("row", "column", "padded", "padded_column"), repeat=2))
    for (m, n, k), (layout_a, layout_b) in zip(problems(), layouts, strict=False):
        a = integers(m, k, limit=3, dtype=dtype, generator=generator, layout=layout_a)
        b = integers(k, n, limit=3, dtype=dtype, generator=generator, layout=layout_b)
        expected = a.double() @ b.double()
        assert torch.equal(gemm(a, b, out_dtype=torch.float32).double(), expected), (m, n, k)
        c = torch.ones(m, n)
        gemm_accumulate_(c, a, b, alpha=2.0, beta=-1.0)
        assert torch.equal(c.double(), 2 * expected - 1), (m, n, k)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("few", [1, 3, 4, 6, 16, 17])
def test_thin_products_are_exact(every_cpu_isa, generator, threads, dtype, few):
    """Few rows, or few columns, in any layout, with batches, gates and sums of columns."""
    threads(2)
    for many, k, layout in itertools.product((1, 63, 130), (1, 31, 100, 2049), ("row", "padded_column")):
        a = integers(2, few, k, limit=3, dtype=dtype, generator=generator, layout=layout)
        b = integers(2, many, k, limit=3, dtype=dtype, generator=generator, layout="padded").mT
        ones = torch.ones(2, many, few)
        for one, other in ((a, b), (b.mT, a.mT)):
            expected = one.double() @ other.double()
            assert torch.equal(gemm(one, other, out_dtype=torch.float32).double(), expected)
            z = ones.mT if one is a else ones
            dz, sums = gemm_dact(one, other, z, activation="relu", bias_grad=True, out_dtype=torch.float32)
            assert torch.equal(dz.double(), expected)
            assert torch.equal(sums.double(), expected.sum((0, 1)))
        if many % 2 == 0:
            assert torch.equal(
                gemm(a, b, activation="swiglu", out_dtype=torch.float32, preact=True)[1],
                (a.double() @ b.double()).float(),
            )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("width", [1, 23, 48, 95, 97, 200])
def test_gates_and_values_meet_in_every_block(every_cpu_isa, generator, dtype, width):
    """The block of a gated activation takes the same columns of both halves; without it, gates stand beside other
    values."""
    a = integers(66, 40, limit=2, dtype=dtype, generator=generator)
    b = integers(40, 2 * width, limit=2, dtype=dtype, generator=generator, layout="column")
    bias = torch.arange(2 * width, dtype=torch.float32)
    out, z = gemm(a, b, bias, activation="swiglu", out_dtype=torch.float32, preact=True)
    exact = a.double() @ b.double() + bias
    assert torch.equal(z.double(), exact)
    gate, up = exact[:, :width], exact[:, width:]
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_exact_where_blocks_are_cut_for_several_threads(every_cpu_isa, generator, threads, count):
    """Products large enough to wake them, whose blocks are no whole panels and whose last block is smaller."""
    threads(count)
    for m, n, layout in ((200, 400, "row"), (130, 514, "column"), (1000, 50, "row")):
        a = integers(2, m, 160, limit=2, dtype=torch.bfloat16, generator=generator, layout=layout)
        b = integers(2, 160, n, limit=2, dtype=torch.bfloat16, generator=generator, layout="column")
        exact = a.double() @ b.double()
        for activation in ("none", "swiglu"):
            z = gemm(a, b, activation=activation, out_dtype=torch.float32, preact=True)[1]
            assert torch.equal(z.double(), exact), (m, n, activation)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_bits_depend_on_a_row_and_b_alone(every_cpu_isa, generator, threads, dtype):
    """Not on the number of threads, nor on the rows and batches beside; ATen's matmul, `portable`, promises neither."""
    options = {"out_dtype": torch.float32, "batch_invariant": every_cpu_isa == "portable"}
    a = operand(3, 130, 600, dtype=dtype, generator=generator)
    b = operand(3, 600, 200, dtype=dtype, generator=generator, layout="column")
    threads(1)
    whole = gemm(a, b, **options)
    for count in (2, 5):
        threads(count)
        assert torch.equal(gemm(a, b, **options), whole)
    for first, last in ((0, 17), (5, 29), (50, 67), (113, 130)):
        assert torch.equal(gemm(a[2, first:last], b[2], **options), whole[2, first:last])
    thin = gemm(a[2, :16], b[2], **options)  # summed in an order of its own
    for first, last in ((0, 1), (1, 4), (2, 7), (3, 16)):
        assert torch.equal(gemm(a[2, first:last], b[2], **options), thin[first:last])


def test_two_callers_at_once(every_cpu_isa, generator):
    """Scratch belongs to a thread."""
    problems = [
        (
            integers(70, k, limit=3, dtype=torch.bfloat16, generator=generator),
            integers(k, 300, limit=3, dtype=torch.bfloat16, generator=generator),
        )
        for k in (300, 301, 40)
    ]
    wrong = []

    def work(a, b):
        expected = (a.double() @ b.double()).float()
        wrong.extend(not torch.equal(gemm(a, b, out_dtype=torch.float32), expected) for _ in range(5))

    workers = [threading.Thread(target=work, args=problem) for problem in problems]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == [False] * 15


GUARDED = """
import ctypes, mmap, sys
import torch
from amp_kernels._dispatch.cpu_isa import cpu_isa
from amp_kernels._raw.gemm import gemm_op

libc = ctypes.CDLL(None, use_errno=True)
kept = []

def between_guards(values, at_end):
    # A copy of `values` that ends, or begins, at a page that may not be touched.
    page, size = mmap.PAGESIZE, values.numel() * values.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    kept.append(memory)
    offset = (pages + 1) * page - size if at_end else page
    view = torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + size].view(values.dtype).view(values.shape)
    return view.copy_(values)

for isa in sys.argv[1:]:
    with cpu_isa(isa):
        for m, n, k in ((1, 1, 1), (7, 5, 3), (9, 17, 33), (65, 49, 64), (33, 50, 257), (3, 70, 33), (70, 2, 65)):
            for dtype in (torch.float16, torch.bfloat16):
                for transposed_a in (False, True):
                    for transposed_b in (False, True):
                        for at_end in (False, True):
                            a = between_guards(torch.ones(k, m, dtype=dtype), at_end).t() if transposed_a else between_guards(
                                torch.ones(m, k, dtype=dtype), at_end)
                            b = between_guards(torch.ones(n, k, dtype=dtype), at_end).t() if transposed_b else between_guards(
                                torch.ones(k, n, dtype=dtype), at_end)
                            assert (gemm_op(a, b, out_dtype=torch.float32)[0] == k).all()
    print(isa)
"""


def test_reads_end_where_the_operands_end():
    """Memory that may not be touched lies before and after them."""
    assert python("-c", GUARDED, *cpu_isa.available()).stdout.split() == cpu_isa.available()


# ---- the tiles

TILES = [isa for isa in cpu_isa.available() if isa in ("amx", "amx_emulated")]


def by_tiles(a, b):
    results = []
    for isa in TILES:
        with cpu_isa.cpu_isa(isa):
            results.append(gemm(a, b, out_dtype=torch.float32))
    return results


def random_codes(*shape, generator):
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def scaled(low, high):
    """Numbers whose exponents are spread from ``low`` to ``high``."""

    def make(*shape, generator):
        exponents = torch.randint(low, high + 1, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).bfloat16()

    return make


def flushed(x, least=2.0**-126):
    return torch.where(x.abs() < least, 0 * x, x).float()


def product_by_the_manual(a, b):
    """tdpbf16ps by Intel's manual. Even and odd elements of 32 along K are summed apart, by fused multiply-adds, and
    both are added to the tile; subnormal numbers are flushed. float64 holds a product exactly, and has enough bits that
    its sum, rounded again, is the fused one. A sum that rounds up to 2^-126 is tiny."""
    a, b = (flushed(torch.nn.functional.pad(t.float(), (0, -t.shape[1] % 32))).double() for t in (a, b.t()))
    tile = torch.zeros(a.shape[0], b.shape[0])
    for first in range(0, a.shape[1], 32):
        sums = [torch.zeros_like(tile), torch.zeros_like(tile)]
        for p in range(first, first + 32):
            exact = a[:, p, None] * b[:, p] + sums[p % 2].double()
            sums[p % 2] = flushed(exact, 2.0**-126 - 2.0**-151)
        tile = flushed(tile + flushed(sums[0] + sums[1]))
    return tile


if TILES:

    @pytest.mark.parametrize(
        ("make_a", "make_b"),
        [
            pytest.param(random_codes, random_codes, id="every code"),
            pytest.param(scaled(0, 3), scaled(0, 3), id="normal"),
            pytest.param(scaled(-80, -55), scaled(-80, -55), id="products around the least normal number"),
            pytest.param(scaled(-135, -125), scaled(-4, 4), id="subnormal operands"),
            pytest.param(scaled(58, 66), scaled(58, 66), id="sums around the largest number"),
        ],
    )
    def test_tiles_have_the_bits_of_the_manual(generator, make_a, make_b):
        """Those of the machine, where it has them, and the emulated ones: by these the other tests run ``amx`` elsewhere."""
        for m, n, k in ((17, 17, 2), (32, 32, 32), (33, 65, 31), (64, 97, 512), (130, 40, 1101)):
            a, b = make_a(m, k, generator=generator), make_b(k, n, generator=generator)
            expected, results = product_by_the_manual(a, b), by_tiles(a, b)
            numbers = ~expected.isnan()
            for result in results:
                assert torch.equal(result.isnan(), ~numbers), (m, n, k)
                assert torch.equal(result[numbers].view(torch.int32), expected[numbers].view(torch.int32)), (m, n, k)
                assert torch.equal(result.view(torch.int32), results[0].view(torch.int32)), (m, n, k)  # of a NaN, too

    @pytest.mark.parametrize(("factor", "kept"), [(0.5, 1), (0.75, 0), (1.0, 0), (1.25, 0), (-1.0, 1)])
    def test_products_that_round_up_to_the_least_normal_number_are_flushed(factor, kept):
        """2^-126 - factor 2^-150: a number is tiny or not before its last bits become those of a subnormal one."""
        a, b = torch.zeros(32, 32), torch.zeros(32, 32)
        a[:, 0], b[0] = 2.0**-63, 2.0**-63
        a[:, 2], b[2] = -factor * 2.0**-75, 2.0**-75
        for result in by_tiles(a.bfloat16(), b.bfloat16()):
            assert (result == kept * 2.0**-126).all()


# ---- forked processes

FORKED = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset
from amp_kernels._dispatch import cpu_isa
from amp_kernels._raw.gemm import gemm_op

SMALL, LARGE = 40, 400  # runs on the calling thread alone; wakes other threads
torch.set_num_threads(2)

def right(size):
    # The expected product is an outer product: a product by torch would hang in a child.
    rows, columns = torch.arange(size) % 3, torch.arange(size) % 5
    a = rows.bfloat16()[:, None].repeat(1, size)
    b = columns.bfloat16().repeat(size, 1)
    return torch.equal(gemm_op(a, b, out_dtype=torch.float32)[0], (size * rows[:, None] * columns).float())

class Products(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return right(LARGE)

def in_workers():
    return torch.cat(list(DataLoader(Products(), num_workers=2, multiprocessing_context="fork"))).tolist()

def in_a_fork(threads, size):
    if (child := os.fork()) == 0:
        signal.alarm(int(sys.argv[1]))  # ends a child that hangs
        if threads:
            torch.set_num_threads(threads)
        os._exit(0 if right(size) else 1)
    return os.waitpid(child, 0)[1]

print(in_workers(), right(LARGE), in_workers())
print(in_a_fork(1, SMALL), in_a_fork(1, LARGE))
if cpu_isa.chosen() != "portable":  # torch's fp32 matmul, which waits for threads that a child does not have
    assert in_a_fork(None, SMALL) == 0
"""


@pytest.mark.parametrize("isa", [isa for isa in cpu_isa.available() if isa != "amx_emulated"])
def test_processes_forked_before_and_after_a_product(isa):
    """Linux grants the tiles to a process once, and its children inherit them. OpenMP's threads they do not inherit
    (docs/cpu.md)."""
    said = python("-c", FORKED, PATIENCE, AMP_KERNELS_CPU_ISA=isa).stdout
    assert said == f"{[True] * 4} True {[True] * 4}\n0 0\n"


# ---- the choice

NAMED = os.environ.get("AMP_KERNELS_CPU_ISA")


def test_portable_is_the_fp32_product_of_torch(generator):
    a = operand(40, 70, dtype=torch.bfloat16, generator=generator)
    b = operand(70, 50, dtype=torch.bfloat16, generator=generator)
    with cpu_isa.cpu_isa("portable"):
        assert torch.equal(gemm(a, b, out_dtype=torch.float32), a.float() @ b.float())


def test_deterministic_algorithms_take_the_portable_path():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert cpu_isa.chosen() == (NAMED or "portable")
        with cpu_isa.cpu_isa(cpu_isa.available()[-1]):  # an explicit choice holds
            assert cpu_isa.chosen() == cpu_isa.available()[-1]
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_best_set_is_chosen_and_blocks_nest():
    best = NAMED or [isa for isa in cpu_isa.available() if isa != "amx_emulated"][-1]
    assert cpu_isa.chosen() == best
    with cpu_isa.cpu_isa("portable"):
        with cpu_isa.cpu_isa(best):
            assert cpu_isa.chosen() == best
        assert cpu_isa.chosen() == "portable"
    assert cpu_isa.chosen() == best
    with pytest.raises(RuntimeError, match=r"request is 'mmx'; this machine has: portable"), cpu_isa.cpu_isa("mmx"):
        pass
    assert cpu_isa.chosen() == best


def test_the_environment_chooses():
    code = """
import os, torch, amp_kernels as ak
from amp_kernels._dispatch import cpu_isa
x = torch.ones(2, 2).bfloat16()
try:
    ak.matmul(x, x)
except RuntimeError as error:
    print(error)
os.environ["AMP_KERNELS_CPU_ISA"] = "portable"
print(ak.matmul(x, x)[0, 0].item(), cpu_isa.chosen())
"""
    said = python("-c", code, AMP_KERNELS_CPU_ISA="mmx").stdout
    assert "AMP_KERNELS_CPU_ISA is 'mmx'; this machine has: portable" in said
    assert said.endswith("\n2.0 portable\n")
