"""Each rule of threads that meet (barriers, mbarriers, clusters, warps, warpgroups) and of launches that the interpreter checks
(docs/ptx.md), broken once, as in test_rules_of_memory.py."""

import pytest

from tools.ptx.interpreter import launch
from tools.ptx.interpreter.instructions import find
from tools.ptx.interpreter.tensor_map import LAYOUT, MAGIC
from tools.ptx.interpreter.types import PtxError

from .by_hand import Case, Memory, Shape

TWO_WARPS, THREE_WARPS, WARPGROUP = Shape(threads=64), Shape(threads=96), Shape(threads=128)
PAIR = Shape(threads=1, blocks=2, cluster=2)

MBARRIER = """
@%p1 mbarrier.init.shared::cta.b64 [full], 2;
bar.sync 0;
setp.gt.u32 %p3, %r1, 1;
@%p3 bra WAIT;
mbarrier.arrive.shared::cta.b64 _, [full];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;
@!%p3 bra WAIT;
"""

MEET = """
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""
# The second block of a cluster arrives at the first one's mbarrier.
CLUSTER = f"""
mov.u32 %r5, %cluster_ctarank;
mbarrier.init.shared::cta.b64 [full], 1;
fence.mbarrier_init.release.cluster;
{MEET}
setp.eq.u32 %p3, %r5, 0;
@%p3 bra WAIT;
mov.u32 %r6, full;
mapa.shared::cluster.u32 %r7, %r6, 0;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
bra END;
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [full], 0;
@!%p3 bra WAIT;
END:
{MEET}
"""
# Each block of a cluster stores two words in its peer.
SENT = f"""
mov.u32 %r5, %cluster_ctarank;
xor.b32 %r5, %r5, 1;
mbarrier.init.shared::cta.b64 [full], 1;
fence.mbarrier_init.release.cluster;
{MEET}
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 8;
@%p1 mapa.shared::cluster.u32 %r7, %r3, %r5;
mov.u32 %r6, full;
mapa.shared::cluster.u32 %r8, %r6, %r5;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r7], {{%r5, %r5}}, [%r8];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;
@!%p3 bra WAIT;
ld.shared.v2.u32 {{%r9, %r10}}, [%r3];
{MEET}
"""
FIRST = CLUSTER.partition("setp")[0]
WAITING = CLUSTER.partition("WAIT:\n")[2].partition("END:")[0]

# A descriptor of 128-byte swizzle, with 1,024 bytes between groups of 8 rows; B is stored after the 64 rows of A.
A = 1 << 62 | 64 << 32 | 1 << 16
B = A + (64 * 128 >> 4)
PRODUCT = f"""
{"".join(f"st.shared.u32 [%r4+{512 * i}], 0;" for i in range(18))}
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b64 %rd5, {A};
mov.b64 %rd6, {B};
mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f00000000;
wgmma.fence.sync.aligned;
setp.ne.u32 %p3, %r2, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %rd5, %rd6, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.f32 %f4, %f0, %f1;
bar.sync 1;
st.shared.u32 [%r4], 1;
"""
FENCE = "wgmma.fence.sync.aligned;"


def product(old: str, new: str, error: str) -> Case:
    return Case(PRODUCT, old, new, error, WARPGROUP)


CASES = {
    # ---- barriers of a block
    "bar: a number": Case("bar.sync 1, 64;", " 1,", " 16,", "barrier 16 for 64 threads", TWO_WARPS),
    "bar: whole warps": Case("bar.sync 1, 64;", "64", "33", "barrier 1 for 33 threads", TWO_WARPS),
    "bar: one count": Case("selp.b32 %r5, 64, 64, %p2; bar.sync 1, %r5;", "64, 64", "64, 96",
        "barrier 1 (is )?for (64|96) threads", TWO_WARPS),
    "bar: too many": Case("bar.arrive 1, 96;", "96", "64", "96 threads at barrier 1 for 64", THREE_WARPS),
    "bar: too few": Case("bar.sync 0, 64;", "bar", "@%p2 bar", r"deadlock: block 0: 32 threads \(0 to 31\) at: @%p2 bar.sync 0, 64: "
                         "barrier 0 has 32 of 64 threads", TWO_WARPS),
    # ---- mbarriers
    "mbarrier: none there": Case(MBARRIER, "@%p1 mbarrier.init.shared::cta.b64 [full], 2;", "", "there is no mbarrier at 0x2800"),
    "mbarrier: alignment": Case("@%p1 mbarrier.init.shared::cta.b64 [full], 1;", "full", "full+4", "misaligned for 8 bytes"),
    "mbarrier: for somebody": Case(MBARRIER, "[full], 2", "[full], 0", "an mbarrier for 0 arrivals"),
    "mbarrier: known to those who use it": Case(MBARRIER, "bar.sync 0;", "",
        "orders the initialisation of the mbarrier|there is no mbarrier", TWO_WARPS),
    "mbarrier: one arrival more": Case(
        "@%p1 mbarrier.init.shared::cta.b64 [full], 2; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 64;"
        "@%p1 mbarrier.arrive.shared::cta.b64 _, [full], 1;",
        "[full], 1", "[full], 2", "one arrival more than the 2",
    ),
    "mbarrier: one arrival too few": Case(MBARRIER, "%r1, 1;", "%r1, 0;", r"deadlock.*phase 0, 1 of 2 arrivals and 0 bytes pending"),
    "mbarrier: a parity": Case(MBARRIER, "[full], 0;", "[full], 2;", "a phase parity of 2"),
    "mbarrier: bytes that it can count": Case(
        "@%p1 mbarrier.init.shared::cta.b64 [full], 2; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 1048575;",
        "1048575", "1048576", "tx-count above",
    ),
    "mbarrier: no longer there": Case(
        "@%p1 mbarrier.init.shared::cta.b64 [full], 1; @%p1 mbarrier.init.shared::cta.b64 [full+8], 1;"
        "@%p1 mbarrier.inval.shared::cta.b64 [full]; @%p1 mbarrier.arrive.shared::cta.b64 _, [full+8];",
        "_, [full+8]", "_, [full]", "there is no mbarrier",
    ),
    # ---- clusters
    "cluster: an mbarrier that a peer cannot see": Case(CLUSTER, "fence.mbarrier_init.release.cluster;", "",
        "no fence and barrier orders the initialisation", PAIR),
    "cluster: an arrival that orders nothing": Case(CLUSTER, MEET + "\nsetp",
        MEET.replace("release", "relaxed") + "\nsetp", "no fence and barrier orders the initialisation", PAIR),
    "cluster: the peer has ended": Case(CLUSTER, WAITING + "END:\n" + MEET, "END:\n",
        "block 0 has ended, and block 1 works in its shared memory|nothing orders an access of block 1", PAIR),
    "cluster: the peer has ended long ago": Case(CLUSTER.replace("%p3, %r5, 0", "%p3, %r5, 1").replace("%r6, 0", "%r6, 1"),
        WAITING + "END:\n" + MEET, "END:\n", "block 1 has ended, and block 0 works in its shared memory", PAIR),
    "cluster: a store that an mbarrier counts": Case(SENT, "8;\n@%p1 mapa", "16;\n@%p1 mapa",
        r"deadlock.*8 bytes pending", PAIR),
    "cluster: a store to a peer that cannot be waited for": Case(SENT, "fence.mbarrier_init.release.cluster;", "",
        "no fence and barrier orders the initialisation", PAIR),
    "cluster: a store that is not waited for": Case(SENT,
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p3, [full], 0;\n@!%p3 bra WAIT;\n", "",
        "bytes are read that nobody wrote|an asynchronous copy in flight|orders the write", PAIR),
    "cluster: an mbarrier of another block": Case(SENT, "[%r8];\nWAIT", "[full];\nWAIT",
        "the mbarrier is of another block", PAIR),
    "cluster: a store to no multiple of its size": Case(SENT, "[%r7], {", "[%r7+4], {", "misaligned for 8 bytes", PAIR),
    "cluster: a second arrival": Case(FIRST, "barrier.cluster.wait.acquire.aligned;",
        "barrier.cluster.arrive.release.aligned;", "a second arrival without a wait", PAIR),
    "cluster: a wait for nothing": Case(FIRST, "barrier.cluster.arrive.release.aligned;", "",
        "a wait without an arrival", PAIR),
    "cluster: one of two": Case(FIRST + "OUT:", "fence.mbarrier_init.release.cluster;",
        "setp.eq.u32 %p3, %r5, 1;\n@%p3 bra OUT;",
        "deadlock: block 0: 1 threads .* 1 of 2 threads of the cluster have come", PAIR),
    # ---- warps
    "warp: all members": Case("shfl.sync.bfly.b32 %r5|%p3, %r1, 1, 31, -1;", "-1", "65535", "a member mask of 0xffff"),
    "setmaxnreg: a multiple of 8": Case("setmaxnreg.dec.sync.aligned.u32 40;", "40", "42", "42 registers", WARPGROUP),
    "setmaxnreg: at least 24": Case("setmaxnreg.dec.sync.aligned.u32 40;", "40", "16", "16 registers", WARPGROUP),
    "setmaxnreg: at most 256": Case("setmaxnreg.inc.sync.aligned.u32 240;", "240", "264", "264 registers", WARPGROUP),
    # ---- wgmma
    "wgmma: what threads wrote, without a proxy fence": product("fence.proxy.async.shared::cta;", "",
        "with a proxy fence orders the write"),
    "wgmma: no fence": product(FENCE, "", "no wgmma.fence since"),
    "wgmma: an accumulator written after the fence": product(FENCE, FENCE + "mov.f32 %f2, 0f00000000;",
        r"no wgmma.fence since \['%f2'\] was used"),
    "wgmma: an accumulator read too early": product("wait_group.sync.aligned 0", "wait_group.sync.aligned 1",
        "%f0 is used while a wgmma may still write it"),
    "wgmma: never committed": product("wgmma.commit_group.sync.aligned;", "", "%f0 is used while a wgmma may still write it"),
    "wgmma: an operand overwritten too early": product("wgmma.wait_group.sync.aligned 0;\nadd.f32 %f4, %f0, %f1;", "",
        "overwritten while an asynchronous operation may still read it"),
    "wgmma: the block ends too early": product(
        "wgmma.wait_group.sync.aligned 0;\nadd.f32 %f4, %f0, %f1;\nbar.sync 1;\nst.shared.u32 [%r4], 1;", "", "block 0 has ended before"
    ),
    "wgmma: descriptors agree": product("%rd5, %rd6, %p3", "%rd4, %rd6, %p3", "threads disagree: wgmma"),
    "wgmma: what to do with the accumulator agrees": product("%rd5, %rd6, %p3", "%rd5, %rd6, %p1", "threads disagree: wgmma"),
    "wgmma: operands in shared memory": product(f"%rd5, {A}", f"%rd5, {A + 0x3000}", "shared memory: 2 bytes at offset"),
    "wgmma: a swizzle": product(f"%rd5, {A}", f"%rd5, {A - (1 << 62)}", "no swizzle in descriptor"),
    "wgmma: a base offset": product(f"%rd5, {A}", f"%rd5, {A + (1 << 49)}", "a base offset in descriptor"),
    "wgmma: signs": product("%p3, 1, 1", "%p3, -1, 1", "scales other than 1"),
    "wgmma: one type": product("f32.f16.f16", "f32.f16.bf16", "an accumulator that does not fit"),
    "wgmma: registers": product("m64n8k16", "m64n16k16", "an accumulator that does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kept_and_broken(case):
    case.check()


ALIGNED = {
    "bar.sync 0": TWO_WARPS,
    "bar.warp.sync -1": Shape(),
    "shfl.sync.idx.b32 %r5|%p3, %r1, 0, 31, -1": Shape(),
    "vote.sync.ballot.b32 %r5, %p2, -1": Shape(),
    "redux.sync.add.u32 %r5, %r1, -1": Shape(),
    "elect.sync %r5|%p3, -1": Shape(),
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r1}, {%r1}, {%f0, %f1, %f2, %f3}": Shape(),
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r3]": Shape(),
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r5}": Shape(),
    "barrier.cluster.arrive.release.aligned": Shape(),
    "setmaxnreg.dec.sync.aligned.u32 40": WARPGROUP,
    "wgmma.fence.sync.aligned": WARPGROUP,
    "wgmma.commit_group.sync.aligned": WARPGROUP,
    "wgmma.wait_group.sync.aligned 0": WARPGROUP,
}


@pytest.mark.parametrize("instruction", ALIGNED, ids=lambda text: text.partition(" ")[0])
def test_lanes_that_stay_away_are_missed(instruction):
    assert find(instruction.partition(" ")[0])
    with pytest.raises(
        PtxError, match=r"deadlock: block 0: 1 threads \(0 to 0\) at: .*lanes of their warps are missing"
    ):
        Memory().launch(f"@%p1 {instruction};", ALIGNED[instruction])


LAUNCHES = {
    "threads of the kernel": ({"block": (257, 1, 1)}, "257 threads; at most 256"),
    "no threads": ({"block": (0, 1, 1)}, "0 threads"),
    "no blocks": ({"grid": (0, 1, 1)}, "a grid of"),
    "blocks in y": ({"grid": (1, 65536, 1)}, "a grid of"),
    "bytes of arguments": ({"arguments": bytes(132)}, "132 bytes of arguments for 136"),
    "a cluster too large": ({"cluster": (16, 1, 1), "grid": (16, 1, 1)}, "a cluster of 16 blocks"),
    "half a cluster": ({"cluster": (2, 1, 1), "grid": (3, 1, 1)}, "a grid of whole clusters"),
    "another kind of cluster": ({"cluster": (1, 2, 1), "grid": (1, 2, 1)}, "only x is modelled"),
    "shared memory that was not asked for": ({"shared_bytes": 65536, "shared_limit": 49152}, "the kernel may have 49152"),
    "shared memory that there is": ({"shared_bytes": 230000, "shared_limit": 232448}, "more shared memory than a block may have"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error"), LAUNCHES.values(), ids=LAUNCHES)
def test_launches(changed, error):
    memory = Memory()
    memory.launch("", Shape())
    with pytest.raises(PtxError, match=f"launch of k: .*{error}"):
        memory.launch("", Shape(), **changed)


def test_clusters_are_of_hopper():
    with pytest.raises(PtxError, match="clusters exist from sm_90 on"):
        Memory(80).launch("", PAIR)


def test_a_loop_without_end_ends(monkeypatch):
    monkeypatch.setattr(launch, "LONGEST", 100_000)
    with pytest.raises(PtxError, match="no end in sight"):
        Memory().launch("AGAIN: bra AGAIN;")


TO_SHARED = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
TEXTS = {
    "add.sat.s32 %r5, %r1, %r1;": "no meaning for add.sat.s32",
    "mov.u32 %r5, %clock;": "no meaning for the special register %clock",
    "mov.u32 %r5, NOWHERE;": "an operand that is no value",
    "add.u32 %r5, %r1;": "operands that do not fit: add.u32 %r5, %r1",
    "add.u64 %rd5, %r1, %rd1;": "register %r1 is narrower than .u64",
    "mov.u64 %r5, %rd1;": "register %r5 is narrower than .u64",
    "bra NOWHERE;": "no label NOWHERE",
    "{": "a body that does not end",
    "ld.global.v2.u32 {%r5, %r6, %r7}, [%rd1];": "3 registers",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5}, [%r3];": "1 registers",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1, %r1};": "2 registers",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r1}, {%r1}, {%f0, %f1, %f2, %f3};": "fragments",
    "bfe.u32 %r5, %r1, 30, 4;": "a field outside of the register",
    "bfi.b32 %r5, %r1, %r1, %r1, 4;": "a field that differs between threads",
    "cp.reduce.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd3, {0}], [s];": "a reduction has an operation",
    f"{TO_SHARED.replace('1d', '2d')} [%r3], [%rd3, {{0}}], [full];": "2 coordinates",
    "mov.u32 %r5, 83886080; mbarrier.arrive.shared::cluster.b64 _, [%r5];": "the cluster has no block 4",
    "mapa.shared::cluster.u32 %r5, %r3, 0; ld.shared.u32 %r6, [%r5];": "plain access to another block's shared memory",
    "mov.b64 %rd5, 144115188075855872; selp.b64 %rd6, %rd1, %rd5, %p1; ld.u32 %r5, [%rd6];": "several state spaces",
    "".join(f"mbarrier.init.shared::cta.b64 [s+{8 * i}], 1;" for i in range(65)): "more than 64 mbarriers",
}


@pytest.mark.parametrize(("text", "error"), TEXTS.items(), ids=TEXTS.values())
def test_texts(text, error):
    with pytest.raises(PtxError, match=error):
        Memory().launch(text, Shape(threads=1) if "mbarriers" in error else None)


def test_a_box_for_another_block():
    body = f"mapa.shared::cluster.u32 %r5, %r3, 1; {TO_SHARED} [%r5], [%rd3, {{0}}], [full];"
    with pytest.raises(PtxError, match="a destination or mbarrier of another block"):
        Memory().launch(body, PAIR)


def test_maps():
    """Nothing where a map is to be; a box of half of its swizzle's width."""
    memory, body = Memory(), f"{TO_SHARED} [%r3], [%rd3, {{0}}], [full];"
    narrow = LAYOUT.pack(MAGIC, 6, 1, memory.address, 64, *[0] * 8, 32, *[0] * 4, 3)
    for arguments, error in ((bytes(136), "there is no tensor map at byte 0"), (narrow, "narrower than its swizzle")):
        with pytest.raises(PtxError, match=error):
            memory.launch(body, Shape(threads=1), arguments=arguments.ljust(136, b"\0"))
