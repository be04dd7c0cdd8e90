"""Sectors, lines and bank conflicts that the interpreter counts, of small kernels whose traffic is known."""

import pytest

from tools.ptx.interpreter.tensor_map import TensorMap
from tools.ptx.interpreter.traffic import Traffic, counted

from .by_hand import Memory, Shape

AT = "shl.b32 %r5, %r1, {};\nadd.u32 %r5, %r3, %r5;\n"  # a thread's place in shared memory: its number times 2^{}
SWIZZLE = "and.b32 %r6, %r1, 7;\nshl.b32 %r6, %r6, 4;\nxor.b32 %r5, %r5, %r6;\n"
SAME = "mov.u32 %r5, %r3;\n"
ACCESSES = {
    2: ("st.shared.u16 [%r5], %rs1;", "ld.shared.u16 %rs2, [%r5];"),
    4: ("st.shared.u32 [%r5], %r1;", "ld.shared.u32 %r6, [%r5];"),
    8: ("st.shared.v2.u32 [%r5], {%r1, %r1};", "ld.shared.v2.u32 {%r6, %r7}, [%r5];"),
    16: ("st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};", "ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5];"),
    "x2": ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r5], {%r1, %r1};",
           "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r6, %r7}, [%r5];"),
    "x4": ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], {%r1, %r1, %r1, %r1};",
           "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r5];"),
    "copies": ("cp.async.ca.shared.global [%r5], [%rd4], 4;\ncp.async.commit_group;\ncp.async.wait_group 0;", "ld.shared.u32 %r6, [%r5];"),
}  # fmt: skip
# Where a warp's lanes access shared memory, and how; the wavefronts, and how many of them are conflicts.
SHARED = {
    "neighbours": (AT.format(2), 4, 1, 0),
    "stride of 32 words": (AT.format(7), 4, 32, 31),
    "stride of 33 words": ("mul.lo.u32 %r5, %r1, 132;\nadd.u32 %r5, %r3, %r5;\n", 4, 1, 0),
    "one word": (SAME, 4, 1, 0),
    "halves of a word": (AT.format(1), 2, 1, 0),
    "8 bytes each": (AT.format(3), 8, 2, 0),
    "8 bytes each, stride of 4 words": (AT.format(4), 8, 4, 2),
    "16 bytes each": (AT.format(4), 16, 4, 0),
    "16 bytes each, stride of 32 words": (AT.format(7), 16, 32, 28),
    "the same, swizzled": (AT.format(7) + SWIZZLE, 16, 4, 0),
    "matrices": (AT.format(7), "x4", 32, 28),
    "matrices, swizzled": (AT.format(7) + SWIZZLE, "x4", 4, 0),
    "two matrices": (AT.format(4), "x2", 2, 0),
    "copies of lanes": (AT.format(7), "copies", 32, 31),
}


@pytest.mark.parametrize("name", SHARED)
def test_wavefronts_of_a_warp(name):
    place, access, wavefronts, conflicts = SHARED[name]
    memory = Memory()
    with counted(memory.device) as traffic:
        memory.launch("cvt.u16.u32 %rs1, %r1;\n" + place + "\n".join(ACCESSES[access]))
    for op in ("ld", "cp.async" if access == "copies" else "st"):
        found = traffic.of("k", "shared", op)
        assert (found.accesses, found.wavefronts, found.conflicts) == (1, wavefronts, conflicts), op


# Addresses of 4-byte accesses of a warp by its lane, as shifts and an offset: accesses, bytes used, sectors, lines.
GLOBAL = {
    "neighbours": (2, 0, "u32", "%r5", (1, 128, 4, 1)),
    "neighbours across two lines": (2, 16, "u32", "%r5", (1, 128, 5, 2)),
    "a sector each": (4, 0, "u32", "%r5", (1, 128, 16, 4)),
    "half a sector each": (4, 0, "v2.u32", "{%r5, %r6}", (1, 256, 16, 4)),
    "one for all": (31, 0, "u32", "%r5", (1, 4, 1, 1)),
}


@pytest.mark.parametrize("name", GLOBAL)
@pytest.mark.parametrize(("op", "kind"), [("ld", "loads"), ("st", "stores")])
def test_sectors_and_lines_of_a_warp(name, op, kind):
    shift, offset, width, registers, expected = GLOBAL[name]
    lane = "mov.u32 %r7, 0;" if shift == 31 else f"shl.b32 %r7, %r1, {shift};"
    body = f"{lane}\ncvt.u64.u32 %rd5, %r7;\nadd.u64 %rd5, %rd1, %rd5;\nmov.u32 %r5, 1;\nmov.u32 %r6, 2;\n"
    body += (
        f"ld.global.{width} {registers}, [%rd5+{offset}];"
        if op == "ld"
        else f"st.global.{width} [%rd5+{offset}], {registers};"
    )
    memory = Memory()
    with counted(memory.device) as traffic:
        memory.launch(body)
    found = traffic.of("k", kind)
    assert (found.accesses, found.used, found.sectors, found.lines) == expected
    assert not traffic.of("k", "shared").accesses


# Rows of a box and their bytes, the pitch of rows, the first column in elements of 2 bytes; sectors and lines of all rows.
BOXES = {
    "whole lines": (8, 128, 1024, 0, 32, 8),
    "16 bytes further each row": (8, 128, 1040, 0, 4 * 4 + 4 * 5, 1 + 7 * 2),
    "32 bytes further each row": (8, 128, 1056, 0, 32, 2 + 6 * 2),
    "half a line, unaligned pitch": (4, 64, 80, 0, 2 + 3 + 2 + 3, 1 + 2 + 1 + 2),
    "from the middle of a line on": (8, 128, 1024, 32, 32, 16),
    "beyond the last column": (8, 128, 1024, 480, 16, 8),
}


@pytest.mark.parametrize("name", BOXES)
def test_sectors_and_lines_of_a_box(name):
    rows, row_bytes, pitch, first, sectors, lines = BOXES[name]
    map_ = TensorMap("f16", 2, 1 << 20, (512, 64), (2, pitch), (row_bytes // 2, rows), 0)
    traffic, block = Traffic(), type("Block", (), {"kernel": type("Kernel", (), {"name": "k"})})
    traffic.box(block, "boxes in", map_, (first, 0), "a load")
    found = traffic.of("k", "boxes in")
    columns = min(row_bytes // 2, 512 - first)
    assert (found.accesses, found.used, found.sectors, found.lines) == (rows, rows * columns * 2, sectors, lines)


def test_a_box_that_tma_loads_is_counted_and_nothing_without_being_asked():
    body = """
@%p1 mbarrier.init.shared::cta.b64 [full], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 128;
@%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {0}], [full];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;
@!%p3 bra WAIT;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd3, {0}], [%r3];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
"""
    memory = Memory()
    with counted(memory.device) as traffic:
        memory.launch(body, Shape())
    for kind in ("boxes in", "boxes out"):
        found = traffic.of("k", kind)
        assert (found.accesses, found.used, found.sectors, found.lines) == (1, 128, 4, 1)
    memory.launch(body)
    assert traffic.of("k", "boxes in").accesses == 1
    assert traffic.of("k", "boxes in").waste == 1
