"""Registers that nothing has written: where they may be read."""

import pytest

from tools.ptx.interpreter import liveness
from tools.ptx.interpreter.text import Module
from tools.ptx.interpreter.types import PtxError

KERNEL = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{{
.reg .pred %p<2>;
.reg .b32 %r<9>;
.reg .b64 %rd<2>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, 7;
{body}
ret;
}}
"""


@pytest.mark.parametrize(
    "body",
    [
        "prmt.b32 %r4, %r2, %r3, 0x3340; prmt.b32 %r5, %r1, %r4, 0x5410; st.global.v2.u32 [%rd1], {%r5, %r6};",
        "setp.eq.u32 %p1, %r1, 7; @%p1 mov.u32 %r2, 1; add.u32 %r3, %r2, 1;",
    ],
    ids=["bytes between members", "written on a condition"],
)
def test_allowed(body):
    liveness.check(Module(KERNEL.format(body=body)).kernel("k"))


@pytest.mark.parametrize(
    ("body", "register"),
    [
        ("add.u32 %r3, %r1, %r2;", "%r2"),
        ("st.global.u32 [%rd1], %r2;", "%r2"),
        ("prmt.b32 %r4, %r2, %r3, 0x3340; add.u32 %r5, %r4, %r1;", "%r4"),
        ("prmt.b32 %r4, %r1, %r2, 0x3340; add.u32 %r2, %r1, %r1;", "%r2"),
        ("st.global.v2.u32 [%rd1], {%r1, %r2}; mov.u32 %r2, %r1;", "%r2"),
        ("st.global.v2.u32 [%rd0], {%r1, %r1};", "%rd0"),
    ],
    ids=[
        "a sum",
        "a store of one word",
        "a sum of such bytes",
        "written later",
        "stored before it is written",
        "an address",
    ],
)
def test_not_allowed(body, register):
    with pytest.raises(PtxError, match=f"{register} is read, and nothing has written it"):
        liveness.check(Module(KERNEL.format(body=body)).kernel("k"))
