"""The matrix products that `gemm.py` times: those of training, and those that other libraries publish."""

from dataclasses import dataclass, replace
from typing import Any

SKINNY = 128


@dataclass(frozen=True)
class Shape:
    """[m, k] @ [k, n], `batch` of them.

    `layout` says how a and b are stored (N as they are, T transposed). `result`: "16" as the operands, "fp32", "fp32+"
    accumulated, or a 16-bit result of that activation after a bias. Operands start `offset` elements after an
    aligned address, and their rows lie `pitch` elements further apart than they are long.
    """

    m: int
    n: int
    k: int
    layout: str
    result: str = "16"
    batch: int = 1
    offset: int = 0
    pitch: int = 0
    control: bool = False  # from no model: isolates one property

    @property
    def name(self) -> str:
        text = f"{self.batch} x " * (self.batch > 1) + f"{self.m}x{self.n}x{self.k} {self.layout}"
        if self.result != "16":
            text += f" {self.result}" if self.result.startswith("fp32") else f" bias+{self.result}"
        return text + f" offset {self.offset}" * bool(self.offset) + f" ld +{self.pitch}" * bool(self.pitch)

    @property
    def lines(self) -> tuple[int, int]:
        """Contiguous elements of a and b."""
        return self.m if self.layout[0] == "T" else self.k, self.k if self.layout[1] == "T" else self.n

    def _access(self, row: int) -> int:
        places = (row + self.pitch, self.offset)
        return next(size for size in (16, 8, 4, 2) if all(2 * place % size == 0 for place in places))

    @property
    def a_bytes(self) -> int:
        """The widest access, at most 16 bytes, that every row of a can be read with."""
        return self._access(self.lines[0])

    @property
    def b_bytes(self) -> int:
        return self._access(self.lines[1])

    @property
    def operand_bytes(self) -> int:
        return min(self.a_bytes, self.b_bytes)

    @property
    def aligned(self) -> bool:
        """Every row of a, b and the result starts at a multiple of 16 bytes."""
        return self.operand_bytes == 16 and self.n * (4 if self.result.startswith("fp32") else 2) % 16 == 0

    @property
    def families(self) -> tuple[str, ...]:
        if not self.aligned:
            return ("unaligned", "unaligned controls") if self.control else ("unaligned",)
        if self.result == "fp32+":
            return ("fp32 accumulated",)
        if self.result not in ("16", "fp32"):
            return ("epilogue",)
        return ("aligned", "skinny") if min(self.m, self.n, self.k) <= SKINNY else ("aligned",)

    @property
    def request(self) -> dict[str, Any]:
        """The keyword arguments of plan_gemm; an activation comes after a bias anyway."""
        wide = self.result.startswith("fp32")
        return {
            "batch": self.batch,
            "m_major_a": self.layout[0] == "T",
            "n_major_b": self.layout[1] == "N",
            "tma_a": self.a_bytes == 16,
            "tma_b": self.b_bytes == 16,
            "tma_output": self.n * (4 if wide else 2) % 16 == 0,
            "odd_operands": self.operand_bytes == 2,
            **({} if self.offset else {"ld_a": self.lines[0] + self.pitch, "ld_b": self.lines[1] + self.pitch}),
            "out_bytes": 8 if self.result == "fp32+" else 4 if wide else 2,
            "activation": "none" if wide or self.result == "16" else self.result,
        }


def planned(shape: Shape, sm_count: int, capability: int) -> str | None:
    """The plan of csrc/gemm/plan.h for a product on such a GPU, in words; None where the module that has it is not built.

    The profiler's kernel names in the same row say what really ran; this says which part of the table it was.
    """
    try:
        from amp_kernels import _host
    except ImportError:
        return None
    chip = {"sm_count": sm_count, "capability": capability}
    return describe(_host.plan_gemm(shape.m, shape.n, shape.k, **shape.request, **chip))


def describe(plan: dict[str, Any]) -> str:
    """A plan in words."""
    from amp_kernels import _host

    if plan["kernel"] == "none":
        return "none"
    tile = _host.gemm_candidates()[plan["kernel"]][plan["tile"]]
    text = f"{plan['kernel']} {tile['m']}x{tile['n']}"
    if "cluster_m" in tile:
        text += f" cluster {tile['cluster_m']}x{tile['cluster_n']}, {tile['consumers']} consumers"
    text = "repack, " * plan["repacked"] + "in phases, " * plan["in_phases"] + text
    text += ", pingpong" * tile.get("pingpong", False) + f", {plan['splits']} splits" * (plan["splits"] > 1)
    return text + ", swapped" * plan["swapped"]


SUITE = [
    Shape(8192, 6144, 4096, "NT"),  # Llama-8B: qkv, gate + up, down, their gradients
    Shape(8192, 28672, 4096, "NT"),
    Shape(8192, 4096, 14336, "NT"),
    Shape(8192, 14336, 4096, "NN"),
    Shape(8192, 4096, 28672, "NN"),
    Shape(28672, 4096, 8192, "TN", "fp32+"),
    Shape(4096, 14336, 8192, "TN", "fp32+"),
    Shape(4096, 128256, 4096, "NT"),  # its head
    Shape(4096, 4096, 128256, "NN"),
    Shape(128256, 4096, 4096, "TN", "fp32+"),
    Shape(128256, 4096, 512, "TN", "fp32+"),  # a chunk of a fused cross-entropy
    Shape(16384, 16384, 2048, "NT"),  # Llama-1B
    Shape(2048, 8192, 16384, "TN", "fp32+"),
    Shape(8192, 8192, 28672, "NT"),  # Llama-70B
    Shape(8192, 7168, 8192, "NT"),
    Shape(7168, 8192, 8192, "TN", "fp32+"),
    Shape(8192, 4864, 896, "NT"),  # Qwen-0.5B
    Shape(16384, 50257, 768, "NT"),  # GPT-2: its unpadded head, its MLP
    Shape(65536, 3072, 768, "NT"),
    Shape(65536, 3072, 768, "NT", "gelu"),
    Shape(3072, 768, 65536, "TN", "fp32+"),
    Shape(4096, 2112, 7168, "NT"),  # DeepSeek-V3, DeepGEMM's list
    Shape(4096, 576, 7168, "NT"),
    Shape(4096, 24576, 1536, "NT"),
    Shape(32768, 4096, 512, "TN", "fp32+"),
    Shape(7168, 4096, 16384, "TN", "fp32+"),
    Shape(128, 7168, 16384, "NT"),
    Shape(8192, 256, 7168, "NT", "fp32"),
    Shape(16448, 4096, 1024, "NT"),  # ViT-L, SigLIP, ViT-B
    Shape(16448, 4096, 1024, "NT", "gelu"),
    Shape(23328, 1152, 4304, "NT"),
    Shape(3072, 768, 50432, "TN", "fp32+"),
    Shape(200704, 64, 576, "NT"),  # ResNet-50 as implicit products
    Shape(12544, 256, 2304, "NT"),
    Shape(64, 147, 802816, "TN", "fp32+"),
    Shape(262144, 64, 64, "NT"),  # a tiny MLP, DLRM's bottom MLP, LoRA down and up
    Shape(262144, 64, 64, "NT", "relu"),
    Shape(65536, 512, 13, "NT"),
    Shape(65536, 512, 13, "NT", "relu"),
    Shape(8192, 16, 4096, "NT"),
    Shape(8192, 4096, 16, "NT"),
    Shape(512, 16, 500000, "NN"),  # DeepBench
    Shape(35, 8457, 2560, "NN"),
    Shape(5124, 9124, 2560, "NN"),
    Shape(7680, 64, 2560, "NN"),
    Shape(512, 512, 64, "NT", batch=256),  # BERT's attention scores; pytorch#83272
    Shape(1024, 1024, 140, "NT", batch=384),
]
_CONTROLS = [  # squares, layouts, views, sizes that nothing divides
    Shape(512, 512, 512, "NT"),
    Shape(1024, 1024, 1024, "NT"),
    Shape(2048, 2048, 2048, "NT"),
    Shape(4096, 4096, 4096, "NT"),
    Shape(4096, 4096, 4096, "NN"),
    Shape(4096, 4096, 4096, "TN"),
    Shape(4096, 4096, 4096, "TT"),
    Shape(8192, 8192, 8192, "NT"),
    Shape(65536, 1024, 1024, "NT"),
    Shape(4096, 4096, 4096, "NT", pitch=8),
    Shape(4096, 4096, 4096, "NT", offset=1),
    Shape(4097, 4097, 4097, "NT"),
    Shape(8193, 4097, 4099, "NT"),
    Shape(1025, 1024, 1026, "NT"),
]
CUDA = [*SUITE, *(replace(shape, control=True) for shape in _CONTROLS)]
QUICK = [
    Shape(8192, 6144, 4096, "NT"),
    Shape(4096, 14336, 8192, "TN", "fp32+"),
    Shape(16448, 4096, 1024, "NT", "gelu"),
    Shape(8192, 16, 4096, "NT"),
    Shape(4097, 4097, 4097, "NT", control=True),
]
# The first six have every family, several layouts, and views; the others are large enough to say something on a CPU: a
# layer's three products, cubes, and the thin products of a model that generates.
CPU = [
    Shape(160, 192, 136, "NT"),
    Shape(136, 160, 192, "TN", "fp32+"),
    Shape(64, 160, 136, "NT", "gelu"),
    Shape(48, 72, 16, "TT", "fp32", pitch=8),
    Shape(33, 41, 35, "NN", offset=1, control=True),
    Shape(24, 32, 40, "NT", batch=3),
    Shape(1024, 768, 768, "NT"),
    Shape(1024, 768, 3072, "NN"),
    Shape(768, 3072, 1024, "TN", "fp32"),
    Shape(768, 3072, 1024, "TN", "fp32+"),
    Shape(1024, 3072, 768, "NT", "gelu"),
    Shape(256, 256, 256, "NT"),
    Shape(512, 512, 512, "NT"),
    Shape(512, 512, 512, "NT", "fp32"),
    Shape(1024, 1024, 1024, "NT"),
    Shape(2048, 2048, 2048, "NT"),
    Shape(257, 129, 515, "NT"),
    Shape(4, 16, 16, "NT"),
    Shape(1, 4096, 4096, "NT"),
    Shape(16, 1024, 1024, "NT"),
]
