"""Each rule of memory that the interpreter checks (docs/ptx.md), broken once: a small kernel that keeps it runs under every kind of
schedule, and the same one with a single text changed is an error that says what is wrong."""

import pytest

from .by_hand import Case, Memory, Shape

MEETING = "bar.sync 0;"
TWO_WARPS, TWO_BLOCKS = Shape(threads=64), Shape(threads=1, blocks=2)

# The word that a neighbour in the other warp has written.
EXCHANGE = """
st.shared.u32 [%r4], %r1;
bar.sync 0;
xor.b32 %r5, %r4, 128;
ld.shared.u32 %r6, [%r5];
st.global.u32 [%rd4], %r6;
"""

# The block that comes second reads what both have written.
LAST_BLOCK = """
cvt.u64.u32 %rd5, %r2;
shl.b64 %rd5, %rd5, 2;
add.u64 %rd5, %rd1, %rd5;
st.global.u32 [%rd5+16], %r2;
fence.acq_rel.gpu;
atom.relaxed.gpu.global.add.u32 %r5, [%rd1], 1;
setp.ne.u32 %p3, %r5, 1;
@%p3 bra END;
fence.sc.gpu;
ld.global.v2.u32 {%r6, %r7}, [%rd1+16];
END:
"""
ORDERED_BY_THE_ATOMIC = LAST_BLOCK.replace("fence.acq_rel.gpu;\n", "").replace("fence.sc.gpu;\n", "")
ORDERED_BY_THE_ATOMIC = ORDERED_BY_THE_ATOMIC.replace("relaxed", "acq_rel")

COPIED = """
cp.async.ca.shared.global [%r4], [%rd4], 4;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
xor.b32 %r5, %r4, 128;
ld.shared.u32 %r6, [%r5];
"""

LOADED = """
@%p1 mbarrier.init.shared::cta.b64 [full], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 128;
@%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {0}], [full];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;
@!%p3 bra WAIT;
ld.shared.u32 %r6, [%r4];
"""

STORED = """
st.shared.u32 [%r4], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd3, {0}], [%r3];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
bar.sync 1;
st.shared.u32 [%r4], 0;
"""

AFTER_A_KERNEL = """
griddepcontrol.wait;
ld.global.u32 %r5, [%rd4];
"""

CASES = {
    # ---- where an access goes
    "global: alignment": Case("st.global.u32 [%rd1], %r1;", "%rd1]", "%rd1+2]", "misaligned for 4 bytes"),
    "global: past the buffer": Case("ld.global.u32 %r5, [%rd1+1016];", "1016", "1020", "is in no buffer; 1020 bytes from"),
    "global: in front of it": Case("ld.global.u32 %r5, [%rd1];", "%rd1]", "%rd1+-4]", "is in no buffer"),
    "global: a vector's end": Case("ld.global.v2.u32 {%r5, %r6}, [%rd1+1008];", "1008", "1016",
        "8 bytes at offset 1016 of 1020"),
    "global: an atomic": Case("red.global.add.u32 [%rd1+1016], 1;", "1016", "1020", "is in no buffer"),
    "shared: alignment": Case("st.shared.v2.u32 [s+8], {%r1, %r1};", "s+8", "s+4", "misaligned for 8 bytes"),
    "shared: its end": Case("st.shared.u32 [dynamic+-4], %r1;", "+-4", "",
        "shared memory: 4 bytes at offset 11264 of 11264"),
    "shared: asked for at the launch": Case("st.shared.u32 [dynamic+60], %r1;", "+60", "+64",
        "shared memory: 4 bytes at offset", Shape(dynamic=64)),
    "shared: of a block that exists": Case("mapa.shared::cluster.u32 %r5, %r3, 0;", "%r3, 0", "%r3, 1",
        "the cluster has 1 blocks"),
    "parameters: their end": Case("ld.param.u32 %r5, [buffer+4];", "+4", "+8", "kernel parameters: 4 bytes at offset 136 of 136"),
    "parameters: only read": Case("ld.param.u32 %r5, [buffer];", "ld.param.u32 %r5, [buffer]", "st.param.u32 [buffer], %r1",
                                  "read-only"),
    "generic: a state space": Case("mov.b64 %rd5, %rd1; ld.u32 %r5, [%rd5];", "mov.b64 %rd5, %rd1",
        "mov.b64 %rd5, 576460752303423488", "is in no state space"),
    # ---- what nobody wrote
    "shared: read before it is written": Case("st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4];",
        "st.shared.u32 [%r4], %r1;", "", "bytes are read that nobody wrote"),
    "shared: half of a vector written": Case("st.shared.v2.u32 [s], {%r1, %r1}; ld.shared.v2.u32 {%r5, %r6}, [s];",
        "st.shared.v2.u32 [s], {%r1, %r1}", "st.shared.u32 [s], %r1", "bytes are read that nobody wrote",
        Shape(threads=1)),
    # ---- order of threads
    "a read after a write": Case(EXCHANGE, MEETING, "", "no barrier, fence or atomic orders the write", TWO_WARPS),
    "a write after a read": Case(EXCHANGE + "bar.sync 1; st.shared.u32 [%r4], 2;", "bar.sync 1;", "",
        "no barrier, fence or atomic orders the read", TWO_WARPS),
    "a write after a write": Case(EXCHANGE.replace("ld.shared.u32 %r6, [%r5]", "st.shared.u32 [%r5], 1"), MEETING, "",
        "no barrier, fence or atomic orders the write", TWO_WARPS),
    "lanes that meet are not warps that meet": Case(EXCHANGE, MEETING, "bar.warp.sync -1;",
        "no barrier, fence or atomic orders the write", TWO_WARPS),
    "blocks: no fence in front of a relaxed atomic": Case(LAST_BLOCK, "fence.acq_rel.gpu;", "",
        "no barrier, fence or atomic orders the write of block", TWO_BLOCKS),
    "blocks: no fence after it": Case(LAST_BLOCK, "fence.sc.gpu;", "",
        "no barrier, fence or atomic orders the write of block", TWO_BLOCKS),
    **{
        f"blocks: {order} alone": Case(
            ORDERED_BY_THE_ATOMIC, "acq_rel", order, "no barrier, fence or atomic orders the write of block", TWO_BLOCKS
        )
        for order in ("relaxed", "acquire", "release")
    },
    "blocks: a plain flag": Case(ORDERED_BY_THE_ATOMIC, "atom.acq_rel.gpu.global.add.u32 %r5, [%rd1], 1;",
        "ld.global.u32 %r5, [%rd1]; add.u32 %r6, %r5, 1; st.global.u32 [%rd1], %r6;",
        "no barrier, fence or atomic orders the write of block", TWO_BLOCKS),
    # ---- cp.async
    "cp.async: alignment": Case(COPIED, "[%rd4], 4", "[%rd4], 8", "misaligned for 8 bytes", TWO_WARPS),
    "cp.async: a size that there is": Case(COPIED, ".ca", ".cg", "4 bytes: cp.async.cg", TWO_WARPS),
    "cp.async: more of the source than is copied": Case(COPIED, "[%rd4], 4", "[%rd4], 4, 8", "a source of 8 bytes for 4", TWO_WARPS),
    "cp.async: the buffer's end": Case("cp.async.cg.shared.global [s], [%rd1+1008], 16, 12;", ", 12", ", 16",
        "16 bytes beyond its end", Shape(threads=1)),
    "cp.async: never committed": Case(COPIED, "cp.async.commit_group;", "", "an asynchronous copy in flight", TWO_WARPS),
    "cp.async: one group too few": Case(COPIED, "group 0", "group 1", "an asynchronous copy in flight", TWO_WARPS),
    "cp.async: a wait is for one's own copies": Case(COPIED, MEETING, "",
        "no barrier, fence or atomic orders the write of block", TWO_WARPS),
    # ---- TMA, to shared memory
    "TMA: read before its bytes have come": Case(
        LOADED, "mbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;\n@!%p3 bra WAIT;", "", "an asynchronous copy in flight"
    ),
    "TMA: a wait that does not acquire": Case(LOADED, "parity.shared", "parity.relaxed.cta.shared",
        "orders the write of block 0, mbarrier 0"),
    "TMA: the phase before": Case(LOADED, "[full], 0;", "[full], 1;", "an asynchronous copy in flight"),
    "TMA: fewer bytes announced": Case(LOADED, "[full], 128", "[full], 64", "deadlock.*-64 bytes pending"),
    "TMA: more bytes announced": Case(LOADED, "[full], 128", "[full], 256", "deadlock.*128 bytes pending"),
    "TMA: no bytes announced": Case(LOADED, "arrive.expect_tx.shared::cta.b64 _, [full], 128",
        "arrive.shared::cta.b64 _, [full]", "an asynchronous copy in flight"),
    "TMA: an mbarrier that it cannot see": Case(LOADED, "@%p1 fence.mbarrier_init.release.cluster;", "", "fence.mbarrier_init"),
    "TMA: an alignment of the box": Case(LOADED, "[%r3], [%rd3", "[s+64], [%rd3", "no multiple of 128"),
    "TMA: a map": Case(LOADED, "[%rd3, {0}]", "[%rd1, {0}]", "a tensor map outside of the kernel's parameters"),
    "TMA: a map's begin": Case("add.u64 %rd5, %rd3, 0;" + LOADED.replace("[%rd3,", "[%rd5,"), "%rd3, 0;", "%rd3, 8;",
                               "a tensor map at byte 8 of 136"),
    "TMA: the map's dimensions": Case(LOADED, "1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {0}]",
                                      "2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd3, {0, 0}]",
                                      "a map of 1 dimensions"),
    "TMA: blocks that there are": Case(
        LOADED.replace("bytes [%r3]", "bytes.multicast::cluster [%r3]").replace("[full];\nWAIT", "[full], 1;\nWAIT"),
        "[full], 1;\nWAIT", "[full], 3;\nWAIT", "multicast mask 0x3 in a cluster of 1",
    ),
    "TMA: the block ends too early": Case(LOADED,
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;\n@!%p3 bra WAIT;\nld.shared.u32 %r6, [%r4];",
        "", "block 0 has ended before the copy"),
    # ---- TMA, out of shared memory
    "TMA: what threads wrote, without a proxy fence": Case(STORED, "fence.proxy.async.shared::cta;", "",
        "no barrier, fence or atomic with a proxy fence orders the write"),
    "TMA: a proxy fence for the other memory": Case(STORED, "proxy.async.shared::cta", "proxy.async.global",
        "with a proxy fence orders the write"),
    "TMA: overwritten while it is read": Case(STORED, "@%p1 cp.async.bulk.wait_group.read 0;", "",
        "overwritten while an asynchronous operation may still read it"),
    "TMA: one group too few": Case(STORED, "read 0", "read 1", "overwritten while an asynchronous operation may still read it"),
    "TMA: never committed": Case(STORED.partition("bar.sync 1;")[0],
        "@%p1 cp.async.bulk.commit_group;\n@%p1 cp.async.bulk.wait_group.read 0;\n", "",
        "never committed|has ended before the copy"),
    # ---- the kernel in front
    "programmatic launch: no wait": Case(AFTER_A_KERNEL, "griddepcontrol.wait;", "",
        "a kernel in front of this one, which may still run", Shape(overlapping=True)),
    "programmatic launch: a wait that lets others go": Case(AFTER_A_KERNEL, "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;", "a kernel in front of this one", Shape(overlapping=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kept_and_broken(case):
    case.check()


def test_results_of_the_small_kernels():
    """They do what they seem to do: otherwise a rule that they keep would say nothing."""
    assert Memory().launch(EXCHANGE, TWO_WARPS)[:64].tolist() == [i ^ 32 for i in range(64)]
    words = Memory().launch(STORED.replace("st.shared.u32 [%r4], %r1", "st.shared.u32 [%r4], 7"))
    assert words[:33].tolist() == [7] * 32 + [0]
    for body in (LAST_BLOCK, ORDERED_BY_THE_ATOMIC):
        words = Memory().launch(
            body.replace("END:", "add.u32 %r8, %r6, %r7; st.global.u32 [%rd1+32], %r8;\nEND:"), TWO_BLOCKS
        )
        assert (words[0], words[4], words[5], words[8]) == (2, 0, 1, 1)
    memory = Memory()
    memory.bytes.view("u4")[:64] = range(64)
    assert memory.launch(COPIED + "st.global.u32 [%rd4+256], %r6;", TWO_WARPS)[64:128].tolist() == [
        i ^ 32 for i in range(64)
    ]
    assert memory.launch(LOADED + "st.global.u32 [%rd4+256], %r6;")[64:96].tolist() == [*range(32)]
