"""wgmma, TMA, mbarriers, clusters and what stands around them."""

from . import Mutant

KERNEL = "gemm_sm90_kernel"
CASES = "sm90"
CAPABILITY = 90

WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, )(%rd\d+), (%rd\d+), p, 1, 1, "
LOAD = r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S+ \[%r\d+\], \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}"
STORE = r"(cp\.async\.bulk\.tensor\.3d\.global\.shared::cta\.bulk_group \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}"
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\]), (%r\d+);"
WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[(%r\d+)\], (%r\d+);"
DESCRIPTOR = "4611686293305360384"  # 128-byte swizzle, 1024 bytes between groups of 8 rows

MUTANTS = [
    # ---- wgmma
    Mutant("B is taken as transposed", WGMMA + "([01]), 0;", r"\1\2, \3, p, 1, 1, \4, 1;"),
    Mutant("B is not taken as transposed", WGMMA + "([01]), 1;", r"\1\2, \3, p, 1, 1, \4, 0;"),
    Mutant("A is taken as transposed", WGMMA + "0, ([01]);", r"\1\2, \3, p, 1, 1, 1, \4;"),
    Mutant("A is not taken as transposed", WGMMA + "1, ([01]);", r"\1\2, \3, p, 1, 1, 0, \4;"),
    Mutant("descriptors of A and B exchanged", WGMMA, r"\1\3, \2, p, 1, 1, "),
    Mutant("descriptor of A twice", WGMMA, r"\1\2, \2, p, 1, 1, "),
    Mutant("A is negated", WGMMA, r"\1\2, \3, p, -1, 1, "),
    Mutant("the accumulator is kept where it is to be overwritten, and the other way round", r"setp\.ne\.b32 p,", "setp.eq.b32 p,"),
    Mutant("the accumulator is always kept", r"setp\.ne\.b32 p, %r\d+, 0", "setp.ne.b32 p, 1, 0"),
    Mutant("the accumulator is never kept", r"setp\.ne\.b32 p, %r\d+, 0", "setp.ne.b32 p, 0, 0"),
    Mutant("operands of the other 16-bit type", r"(wgmma\S+\.f32)\.f16\.f16 ", r"\1.bf16.bf16 "),
    Mutant("two accumulator registers exchanged", r"(wgmma\.mma_async\S+ \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("the first two quads of accumulators exchanged",
           r"(wgmma\.mma_async\S+ \{)((?:%f\d+, ?){4})((?:%f\d+, ?){4})", r"\1\3\2"),
    Mutant("a descriptor of 64-byte swizzle", DESCRIPTOR, "-9223371761976868864"),
    Mutant("a descriptor of 32-byte swizzle", DESCRIPTOR, "-4611685743549480960"),
    Mutant("a descriptor with the stride of 4 rows", DESCRIPTOR, "4611686155866406912"),
    Mutant("a wgmma.fence left out", r"wgmma\.fence\.sync\.aligned;", ""),
    Mutant("the first wgmma.fence left out", r"wgmma\.fence\.sync\.aligned;", "", 1),
    Mutant("products never committed", r"wgmma\.commit_group\.sync\.aligned;", ""),
    Mutant("a wait where products are to be committed", r"wgmma\.commit_group\.sync\.aligned;", "wgmma.wait_group.sync.aligned 0;"),
    Mutant("accumulators used with one product in flight", r"wgmma\.wait_group\.sync\.aligned 0", "wgmma.wait_group.sync.aligned 1"),
    Mutant("operands released with two products in flight", r"wgmma\.wait_group\.sync\.aligned 1", "wgmma.wait_group.sync.aligned 2"),
    # ---- TMA
    Mutant("load: coordinates exchanged", LOAD, r"\1\3, \2, \4}"),
    Mutant("load: always the first matrix of the batch", LOAD, r"\1\2, \3, 0}"),
    Mutant("load: batch and row exchanged", LOAD, r"\1\2, \4, \3}"),
    Mutant("load: k stands still", LOAD, r"\g<1>0, \3, \4}"),
    Mutant("store: coordinates exchanged", STORE, r"\1\3, \2, \4}"),
    Mutant("store: always the first matrix of the batch", STORE, r"\1\2, \3, 0}"),
    Mutant("a load signals the neighbouring mbarrier",
           r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\S+ [^;]*\], \[%r\d+)\]", r"\1+8]"),
    Mutant("a load lands 128 bytes further", r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S+ \[%r\d+)\]", r"\1+128]"),
    Mutant("multicast left out", r"\.multicast::cluster ([^;]*), %rs\d+;", r" \1;"),
    Mutant("multicast to the first block alone", r"(\.multicast::cluster [^;]*), %rs\d+;", r"\1, 1;"),
    Mutant("multicast to the second block alone", r"(\.multicast::cluster [^;]*), %rs\d+;", r"\1, 2;"),
    Mutant("added where it is to be stored", r"cp\.async(\.bulk\.tensor\.3d\.global\.shared::cta)", r"cp.reduce.async\1.add"),
    Mutant("stored where it is to be added", r"cp\.reduce\.async(\.bulk\.tensor\.3d\.global\.shared::cta)\.add", r"cp.async\1"),
    Mutant("addition: coordinates exchanged",
           r"(cp\.reduce\.async\.bulk\.tensor\.3d\.global\S+ \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}", r"\1\3, \2, \4}"),
    Mutant("stores never committed", r"cp\.async\.bulk\.commit_group;", ""),
    Mutant("stores committed as if they were cp.async", r"cp\.async\.bulk\.commit_group;", "cp.async.commit_group;"),
    Mutant("one store may still read what is overwritten", r"cp\.async\.bulk\.wait_group\.read 0", "cp.async.bulk.wait_group.read 1"),
    Mutant("no wait before shared memory is written again", r"cp\.async\.bulk\.wait_group\.read 0;", ""),
    Mutant("at the end only the reads of stores are waited for", r"cp\.async\.bulk\.wait_group 0;", "cp.async.bulk.wait_group.read 0;",
           missed="the next kernel sees what this one wrote, whether or not it waited"),
    Mutant("fence.proxy.async left out", r"fence\.proxy\.async\.shared::cta;", ""),
    Mutant("fence.proxy.async for the wrong memory", r"fence\.proxy\.async\.shared::cta;", "fence.proxy.async.global;"),
    # ---- mbarriers
    Mutant("no bytes announced", EXPECT, r"\1, 0;"),
    Mutant("a plain arrival where bytes are to be announced",
           r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[%r\d+\]), %r\d+;", r"mbarrier.arrive.shared::cta.b64 _, \1;"),
    Mutant("16 bytes announced", EXPECT, r"\1, 16;"),
    Mutant("parity and address exchanged", WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 P1, [\2], \1;"),
    Mutant("always parity 0", WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 P1, [\1], 0;"),
    Mutant("always parity 1", WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 P1, [\1], 1;"),
    Mutant("on before the phase is over", r"@P1 bra\.uni L2;", "@!P1 bra.uni L2;"),
    Mutant("what try_wait says is ignored", r"@P1 bra\.uni L2;", "bra.uni L2;"),
    Mutant("a wait that does not acquire", r"mbarrier\.try_wait\.parity\.shared", "mbarrier.try_wait.parity.relaxed.cluster.shared"),
    Mutant("an arrival that does not release", r"mbarrier\.arrive\.shared::cluster", "mbarrier.arrive.relaxed.cluster.shared::cluster"),
    Mutant("one arrival is enough for all mbarriers", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 1;"),
    Mutant("three arrivals for all mbarriers", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 3;"),
    Mutant("an mbarrier for nobody", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 0;", 1),
    Mutant("an mbarrier that is not initialised", r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], %r\d+;", "", 1),
    Mutant("fence.mbarrier_init left out", r"fence\.mbarrier_init\.release\.cluster;", ""),
    Mutant("another fence in place of fence.mbarrier_init", r"fence\.mbarrier_init\.release\.cluster;", "fence.acq_rel.cluster;"),
    Mutant("two arrivals for one", r"mbarrier\.arrive\.shared::cluster\.b64 _, \[r\];", "mbarrier.arrive.shared::cluster.b64 _, [r], 2;"),
    # ---- clusters
    Mutant("mapa: operands exchanged", r"(mapa\.shared::cluster\.u32 r, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    Mutant("mapa: always the first block", r"(mapa\.shared::cluster\.u32 r, %r\d+), %r\d+", r"\1, 0"),
    Mutant("an arrival at one's own mbarrier", r"mapa\.shared::cluster\.u32 r, (%r\d+), %r\d+", r"mov.u32 r, \1"),
    Mutant("the rank in the cluster is another register", r"%cluster_ctarank", "%tid.y"),
    Mutant("no wait of the cluster", r"barrier\.cluster\.wait\.acquire\.aligned;", ""),
    Mutant("no first wait of the cluster", r"barrier\.cluster\.wait\.acquire\.aligned;", "", 1),
    Mutant("the last meeting of the cluster left out",
           r"barrier\.cluster\.arrive\.release\.aligned;\s*barrier\.cluster\.wait\.acquire\.aligned;", "", -1),
    Mutant("the cluster never arrives", r"barrier\.cluster\.arrive\.release\.aligned;", ""),
    Mutant("the cluster's arrival orders nothing", r"barrier\.cluster\.arrive\.release\.aligned", "barrier.cluster.arrive.relaxed.aligned"),
    # ---- the block
    Mutant("bar.sync: number and count exchanged", r"bar\.sync (%r\d+), (%r\d+)", r"bar.sync \2, \1"),
    Mutant("barriers of warpgroups left out", r"bar\.sync %r\d+, %r\d+;", ""),
    Mutant("one number for all barriers of warpgroups", r"bar\.sync %r\d+,", "bar.sync 1,"),
    Mutant("bar.arrive for half of the threads", r"bar\.arrive (%r\d+), %r\d+;", r"bar.arrive \1, 128;"),
    Mutant("bar.arrive waits", r"bar\.arrive", "bar.sync",
           missed="the other warpgroup comes to the barrier too: it costs time only"),
    Mutant("the first barrier of the block left out", r"bar\.sync 0;", "", 1),
    Mutant("more registers than there are", r"setmaxnreg\.inc\.sync\.aligned\.u32 \d+", "setmaxnreg.inc.sync.aligned.u32 264"),
    Mutant("a larger number of registers that is no multiple of 8",
           r"setmaxnreg\.inc\.sync\.aligned\.u32 \d+", "setmaxnreg.inc.sync.aligned.u32 236"),
    Mutant("a number of registers that is no multiple of 8",
           r"setmaxnreg\.dec\.sync\.aligned\.u32 \d+", "setmaxnreg.dec.sync.aligned.u32 42"),
    Mutant("fewer registers than a thread may have", r"setmaxnreg\.dec\.sync\.aligned\.u32 \d+", "setmaxnreg.dec.sync.aligned.u32 16"),
    Mutant("no wait for the kernel in front", r"griddepcontrol\.wait;", ""),
    Mutant("the next kernel is let go in place of the wait", r"griddepcontrol\.wait;", "griddepcontrol.launch_dependents;"),
    Mutant("the last block is told by a relaxed atomic", r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc"),
    Mutant("the counter of blocks only grows", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
    # ---- prefetched lines
    Mutant("a line a mile ahead is asked for", r"prefetch\.global\.L2 \[(%rd\d+)\]", r"prefetch.global.L2 [\1+1048576]"),
    Mutant("a line in front is asked for", r"prefetch\.global\.L2 \[(%rd\d+)\]", r"prefetch.global.L2 [\1+-4096]"),
    # ---- the epilogue
    Mutant("stmatrix: two registers exchanged", r"(stmatrix\S+ \[%r\d+\], \{)(%r\d+), ?(%r\d+)", r"\1\3, \2"),
    Mutant("stmatrix: transposed", r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.shared", r"\1.trans.shared"),
    Mutant("the halves of a pair exchanged", r"(cvt\.rn\.b?f16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    Mutant("pairs of the other 16-bit type", r"cvt\.rn\.f16x2\.f32", "cvt.rn.bf16x2.f32"),
    Mutant("pairs of partial sums exchanged", r"(st\.shared\.v2\.f32 \[[^]]*\], \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("quads of partial sums exchanged", r"(ld\.global\.v4\.f32 \{)(%f\d+), (%f\d+)", r"\1\3, \2"),
]  # fmt: skip
