"""The interpreter behind the fake CUDA runtime: launches of nvcc's host code run here."""

import ctypes
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .interpreter import liveness
from .interpreter.launch import Device, Launch
from .interpreter.text import Kernel, Module
from .interpreter.types import PtxError
from .sources import Source, newest, sources_in


class FakeLaunch(ctypes.Structure):  # mirrored in fake_cuda/fake.h
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("overlap", ctypes.c_int),
        ("shared_limit", ctypes.c_int),
        ("device", ctypes.c_int),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    )


PREPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(FakeLaunch))
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)


@dataclass
class Prepared:
    """A launch as it was asked for, with its arguments: it can run any number of times."""

    kernel: Kernel
    grid: tuple
    block: tuple
    cluster: tuple
    shared_bytes: int
    shared_limit: int
    arguments: bytes
    orders_shared: bool = True  # whether accesses to shared memory must be ordered
    device: int = 0
    may_overlap: bool = False  # the kernel before it


class Machine:
    """The devices of this process, of which most tests know the first."""

    def __init__(self, runtime: Path, library: Path):
        self.runtime = ctypes.CDLL(str(runtime))
        self.library = ctypes.CDLL(str(library))
        self.sources = sources_in(library)
        self.runtime.fake_memory_changes.restype = ctypes.c_uint64
        self.runtime.fake_buffers.restype = ctypes.c_uint64
        self.seed = 0
        self.rewrite: Callable[[str, str], str] | None = None  # (kernel's name, text) -> text, for planted bugs
        self.error: Exception | None = None
        self.launched: list[str] = []
        self.ever_launched: set[str] = set()  # which no test clears
        self._kernels: dict[tuple, Kernel] = {}
        self.prepared: list[Prepared] = []
        self.recent: deque[Launch] = deque(maxlen=4)  # that have run
        self._changes = [-1, -1]
        self._one_at_a_time = threading.Lock()  # launches of several host threads
        self.devices = (Device(), Device())
        self.device = self.devices[0]
        for device in range(len(self.devices)):
            self.set_chip(90, 2, device=device)
        self._callbacks = PREPARE(self._guarded(self._prepare, -1)), RUN(self._guarded(self._run, 1))
        self.runtime.fake_set_interpreter(*self._callbacks)

    def set_chip(self, capability: int, sm_count: int, shared_per_block: int = 227 * 1024, device: int = 0) -> None:
        it = self.devices[device]
        it.capability, it.shared_limit = capability, shared_per_block
        self.runtime.fake_set_chip(device, capability // 10, capability % 10, sm_count, shared_per_block)
        self.library.ak_forget_devices()

    def calls(self, name: str) -> int:
        """Number of calls of the runtime's function in this process."""
        return self.runtime.fake_calls(name.encode())

    def forget(self) -> None:
        """Drops kernels and what was made for them."""
        self._kernels.clear()
        self.prepared.clear()
        for device in self.devices:
            device.pool.clear()

    def _guarded(self, function, failed: int):
        def call(*arguments):
            try:
                with self._one_at_a_time:
                    return function(*arguments)
            except Exception as error:
                self.error = error
                kind = "" if isinstance(error, PtxError) else traceback.format_exc()
                self.runtime.fake_set_error(f"{kind}{error}".encode())
                return failed

        return call

    def kernel(self, source: Source, name: str) -> Kernel:
        text = source.text(name)
        if self.rewrite:
            text = self.rewrite(name, text)
        key = (source.target, name, hash(text))
        if key not in self._kernels:
            self._kernels[key] = Module(text).kernel(name)
            liveness.check(self._kernels[key])
        return self._kernels[key]

    def _prepare(self, pointer) -> int:
        launch = pointer.contents
        name = launch.kernel.decode()
        capability = self.devices[launch.device].capability
        source = newest(self.sources, name, capability)
        if source is None:
            raise PtxError(f"there is no PTX of {name} for sm_{capability}")
        kernel = self.kernel(source, name)
        arguments = bytearray(kernel.parameter_bytes)
        for i, (at, size) in enumerate(kernel.parameters.values()):
            arguments[at : at + size] = ctypes.string_at(launch.arguments[i], size)
        return self.prepare(
            Prepared(kernel, tuple(launch.grid), tuple(launch.block), tuple(launch.cluster), launch.shared_bytes,
                     launch.shared_limit, bytes(arguments), device=launch.device,
                     may_overlap=bool(launch.overlap))
        )  # fmt: skip

    def prepare(self, launch: Prepared) -> int:
        """The number that the runtime knows the launch by."""
        self.prepared.append(launch)
        return len(self.prepared) - 1

    def _run(self, number: int, overlap: int) -> int:
        p = self.prepared[number]
        device = self.devices[p.device]
        self._refresh_memory(p.device)
        self.launched.append(p.kernel.name)
        self.ever_launched.add(p.kernel.name)
        device.orders_shared = p.orders_shared
        launch = Launch(device, p.kernel, p.grid, p.block, p.cluster, p.shared_bytes, p.arguments, seed=self.seed,
                        shared_limit=p.shared_limit, overlapping=bool(overlap))  # fmt: skip
        self.recent.append(launch.run())
        return 0

    def _refresh_memory(self, device: int) -> None:
        """Another host thread may allocate or free between two calls: a list counts if nothing changed around it."""
        while (changes := self.runtime.fake_memory_changes()) != self._changes[device]:
            count = self.runtime.fake_buffers(device, None, 0)
            pairs = (ctypes.c_uint64 * (2 * count))()
            self.runtime.fake_buffers(device, pairs, count)
            if changes == self.runtime.fake_memory_changes():
                self.devices[device].memory.set_buffers([(pairs[2 * i], pairs[2 * i + 1]) for i in range(count)])
                self._changes[device] = changes
