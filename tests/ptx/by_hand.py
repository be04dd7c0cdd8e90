"""Kernels written by hand, on the interpreter alone: for tests that break one rule at a time. Needs no nvcc."""

import re
from dataclasses import dataclass, field

import numpy as np

from tools.ptx.interpreter.launch import Device, Launch
from tools.ptx.interpreter.tensor_map import LAYOUT, MAGIC
from tools.ptx.interpreter.text import Module
from tools.ptx.interpreter.types import PtxError

# Every body finds its numbers, its word of the buffer and of shared memory, and whether it is the first thread, the first warp.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 buffer)
.maxntid 256
{{
.reg .pred %p<4>;
.reg .b16 %rs<4>;
.reg .b32 %r<12>;
.reg .b64 %rd<8>;
.reg .f32 %f<8>;
.shared .align 1024 .b8 s[10240];
.shared .align 8 .b8 full[16];
ld.param.u64 %rd1, [buffer];
mov.b64 %rd2, map;
cvta.param.u64 %rd3, %rd2;
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, s;
shl.b32 %r4, %r1, 2;
add.u32 %r4, %r3, %r4;
cvt.u64.u32 %rd4, %r1;
shl.b64 %rd4, %rd4, 2;
add.u64 %rd4, %rd1, %rd4;
setp.eq.u32 %p1, %r1, 0;
setp.lt.u32 %p2, %r1, 32;
{body}
ret;
}}
"""
BYTES = 1020  # of the buffer: no multiple of 8, so that a vector may end beyond it
SEEDS = range(4)  # of each habit of schedule.py one
BOX = 64  # elements of 2 bytes, of which the tensor map has one line


@dataclass
class Shape:
    """Shape of a launch."""

    threads: int = 32
    blocks: int = 1
    cluster: int = 1
    dynamic: int = 0
    overlapping: bool = False
    capability: int = 90
    shared_limit: int | None = None


@dataclass
class Case:
    """A body that is right, and one text in it that is replaced by a wrong one; what the error says."""

    body: str
    old: str
    new: str
    error: str
    shape: Shape = field(default_factory=Shape)

    def check(self) -> None:
        """The body runs under every kind of schedule; with the wrong text, one of them gives this error."""
        assert self.body.count(self.old) == 1, (self.body.count(self.old), self.old)
        told = []
        for seed in SEEDS:
            self.run(self.body, seed)
            try:
                self.run(self.body.replace(self.old, self.new), seed)
            except PtxError as error:
                told.append(str(error))
        assert any(re.search(self.error, text) for text in told), told

    def run(self, body: str, seed: int) -> None:
        """Behind a kernel that writes the buffer."""
        memory = Memory(self.shape.capability)
        memory.launch("st.global.u32 [%rd4], %r1;", Shape(threads=self.shape.threads))
        memory.launch(body, self.shape, seed)


class Memory:
    """A device with one buffer, of zeros."""

    def __init__(self, capability: int = 90):
        self.device = Device(capability)
        whole = np.zeros(BYTES + 1024, np.uint8)
        start = -whole.ctypes.data % 512
        self.bytes = whole[start : start + BYTES]
        self.address = self.bytes.ctypes.data
        self.device.memory.set_buffers([(self.address, BYTES)])

    def arguments(self) -> bytes:
        map_ = LAYOUT.pack(MAGIC, 6, 1, self.address, BOX, *[0] * 8, BOX, *[0] * 5)
        return map_.ljust(128, b"\0") + self.address.to_bytes(8, "little")

    def launch(self, body: str, shape: Shape | None = None, seed: int = 0, **changed) -> np.ndarray:
        """Runs the body; the buffer's words after it."""
        s = shape or Shape()
        kernel = Module(TEXT.format(body=body)).kernel("k")
        options = {
            "grid": (s.blocks, 1, 1),
            "block": (s.threads, 1, 1),
            "cluster": (s.cluster, 1, 1),
            "shared_bytes": s.dynamic,
            "arguments": self.arguments(),
            "overlapping": s.overlapping,
            "shared_limit": s.shared_limit,
        }
        Launch(self.device, kernel, **options | changed, seed=seed).run()
        return self.bytes.view(np.uint32)
