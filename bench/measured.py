"""Products that were timed on an NVIDIA H200 (132 SMs, 700 W), 20 November 2026, bf16, torch 2.11.0+cu130, random data.

``cublas`` is the time of cuBLAS's kernels alone, in microseconds, called for the second time in a row: operands that fit
the L2 cache came from there. ``ratio`` is that time over the one of a prototype of `gemm_sm90` with the best of its
tiles, the two measured in turn. The prototype did not split k where it wrote fp32, had no tile of 192 rows and none that
takes turns (pingpong), and added the parts of a split product in a second launch.
"""

from typing import NamedTuple

from .gemm_shapes import Shape

L2_BYTES = 50e6  # of the 60 MB: what two operands of a repeated call still find there
COPY_BYTES_PER_S = 4.25e12  # read and written
CUBLAS_FLOPS_PER_S = 815e12  # its best, cold: 8192 x 14336 x 4096; sustained some 680e12


class Timed(NamedTuple):
    shape: Shape
    cublas: float
    ratio: float | None = None

    @property
    def prototype(self) -> float | None:
        return None if self.ratio is None else self.cublas / self.ratio

    @property
    def in_l2(self) -> bool:
        s = self.shape
        return 2 * s.k * (s.m + s.n) + (2 if s.result == "16" else 4) * s.m * s.n < L2_BYTES


H200 = [
    Timed(Shape(8192, 6144, 4096, "NT"), 507, 1.0),
    Timed(Shape(4096, 4096, 4096, "NT"), 174, 1.0),
    Timed(Shape(8192, 8192, 8192, "NT"), 1363, 1.0),
    Timed(Shape(8192, 14336, 4096, "NN"), 1180, 1.0),
    Timed(Shape(28672, 4096, 8192, "TN", "fp32"), 2389, 1.0),
    Timed(Shape(3072, 768, 65536, "TN", "fp32"), 379, 0.78),
    Timed(Shape(4096, 2112, 7168, "NT"), 155, 0.92),
    Timed(Shape(4096, 576, 7168, "NT"), 43, 0.95),
    Timed(Shape(32768, 4096, 512, "TN", "fp32"), 262),
    Timed(Shape(128, 7168, 16384, "NT"), 69, 1.04),
    Timed(Shape(23328, 1152, 4304, "NT"), 303, 0.94),
    Timed(Shape(12544, 256, 2304, "NT"), 22, 0.83),
    Timed(Shape(200704, 64, 576, "NT"), 67, 1.08),
    Timed(Shape(8192, 16, 4096, "NT"), 21, 0.995),
    Timed(Shape(64, 4096, 4096, "NT"), 9, 0.94),
    Timed(Shape(4096, 64, 4096, "NT"), 9, 0.94),
    Timed(Shape(256, 256, 65536, "TN"), 24, 0.875),
    Timed(Shape(512, 512, 512, "NT"), 3, 0.97),
    Timed(Shape(1024, 1024, 1024, "NT"), 5, 0.95),
    Timed(Shape(2048, 2048, 2048, "NT"), 24, 0.99),
    Timed(Shape(4097, 4097, 4097, "NT"), 1187),
    Timed(Shape(16384, 50257, 768, "NT"), 13_300),
    Timed(Shape(65536, 512, 13, "NT"), 67),
    Timed(Shape(1025, 1025, 1025, "NT"), 39),
]

# Of a prototype of the optimizer step there, on Llama-1B's list: the rate of its passes over that of a copy, and what a
# launch costs that carries the addresses of some hundred tensors.
STEP_SHARES = {"check": 0.98, "update": 0.92, "launches": 4, "launch_us": 7.7}

# Training steps there, bf16 autocast, fused AdamW, clipping: (seconds, peak GiB).
STEPS = {
    ("gpt2-124m", "torch eager"): (94.1e-3, 30.9),
    ("gpt2-124m", "torch.compile"): (64.8e-3, 15.6),
    ("gpt2-1.5b", "torch eager"): (221.5e-3, 47.2),
}
