"""The ceilings of a machine, measured in the run whose figures they judge: memory bandwidth, of a copy and of two reads to
one write, which is higher on a GPU; and arithmetic, which on a GPU is a large matrix product, on a CPU the multiply-adds
of its instruction set with operands in registers."""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from amp_kernels._dispatch import cpu_isa

from .case import DTYPES

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # of one buffer, far beyond any cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
RECORDED = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Roofline:
    """`bandwidth` and `two_reads` in bytes/s (read plus written) and `peak[dtype]` in flops/s."""

    bandwidth: float
    two_reads: float
    peak: dict[str, float]

    @classmethod
    def measured(cls, device: torch.device, seconds: float) -> "Roofline":
        """The ceilings of this machine; so many seconds for each."""
        copy = 2 * COPY_BYTES[device.type] / _copy_seconds(device, seconds)
        return cls(copy, 3 * COPY_BYTES[device.type] / _addition_seconds(device, seconds), _peaks(device, seconds))

    @classmethod
    def kept(cls, file: Path, machine: dict, device: torch.device, seconds: float) -> "Roofline":
        """The ceilings that an earlier run left in the file, on this machine by this torch; else they are measured and left there."""
        of = {key: machine.get(key) for key in ("device", "threads", "isa")} | {"torch": torch.__version__}
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # no file, or one of another version
            found = json.loads(file.read_text())
            if found.pop("of") == of:
                return cls(**found)
        measured = cls.measured(device, seconds)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"of": of, **asdict(measured)}))
        return measured

    def floor_seconds(self, count_bytes: int, flops: int, dtype: str, written: int | None = None) -> float:
        """The least time for so many bytes and flops. `dtype` names the operands ("bf16 -> fp32" computes in bf16).

        `written` of the bytes are written; None: half, as in a copy. Reads beyond as many bytes move at the rate of
        two reads to one write, together with their share of the writes.
        """
        read = count_bytes // 2 if written is None else count_bytes - written
        copied = max(0, min(count_bytes, 2 * (2 * (count_bytes - read) - read)))
        memory = copied / self.bandwidth + (count_bytes - copied) / self.two_reads
        return max(memory, flops / self.peak.get(dtype.split()[0], self.peak["fp32"]))

    def in_cache(self, device: torch.device, count_bytes: int, flops: int, dtype: str, share: float) -> bool:
        """True if the ceiling of memory is none for these bytes: they bound the time, and stay in the CPU's cache."""
        if (
            device.type != "cpu"
            or flops / self.peak.get(dtype.split()[0], self.peak["fp32"]) >= count_bytes / self.two_reads
        ):
            return False
        return share > 1 or count_bytes <= cache_bytes()

    def record(self) -> dict[str, float]:
        peaks = {f"tflops_{name}": value / 1e12 for name, value in self.peak.items()}
        return {"copy_gb_per_s": self.bandwidth / 1e9, "two_reads_gb_per_s": self.two_reads / 1e9, **peaks}


def cache_bytes() -> int:
    """Size of the CPU's largest cache; 0 where the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in ("K", "M")), default=0)


def _peaks(device: torch.device, seconds: float) -> dict[str, float]:
    """The peak of a 16-bit dtype on a GPU is that of the faster 16-bit product: a slow library routine is not the machine's
    limit. On a CPU fp16 is widened, so its peak is that of fp32."""
    if device.type == "cpu" and cpu_isa.chosen() != "portable":
        peak = {name: cpu_isa.peak(DTYPES[name], seconds) for name in RECORDED[:2]}
        return peak | {"fp32": peak["fp16"]}
    peak = {}
    for name in RECORDED:
        if device.type == "cuda" or name != "fp16":  # torch's CPU routine for FP16 is far below the machine
            peak[name] = 2 * MATMUL_SIZE[device.type] ** 3 / _matmul_seconds(device, DTYPES[name], seconds)
    peak["fp16"] = peak["bf16"] = max(peak.get("fp16", 0.0), peak["bf16"])
    return peak


def _copy_seconds(device: torch.device, seconds: float) -> float:
    source = torch.empty(COPY_BYTES[device.type] // 4, device=device).normal_()
    target = torch.empty_like(source)
    return _settled(lambda: target.copy_(source), device, seconds)


def _addition_seconds(device: torch.device, seconds: float) -> float:
    a = torch.empty(COPY_BYTES[device.type] // 4, device=device).normal_()
    b, total = a.clone(), torch.empty_like(a)
    return _settled(lambda: torch.add(a, b, out=total), device, seconds)


def _matmul_seconds(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _settled(lambda: a @ b, device, seconds)


def _settled(call, device: torch.device, seconds: float) -> float:
    """Median seconds of a call in the second half of `seconds`: on a GPU the clock has then settled."""
    times = []
    start = time.perf_counter()
    while len(times) < 4 or time.perf_counter() - start < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    settled = sorted(times[len(times) // 2 :])
    return settled[len(settled) // 2]
