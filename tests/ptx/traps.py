"""Wrong PTX that no operator makes, by family: coordinates, descriptors, fragments, counts and what stands in the wrong place."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Trap:
    why: str
    old: str  # a regular expression
    new: str
    nth: int | None = None  # which match is changed, from 1 on, or from the last, -1; None: all

    def plant(self, text: str) -> tuple[str, int]:
        """The text with the bug, and in how many places."""
        if self.nth is None:
            return re.subn(self.old, self.new, text)
        found = list(re.finditer(self.old, text))
        for match in found[self.nth - 1 :][:1] if self.nth > 0 else found[self.nth :][:1]:
            return text[: match.start()] + match.expand(self.new) + text[match.end() :], 1
        return text, 0


WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, )(%rd\d+), (%rd\d+), p, 1, 1, "
LOAD = r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\.global\S+ \[%r\d+\], \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}"
STORE = r"(cp\.async\.bulk\.tensor\.3d\.global\.shared::cta\.bulk_group \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}"
PREFETCH = r"(cp\.async\.bulk\.prefetch\.tensor\.3d\.L2\.global\.tile \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}"
RAGGED_LOAD = r"(cp\.async\.bulk\.tensor\.4d\.shared\S+ \[[^\]]+\], \[[^{]+\{)(%r\d+), (%r\d+), (%r\d+|\d+), (%r\d+)\}"
RAGGED_STORE = r"(cp\.async\.bulk\.tensor\.4d\.global\S+ \[[^{]+\{)(%r\d+), (%r\d+), (%r\d+|\d+), (%r\d+)\}"
WAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[(%r\d+)\], (%r\d+);"
MMA = r"(mma\.sync\S+ \{[^}]*\}, \{)(%r\d+), ?(%r\d+), ?(%r\d+), ?(%r\d+)(\}, \{)(%r\d+), ?(%r\d+)\}"
LDMATRIX = r"(ldmatrix\S+ \{)(%r\d+), ?(%r\d+), ?(%r\d+), ?(%r\d+)\}"
SEND = r"(st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v2\.f32) \[to\], \{(%f\d+), (%f\d+)\}, \[bar\];"
NEXT_PRODUCT = r"(add\.s64 %rd\d+, %rd\d+, (?:2|128);\s+add\.s64 %rd\d+, %rd\d+), "

TRAPS: dict[str, list[Trap]] = {
    "gemm_sm90": [
        Trap("B is taken as transposed", WGMMA + r"([01]), 0;", r"\1\2, \3, p, 1, 1, \4, 1;"),
        Trap("B is not taken as transposed", WGMMA + r"([01]), 1;", r"\1\2, \3, p, 1, 1, \4, 0;"),
        Trap("A is taken as transposed", WGMMA + r"0, ([01]);", r"\1\2, \3, p, 1, 1, 1, \4;"),
        Trap("A is not taken as transposed", WGMMA + r"1, ([01]);", r"\1\2, \3, p, 1, 1, 0, \4;"),
        Trap("descriptors of A and B exchanged", WGMMA, r"\1\3, \2, p, 1, 1, "),
        Trap("descriptor of A twice", WGMMA, r"\1\2, \2, p, 1, 1, "),
        Trap("the accumulator is kept where it is to be overwritten, and the other way round", r"setp\.ne\.b32 p,", "setp.eq.b32 p,"),
        Trap("the accumulator is always kept", r"setp\.ne\.b32 p, %r\d+, 0", "setp.ne.b32 p, 1, 0"),
        Trap("the accumulator is never kept", r"setp\.ne\.b32 p, %r\d+, 0", "setp.ne.b32 p, 0, 0"),
        Trap("the first two quads of accumulators exchanged", r"(wgmma\.mma_async\S+ \{)((?:%f\d+, ?){4})((?:%f\d+, ?){4})", r"\1\3\2"),
        Trap("a descriptor of 64-byte swizzle", "4611686293305360384", "-9223371761976868864"),
        Trap("a descriptor of 32-byte swizzle", "4611686293305360384", "-4611685743549480960"),
        Trap("a descriptor with the stride of 4 rows", "4611686293305360384", "4611686155866406912"),
        Trap("the first wgmma.fence left out", r"wgmma\.fence\.sync\.aligned;", "", 1),
        Trap("accumulators used with one product in flight", r"wgmma\.wait_group\.sync\.aligned 0", "wgmma.wait_group.sync.aligned 1"),
        Trap("operands released with two products in flight", r"wgmma\.wait_group\.sync\.aligned 1", "wgmma.wait_group.sync.aligned 2"),
        Trap("load: coordinates exchanged", LOAD, r"\1\3, \2, \4}"),
        Trap("load: always the first matrix of the batch", LOAD, r"\1\2, \3, 0}"),
        Trap("load: batch and row exchanged", LOAD, r"\1\2, \4, \3}"),
        Trap("load: k stands still", LOAD, r"\g<1>0, \3, \4}"),
        Trap("store: coordinates exchanged", STORE, r"\1\3, \2, \4}"),
        Trap("store: always the first matrix of the batch", STORE, r"\1\2, \3, 0}"),
        Trap("a load signals the neighbouring mbarrier", r"(cp\.async\.bulk\.tensor\.3d\.shared::cluster\S+ [^;]*\], \[%r\d+)\]", r"\1+8]"),
        Trap("multicast left out", r"\.multicast::cluster ([^;]*), %rs\d+;", r" \1;"),
        Trap("multicast to the first block alone", r"(\.multicast::cluster [^;]*), %rs\d+;", r"\1, 1;"),
        Trap("multicast to the second block alone", r"(\.multicast::cluster [^;]*), %rs\d+;", r"\1, 2;"),
        Trap("addition: coordinates exchanged", r"(cp\.reduce\.async\.bulk\.tensor\.3d\.global\S+ \[%rd\d+, \{)(%r\d+), (%r\d+), (%r\d+)\}", r"\1\3, \2, \4}"),
        Trap("fence.proxy.async for the wrong memory", r"fence\.proxy\.async\.shared::cta;", "fence.proxy.async.global;"),
        Trap("prefetch: coordinates exchanged", PREFETCH, r"\1\3, \2, \4}"),
        Trap("prefetch: the first rows alone", PREFETCH, r"\1\2, 0, \4}"),
        Trap("a plain arrival where bytes are to be announced", r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[%r\d+\]), %r\d+;", r"mbarrier.arrive.shared::cta.b64 _, \1;"),
        Trap("parity and address exchanged", WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 P1, [\2], \1;"),
        Trap("always parity 1", WAIT, r"mbarrier.try_wait.parity.shared::cta.b64 P1, [\1], 1;"),
        Trap("on before the phase is over", r"@P1 bra\.uni L2;", "@!P1 bra.uni L2;"),
        Trap("what try_wait says is ignored", r"@P1 bra\.uni L2;", "bra.uni L2;"),
        Trap("one arrival is enough for all mbarriers", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 1;"),
        Trap("an mbarrier for nobody", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 0;", 1),
        Trap("an mbarrier that is not initialised", r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], %r\d+;", "", 1),
        Trap("another fence in place of fence.mbarrier_init", r"fence\.mbarrier_init\.release\.cluster;", "fence.acq_rel.cluster;"),
        Trap("an arrival at the next mbarrier", r"(mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+)\];", r"\1+8];"),
        Trap("an arrival for two", r"(mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\]);", r"\1, 2;"),
        Trap("mapa: always the first block", r"(mapa\.shared::cluster\.u32 r, %r\d+), %r\d+", r"\1, 0"),
        Trap("an arrival at one's own mbarrier", r"mapa\.shared::cluster\.u32 r, (%r\d+), %r\d+", r"mov.u32 r, \1"),
        Trap("no first wait of the cluster", r"barrier\.cluster\.wait\.acquire\.aligned;", "", 1),
        Trap("the last meeting of the cluster left out", r"barrier\.cluster\.arrive\.release\.aligned;\s*barrier\.cluster\.wait\.acquire\.aligned;", "", -1),
        Trap("bar.sync: number and count exchanged", r"bar\.sync (%r\d+), (%r\d+)", r"bar.sync \2, \1"),
        Trap("one number for all barriers of warpgroups", r"bar\.sync %r\d+,", "bar.sync 1,"),
        Trap("bar.arrive for half of the threads", r"bar\.arrive (%r\d+), %r\d+;", r"bar.arrive \1, 128;"),
        Trap("the first barrier of the block left out", r"bar\.sync 0;", "", 1),
        Trap("more registers than there are", r"setmaxnreg\.inc\.sync\.aligned\.u32 \d+", "setmaxnreg.inc.sync.aligned.u32 264"),
        Trap("a number of registers that is no multiple of 8", r"setmaxnreg\.dec\.sync\.aligned\.u32 \d+", "setmaxnreg.dec.sync.aligned.u32 42"),
        Trap("fewer registers than a thread may have", r"setmaxnreg\.dec\.sync\.aligned\.u32 \d+", "setmaxnreg.dec.sync.aligned.u32 16"),
        Trap("the next kernel is let go in place of the wait", r"griddepcontrol\.wait;", "griddepcontrol.launch_dependents;"),
        Trap("the counter of blocks only grows", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
        Trap("stmatrix: transposed", r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.shared", r"\1.trans.shared"),
        Trap("a box read: transposed", r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.shared", r"\1.trans.shared"),
        Trap("a box that is not waited for", WAIT, "setp.eq.u32 P1, 0, 0;", -1),
        Trap("column sums: lanes of one row are added", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+), %r\d+,", r"\1, 1,"),
    ],
    "gemm_sm90_narrow": [
        Trap("16 columns: a swizzle of 64 bytes", "-4611685949699522560", "-9223371968126910464"),
        Trap("16 columns: a swizzle of 128 bytes", "-4611685949699522560", "4611686087155253248"),
        Trap("16 columns: groups of 8 of k are as far apart as with 32 columns", "-4611685949699522560", "-4611685880980045824"),
        Trap("16 columns: groups of 8 of k and boxes exchanged", "-4611685949699522560", "-4611685468670525440"),
        Trap("32 columns: a swizzle of 32 bytes", "-9223371899399045120", "-4611685880971657216"),
        Trap("32 columns: a swizzle of 128 bytes", "-9223371899399045120", "4611686155883118592"),
        Trap("32 columns: groups of 8 of k are as far apart as with 16 columns", "-9223371899399045120", "-9223371968118521856"),
        Trap("32 columns: groups of 8 of k and boxes exchanged", "-9223371899399045120", "-9223370937341050880"),
        Trap("16 columns: the second product begins as in lines of 64 bytes", NEXT_PRODUCT + r"32;", r"\1, 64;"),
        Trap("32 columns: the second product begins as in lines of 32 bytes", NEXT_PRODUCT + r"64;", r"\1, 32;"),
        Trap("B is not taken as transposed", r"(wgmma\.mma_async\S+ \{[^}]*\}, %rd\d+, %rd\d+, p, 1, 1, [01]), 1;", r"\1, 0;"),
    ],
    "gemm_grouped": [
        Trap("TMA load of terms: row or column and term swapped", RAGGED_LOAD, r"\1\3, \2, \4, \5}"),
        Trap("TMA load of terms: the address is not moved to the group", RAGGED_LOAD, r"\1\2, \3, \4, 0}"),
        Trap("TMA load of terms: the address is not moved back by the lines that the bound adds", RAGGED_LOAD, r"\1\2, \3, 0, \5}"),
        Trap("TMA store: column and row swapped", RAGGED_STORE, r"\1\3, \2, \4, \5}"),
        Trap("TMA store: the address is not moved to the group", RAGGED_STORE, r"\1\2, \3, \4, 0}"),
        Trap("TMA store: the address is not moved back by the lines that the bound adds", RAGGED_STORE, r"\1\2, \3, 0, \5}"),
    ],
    "syrk": [
        Trap("stmatrix: not transposed, in a mirrored tile", r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.trans\.shared", r"\1.shared"),
    ],
    "gemm_sm80": [
        Trap("mma: a1 and a2 exchanged", MMA, r"\1\2,\4,\3,\5\6\7,\8}"),
        Trap("mma: a0 and a1 exchanged", MMA, r"\1\3,\2,\4,\5\6\7,\8}"),
        Trap("mma: b0 and b1 exchanged", MMA, r"\1\2,\3,\4,\5\6\8,\7}"),
        Trap("mma: b0 twice", MMA, r"\1\2,\3,\4,\5\6\7,\7}"),
        Trap("mma: d1 and d2 exchanged", r"(mma\.sync\S+ \{%f\d+, ?)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
        Trap("ldmatrix: no transposition", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", "ldmatrix.sync.aligned.m8n8.x4"),
        Trap("ldmatrix: always transposed", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", "ldmatrix.sync.aligned.m8n8.x4.trans.shared"),
        Trap("ldmatrix: matrices 0 and 1 exchanged", LDMATRIX, r"\1\3,\2,\4,\5}"),
        Trap("ldmatrix: matrices 1 and 2 exchanged", LDMATRIX, r"\1\2,\4,\3,\5}"),
        Trap("cp.async: bytes beyond the edge are copied", r"(cp\.async\.c[ag]\.shared\.global [^;]*), %r\d+;", r"\1;"),
        Trap("cp.async: all bytes are zero", r"(cp\.async\.c[ag]\.shared\.global [^;]*), %r\d+;", r"\1, 0;"),
        Trap("cp.async: 4 bytes of 8", r"(cp\.async\.ca\.shared\.global [^;]*\], )8, %r\d+;", r"\g<1>4;"),
        Trap("cp.async: waited for one group too few", r"cp\.async\.wait_group 0", "cp.async.wait_group 1"),
        Trap("cp.async: waited for two groups too few", r"cp\.async\.wait_group 1", "cp.async.wait_group 3"),
        Trap("the first barrier of the block left out", r"bar\.sync 0;", "", 1),
        Trap("the counter of blocks only grows", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
        Trap("the last block is told before the others have written", r"atom\.acq_rel\.gpu\.global\.inc", "atom.acquire.gpu.global.inc"),
    ],
    "gemm_phases": [
        Trap("a phase read one element further", r"(ld\.global\.cs\.u32 %r\d+, \[%rd\d+)\]", r"\1+4]", 3),
        Trap("the last phase is not read", r"ld\.global\.cs\.u32 (%r\d+), \[%rd\d+\];", r"mov.u32 \1, 0;", -1),
        Trap("a distance cut to 8 bits", r"mul\.lo\.s64 (%rd\d+), (%rd\d+), (%rd\d+);", r"mul.lo.s64 \1, \2, \3;\nand.b64 \1, \1, 255;"),
        Trap("elements from within eight lanes", r"(shfl\.sync\.idx\.b32 [^;]*), %r\d+, (%r\d+);", r"\1, 6175, \2;"),
        Trap("an element of A is not there", r"(shfl\.sync\.idx\.b32 %r\d+\|%p\d+), %r\d+,", r"\1, 0,", 1),
        Trap("a sum without its product", r"fma\.rn\.f32 (%f\d+), %f\d+, %f\d+, (%f\d+);", r"mov.f32 \1, \2;", 5),
        Trap("two arguments exchanged", r"ld\.param\.u64 (%rd\d+), \[(%rd\d+)\+-52\];", r"ld.param.u64 \1, [\2+-60];"),
    ],
    "gemm_repack": [
        Trap("the second word is the third", r"(ld\.global\.u32 %r\d+, \[%rd\d+\+)4\]", r"\g<1>8]"),
        Trap("words are joined at the wrong bit", r"(bfi\.b64 %rd\d+, %rd\d+, %rd\d+), 32, 32;", r"\1, 16, 32;"),
        Trap("words are moved by a byte", r"(selp\.b64 %rd\d+), 16, 0,", r"\1, 8, 0,"),
        Trap("aligned words are moved, and others are not", r"(selp\.b64 %rd\d+), 16, 0,", r"\1, 0, 16,"),
        Trap("a quotient that is never corrected", r"(selp\.u32 %r\d+), 1, 0,", r"\1, 0, 0,"),
        Trap("a product cut to 32 bits", r"mul\.lo\.s64 (%rd\d+), (%rd\d+), (%rd\d+);", r"mul.lo.s64 \1, \2, \3;\nand.b64 \1, \1, 4294967295;"),
    ],
    "norm": [Trap("the second barrier left out", r"bar\.sync 0;", "", 2)],
    "norm_cluster": [
        Trap("bytes that the other mbarrier counts", SEND, r"\1 [to], {\2, \3}, [bar+8];"),
        Trap("one of two sums", SEND, r"st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], \2, [bar];"),
        Trap("sums to the block's own place", r"mapa\.shared::cluster\.u32 to, (%r\d+), %r\d+;", r"mov.u32 to, \1;"),
        Trap("sums that the own mbarrier counts", r"mapa\.shared::cluster\.u32 bar, (%r\d+), %r\d+;", r"mov.u32 bar, \1;"),
        Trap("every sum to the first block", r"mapa\.shared::cluster\.u32 (to|bar), (%r\d+), %r\d+;", r"mapa.shared::cluster.u32 \1, \2, 0;"),
        Trap("half of the bytes announced", r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;", r"\1, 16;"),
        Trap("one arrival more", r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\]), %r\d+;", r"\1, 2;"),
        Trap("sums are not waited for", r"mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[%r\d+\], %r\d+;", "setp.eq.u32 P1, 0, 0;"),
    ],
    "rows": [
        Trap("the exponential of the negated value", r"ex2\.approx\.ftz\.f32 (%f\d+), (%f\d+);", r"neg.f32 \1, \2;\nex2.approx.ftz.f32 \1, \1;"),
        Trap("the first barrier left out", r"bar\.sync 0;", "", 1),
        Trap("the second barrier left out", r"bar\.sync 0;", "", 2),
        Trap("targets cut to 32 bits", r"ld\.global\.u64", "ld.global.u32"),
    ],
    "embedding": [
        Trap("the index behind in place of the one in front", r"(ld\.global\.u64 %rd\d+, \[%rd\d+\+)-8\]", r"\g<1>8]"),
    ],
    "check_and_norm": [
        Trap("shuffle: segments of 16 lanes", r"(shfl\.sync\.bfly\.b32 %r\d+\|%p\d+, %r\d+, %r\d+), %r\d+,", r"\1, 4111,"),
        Trap("the second barrier left out", r"bar\.sync 0;", "", 2),
        Trap("a barrier for 32 threads", r"bar\.sync 0;", "bar.sync 0, 32;", 1),
        Trap("add in place of inc", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
        Trap("the old value of the counter is not looked at", r"(atom\.acq_rel\.gpu\.global\.inc\.u32) %r\d+", r"\1 _"),
        Trap("one half of a word is read twice", r"mov\.b32 \{(%rs\d+), (%rs\d+)\}, (%r\d+);", r"mov.b32 {\2, \2}, \3;"),
        Trap("double rounded to single", r"cvt\.f64\.f32 (%fd\d+), (%f\d+);", r"cvt.f64.f32 \1, 0f00000000;"),
    ],
    "histogram": [
        Trap("counted without an atomic", r"atom\.shared\.add\.u32 (%r\d+), \[(%r\d+)\], 1;", r"ld.shared.u32 \1, [\2];\nadd.s32 \1, \1, 1;\nst.shared.u32 [\2], \1;"),
        Trap("written where it is to be added", r"atom\.global\.add\.u64 (%rd\d+), \[(%rd\d+)\]", r"atom.global.exch.b64 \1, [\2]"),
        Trap("the last in place of the largest", r"atom\.global\.max\.u32", "atom.global.exch.b32"),
        Trap("the first barrier left out", r"bar\.sync 0;", "", 1),
        Trap("counters that nobody sets to zero", r"st\.shared\.u32 \[%r\d+\], %r\d+;", "", 1),
    ],
    "lists": [Trap("the flag is set by a plain store", r"st\.relaxed\.gpu\.global\.f32", "st.global.f32")],
    "update": [
        Trap("fma: the addend subtracted", r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), (%f\d+);", r"fma.rn.f32 \1, \2, \3, \2;"),
        Trap("a 64-bit product cut to 32 bits", r"mul\.wide\.u32 (%rd\d+), (%r\d+), ([^;]+);", r"cvt.u64.u32 \1, \2;"),
    ],
    "update8": [
        Trap("a positive second moment may become 0", r"selp\.b32 (%r\d+), 0, 1074790400,", r"selp.b32 \1, 0, 0,"),
        Trap("half of the elements are rounded toward zero", r"mov\.u32 (%r\d+), 16644;", r"mov.u32 \1, 17476;"),
        Trap("two elements have the same random bits", r"mov\.u32 (%r\d+), 17188;", r"mov.u32 \1, 16644;"),
        Trap("codes of the lower binades are left out", r"fma\.rz\.f32 (%f\d+), (%f\d+), (%f\d+), (%f\d+);", r"mov.f32 \1, \4;"),
        Trap("two codes exchanged", r"mov\.u32 (%r\d+), 115;", r"mov.u32 \1, 55;"),
        Trap("signs of codes are dropped", r"selp\.b32 (%r\d+), (0, -2139062144|-2139062144, 0),", r"selp.b32 \1, 0, 0,"),
        Trap("a reciprocal to start from is missing", r"rcp\.approx\.ftz\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;"),
        Trap("half the value of a moment", "0f77800000", "0f77000000"),
        Trap("the remainder's sign is dropped", r"shr\.s32 (%r\d+, %r\d+), (16|24);", r"shr.u32 \1, \2;"),
        Trap("the last block is left out", r"add\.s32 (%r\d+, %r\d+), 31;", r"add.s32 \1, 0;"),
        Trap("a skipped step writes codes and exponents", r"setp\.gt\.f32 (%p\d+, %f\d+), 0f00000000;", r"setp.lt.f32 \1, 0f00000000;", 1),
    ],
    "lamb": [Trap("all barriers left out", r"bar\.sync 0;", "")],
    "update_scale": [Trap("vote: the other way round", r"(vote\.sync\.ballot\.b32 %r\d+), (%p\d+)", r"\1, !\2"),
        Trap("the vote counts for nothing", r"vote\.sync\.ballot\.b32 (%r\d+), [^;]*;", r"mov.u32 \1, 0;")],
}  # fmt: skip
