"""Requests of a launch to runtime and driver: each thing wrong once, and launches of several host threads."""

import ctypes
import re
import threading
from dataclasses import replace

import pytest
import torch

from ..ops import raw
from .gemm_cases import cases, integers, operands, run
from .preloaded import machine, set_chip

machine()

RIGHT = {
    "map_at": 0,
    "type": 6,
    "rank": 3,
    "base": 512,
    "size": (64, 16, 2),
    "stride": (128, 2048),
    "box": (64, 8, 1),
    "element_stride": (1, 1, 1),
    "interleave": 0,
    "swizzle": 3,
    "promotion": 2,
    "fill": 0,
}


def encode(**changed) -> int:
    """The driver's answer to a tensor map."""
    m = RIGHT | changed
    raw = ctypes.create_string_buffer(256)
    at = ctypes.addressof(raw) + -ctypes.addressof(raw) % 128 + m["map_at"]
    arrays = (
        (ctypes.c_uint64 * 6)(*m["size"]),
        (ctypes.c_uint64 * 6)(*m["stride"]),
        (ctypes.c_uint32 * 6)(*m["box"]),
        (ctypes.c_uint32 * 6)(*m["element_stride"]),
    )
    found = ctypes.c_void_p()
    machine().runtime.cudaGetDriverEntryPointByVersion(b"cuTensorMapEncodeTiled", ctypes.byref(found), 0, 0, None)
    kinds = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4]
    says = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(found.value)(
        at, m["type"], m["rank"], m["base"], *arrays, m["interleave"], m["swizzle"], m["promotion"], m["fill"]
    )
    machine().runtime.cudaGetLastError()  # forgotten, for the ops to come
    return says


@pytest.mark.parametrize(
    "changed",
    [
        {"map_at": 8},
        {"type": 12},
        {"rank": 0},
        {"rank": 6},
        {"base": 520},
        {"base": 0},
        {"size": (64, 0, 2)},
        {"size": (64, 2**32 + 1, 2)},
        {"stride": (136, 2048)},
        {"stride": (128, 2**40)},
        {"box": (64, 0, 1)},
        {"box": (64, 257, 1)},
        {"box": (4, 8, 1)},
        {"box": (128, 8, 1)},
        {"swizzle": 2},
        {"swizzle": 4},
        {"element_stride": (1, 2, 1)},
        {"interleave": 1},
        {"fill": 1},
    ],
    ids=str,
)
def test_the_driver_refuses(changed):
    assert encode() == 0
    assert encode(**changed) == 1


WRONG = {
    "no cluster": (lambda launch: {"cluster": (1, 1, 1)}, "multicast mask 0x3 in a cluster of 1"),
    "a warpgroup more": (lambda launch: {"block": (launch.block[0] + 128, 1, 1)}, "512 threads; at most 384"),
    "less shared memory": (
        lambda launch: {"shared_bytes": launch.shared_bytes - 4096},
        r"shared memory: 8 bytes at offset .*: mbarrier\.init",
    ),
    "no leave for so much": (lambda launch: {"shared_limit": 48 * 1024}, "the kernel may have 49152"),
    "zeros for a map": (
        lambda launch: {"arguments": bytes(128) + launch.arguments[128:]},
        "there is no tensor map at byte 0",
    ),
    "arguments cut": (lambda launch: {"arguments": launch.arguments[:-8]}, "bytes of arguments for"),
}


@pytest.mark.parametrize(("change", "error"), WRONG.values(), ids=WRONG)
def test_a_launch_that_is_wrong_in_one_thing(change, error, monkeypatch):
    case = next(c for c in cases() if c.kernel == "sm90" and c.tile == 0 and c.activation == "none" and not c.splits)
    a, b = (t.cuda() for t in operands(case, torch.float16, 0))
    it = set_chip(90, case.sm_count)
    it.seed, it.error = 0, None
    run(case, a, b)
    assert it.prepared[-1].cluster == (2, 1, 1)
    prepare = it.prepare
    monkeypatch.setattr(it, "prepare", lambda launch: prepare(replace(launch, **change(launch))))
    with pytest.raises(RuntimeError):
        run(case, a, b)
    assert re.search(error, str(it.error)), it.error


def test_threads_that_launch_one_kernel_with_different_shared_memory():
    """The limit that one of them sets must not be too low for the other: odd rows take more of it."""
    set_chip(90, 1).seed = 0
    generator = torch.Generator().manual_seed(0)
    pairs = [(integers(generator, 40, k).half(), integers(generator, k, 72).half()) for k in (72, 71)]
    results: dict[int, list] = {0: [], 1: []}

    def many(number):
        a, b = (t.cuda() for t in pairs[number])
        results[number] += [raw.gemm(a, b).cpu() for _ in range(4)]

    threads = [threading.Thread(target=many, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (a, b), found in zip(pairs, results.values(), strict=True):
        assert len(found) == 4
        assert all(torch.equal(one, (a.float() @ b.float()).half()) for one in found)
