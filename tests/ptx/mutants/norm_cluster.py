"""Norms of rows that the blocks of a cluster share: stores to distributed shared memory, and the mbarriers that count them."""

from . import Mutant

KERNEL = r"norm_backward_ring_kernelINS_7RowTeamILi8ELi16ELi4E"
CASES = "shared rows"
CAPABILITY = 90

STORE = r"(st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v2\.f32) \[to\], \{(%f\d+), (%f\d+)\}, \[bar\];"
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;"

MUTANTS = [
    Mutant("the two sums exchanged", STORE, r"\1 [to], {\3, \2}, [bar];"),
    Mutant("sums 8 bytes further", STORE, r"\1 [to+8], {\2, \3}, [bar];"),
    Mutant("bytes that the other mbarrier counts", STORE, r"\1 [to], {\2, \3}, [bar+8];"),
    Mutant("one of two sums", STORE, r"st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], \2, [bar];"),
    Mutant("sums to the block's own place", r"mapa\.shared::cluster\.u32 to, (%r\d+), %r\d+;", r"mov.u32 to, \1;"),
    Mutant("sums that the own mbarrier counts", r"mapa\.shared::cluster\.u32 bar, (%r\d+), %r\d+;", r"mov.u32 bar, \1;"),
    Mutant("every sum to the first block", r"mapa\.shared::cluster\.u32 (to|bar), (%r\d+), %r\d+;", r"mapa.shared::cluster.u32 \1, \2, 0;"),
    Mutant("the rank in the cluster is another register", r"%cluster_ctarank", "%tid.y"),
    Mutant("half of the bytes announced", EXPECT, r"\1, 16;"),
    Mutant("one arrival more", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 2;"),
    Mutant("mbarriers that peers cannot see", r"fence\.mbarrier_init\.release\.cluster;", ""),
    Mutant("no barrier of the cluster before the first sums", r"barrier\.cluster\.(arrive\.release|wait\.acquire)\.aligned;", ""),
    Mutant("sums are not waited for", r"mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[%r\d+\], %r\d+;", "setp.eq.u32 P1, 0, 0;"),
    Mutant("always parity 0", r"(mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[%r\d+\]), %r\d+;", r"\1, 0;"),
]  # fmt: skip
