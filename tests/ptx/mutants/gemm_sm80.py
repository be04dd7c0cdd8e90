"""mma.sync, ldmatrix and cp.async."""

from . import Mutant

KERNEL = "gemm_sm80_kernel"
CASES = "sm80"
CAPABILITY = 80

MMA = r"(mma\.sync\S+ \{[^}]*\}, \{)(%r\d+), ?(%r\d+), ?(%r\d+), ?(%r\d+)(\}, \{)(%r\d+), ?(%r\d+)\}"
LDMATRIX = r"(ldmatrix\S+ \{)(%r\d+), ?(%r\d+), ?(%r\d+), ?(%r\d+)\}"

MUTANTS = [
    Mutant("mma: a1 and a2 exchanged", MMA, r"\1\2,\4,\3,\5\6\7,\8}"),
    Mutant("mma: a0 and a1 exchanged", MMA, r"\1\3,\2,\4,\5\6\7,\8}"),
    Mutant("mma: b0 and b1 exchanged", MMA, r"\1\2,\3,\4,\5\6\8,\7}"),
    Mutant("mma: b0 twice", MMA, r"\1\2,\3,\4,\5\6\7,\7}"),
    Mutant("mma: operands of the other 16-bit type", r"f32\.f16\.f16\.f32", "f32.bf16.bf16.f32"),
    Mutant("mma: d0 and d1 exchanged", r"(mma\.sync\S+ \{)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("mma: d1 and d2 exchanged", r"(mma\.sync\S+ \{%f\d+, ?)(%f\d+), ?(%f\d+)", r"\1\3, \2"),
    Mutant("ldmatrix: no transposition", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", "ldmatrix.sync.aligned.m8n8.x4"),
    Mutant("ldmatrix: always transposed", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", "ldmatrix.sync.aligned.m8n8.x4.trans.shared"),
    Mutant("ldmatrix: matrices 0 and 1 exchanged", LDMATRIX, r"\1\3,\2,\4,\5}"),
    Mutant("ldmatrix: matrices 1 and 2 exchanged", LDMATRIX, r"\1\2,\4,\3,\5}"),
    Mutant("ldmatrix: the predicate's sense", r"@p ldmatrix", "@!p ldmatrix"),
    Mutant("ldmatrix: 8 bytes further", r"(ldmatrix[^;]*\[%r\d+)\]", r"\1+8]"),
    Mutant("ldmatrix: a row further", r"(ldmatrix[^;]*\[%r\d+)\]", r"\1+128]"),
    Mutant("cp.async: bytes beyond the edge are copied", r"(cp\.async\.c[ag]\.shared\.global [^;]*), %r\d+;", r"\1;"),
    Mutant("cp.async: all bytes are zero", r"(cp\.async\.c[ag]\.shared\.global [^;]*), %r\d+;", r"\1, 0;"),
    Mutant("cp.async: 4 bytes of 8", r"(cp\.async\.ca\.shared\.global [^;]*\], )8, %r\d+;", r"\g<1>4;"),
    Mutant("cp.async: 16 bytes further", r"(cp\.async\.cg\.shared\.global \[%r\d+)\]", r"\1+16]"),
    Mutant("cp.async: never committed", r"cp\.async\.commit_group;", ""),
    Mutant("cp.async: committed as if it were bulk", r"cp\.async\.commit_group;", "cp.async.bulk.commit_group;"),
    Mutant("cp.async: waited for one group too few", r"cp\.async\.wait_group 0", "cp.async.wait_group 1"),
    Mutant("cp.async: waited for two groups too few", r"cp\.async\.wait_group 1", "cp.async.wait_group 3"),
    Mutant("cp.async: no wait at all", r"cp\.async\.wait_group \d;", ""),
    Mutant("barriers of the block left out", r"bar\.sync 0;", ""),
    Mutant("the first barrier of the block left out", r"bar\.sync 0;", "", 1),
    Mutant("the last block is told by a relaxed atomic", r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc"),
    Mutant("the counter of blocks only grows", r"(atom\.acq_rel\.gpu\.global)\.inc", r"\1.add"),
    Mutant("the last block is told before the others have written", r"atom\.acq_rel\.gpu\.global\.inc", "atom.acquire.gpu.global.inc"),
    Mutant("the halves of a pair exchanged", r"(cvt\.rn\.b?f16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
    Mutant("pairs of the other 16-bit type", r"cvt\.rn\.f16x2\.f32", "cvt.rn.bf16x2.f32"),
    Mutant("warps do not meet", r"bar\.warp\.sync -1;", ""),
    Mutant("half of a warp meets", r"bar\.warp\.sync -1;", "bar.warp.sync 65535;"),
    Mutant("16 bytes from 16 bytes further", r"(ld\.shared\.v4\.u32 [^;]*\[%r\d+)\]", r"\1+16]"),
    Mutant("two words of 16 bytes read in the wrong order", r"(ld\.shared\.v4\.u32 \{)(%r\d+), ?(%r\d+)", r"\1\3,\2"),
    Mutant("16 bytes stored 16 bytes further", r"(st\.shared\.v4\.u32 \[%r\d+)\]", r"\1+16]"),
    Mutant("two words of 16 bytes stored in the wrong order",
           r"(st\.shared\.v4\.u32 \[[^]]*\], \{)(%r\d+), ?(%r\d+)", r"\1\3,\2"),
    Mutant("two sums stored 8 bytes further", r"(st\.shared\.v2\.f32 \[%r\d+)\]", r"\1+8]"),
]  # fmt: skip
