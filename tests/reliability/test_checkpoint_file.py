"""The file: what it holds, that nothing wrong with it passes, and what writing it costs in memory."""

import contextlib
import errno
import io
import itertools
import os
import struct
import zipfile

import pytest
import torch

import amp_kernels as ak

from .loop import VARIANTS, Loop, assert_same, flat
from .stumbles import Stumbles


def content():
    """One of each kind that a file can hold; views of the same memory have other values (lazily conjugated or negated)."""
    base, z, x = torch.arange(24.0).view(4, 6), torch.tensor([1 + 2j, 3 - 4j]), torch.arange(3.0)
    return {
        "tensors": [base, base.t(), base[1:, ::2], torch.tensor(2.5), torch.empty(0, 3), torch.ones(3, dtype=torch.uint16)],
        "odd": (torch.tensor([True, False]), torch.ones(5).to(torch.float8_e4m3fn), torch.ones(3, requires_grad=True)),
        "views": [z, z.conj(), z.imag, z.conj().imag, x, torch._neg_view(x), x[:]],
        "plain": [None, True, 3, -(2**70), 1.5, float("nan"), "text", b"bytes", torch.bfloat16, torch.Size([2, 3])],
        4: {"nested": {(1, "key"): torch.full((2,), -0.0)}},
    }  # fmt: skip


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The smallest file: without random states, which are most of one."""
    monkeypatch.setattr("amp_kernels._dispatch.generators.states", dict)
    path = tmp_path / "small.pt"
    ak.checkpoint.save(path, extra={"rate": 0.125, "weight": torch.arange(5.0)})
    return path


def format_1(path, **content):
    """A file as versions before the first release wrote it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with zipfile.ZipFile(buffer) as new, zipfile.ZipFile(path, "w") as old:
        old.writestr("amp_kernels-checkpoint/manifest.json", '{"format": 1, "sections": [], "tensors": {}}')
        for record in new.infolist():
            name = record.filename.removeprefix("archive/")
            if not name.startswith("."):
                old.writestr(f"amp_kernels-checkpoint/{name}", new.read(record))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("crc", [True, False])
def test_a_round_trip_keeps_everything(tmp_path, background, crc):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    try:
        ak.checkpoint.save(tmp_path / "c.pt", extra=content(), background=background)
        ak.checkpoint.wait()
    finally:
        torch.serialization.set_crc32_options(before)
    expected, mapped = dict(flat(content())), torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)
    assert_same(dict(flat(ak.checkpoint.load(tmp_path / "c.pt"))), expected)
    assert_same(dict(flat(mapped["extra"])), expected)
    assert all(value.data_ptr() % 64 == 0 for _, value in flat(mapped) if isinstance(value, torch.Tensor))
    assert mapped["amp_kernels"] == 2


@pytest.mark.parametrize("variant", VARIANTS[:4])
def test_files_of_format_1_are_read(tmp_path, variant):
    loop, other = Loop(*variant), Loop(*variant, seed=1)
    for _ in range(3):
        loop.step()
    ak.checkpoint.save(tmp_path / "new.pt", **loop.parts, extra=loop.losses)
    expected, saved = loop.state(), torch.load(tmp_path / "new.pt", weights_only=True)
    del saved["amp_kernels"]
    saved["random"]["python"] = [
        list(entry) if isinstance(entry, tuple) else entry for entry in saved["random"]["python"]
    ]
    format_1(tmp_path / "old.pt", **saved)
    os.remove(tmp_path / "new.pt")
    other.losses = ak.checkpoint.load(ak.checkpoint.latest(tmp_path), **other.parts)
    assert_same(other.state(), expected)
    ak.checkpoint.save(tmp_path / "1.pt", **loop.parts, keep=1, pattern="*.pt")  # counts the old one
    assert os.listdir(tmp_path) == ["1.pt"]


def test_models(tmp_path):
    """Versions of modules are kept, tied weights stored once and tied; numbers of NumPy become Python's."""
    numpy = pytest.importorskip("numpy")
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50), torch.nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    ak.checkpoint.save(tmp_path / "c.pt", model=model, extra=numpy.float64(0.1))
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert type(loaded["extra"]) is float
    assert loaded["model"]._metadata == model.state_dict()._metadata
    assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["1.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert sum(info.file_size == 50 * 50 * 4 for info in archive.infolist()) == 1


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"extra": {"a": [0, Custom()]}}, r"extra\.a\[1\] has type .*Custom; accepted: dense tensors"),
        ({"extra": {"a": torch.ones(3).to_sparse()}}, r"extra\.a \(of layout torch.sparse_coo on cpu\) has type torch.Tensor"),
        ({"extra": {"a": torch.ones(3, device="meta")}}, r"extra\.a \(of layout torch.strided on meta\) has type"),
        ({"extra": {Custom(): 1}}, "a key of extra has type .*Custom"),
        ({"data": [1]}, "data has type list; accepted: an object with state_dict and load_state_dict"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_loaded_are_not_saved(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        ak.checkpoint.save(tmp_path / "c.pt", **state)
    assert not list(tmp_path.iterdir())


def damaged(data, position, bit=0):
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def places(path):
    """The record, header and content of each record, and its first byte and length."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            yield info, info.header_offset + 30 + name + extra


@pytest.mark.parametrize("old", [False, True])
def test_a_flipped_bit_in_each_record_and_a_cut_at_each_boundary(small, tmp_path, old):
    if old:
        format_1(small, random={}, extra=torch.arange(5.0))
    data, bad = small.read_bytes(), tmp_path / "folder" / "bad.pt"
    bad.parent.mkdir()
    records = list(places(small))
    assert len([info for info, _ in records if info.file_size]) >= 5
    for info, begin in records:
        cuts = [
            data[:size] for size in (info.header_offset, begin, begin + info.file_size // 2, begin + info.file_size)
        ]
        bits = [damaged(data, begin + i, i % 8) for i in {0, info.file_size // 2, info.file_size - 1} if info.file_size]
        for changed in cuts + bits:
            bad.write_bytes(changed)
            assert ak.checkpoint.latest(bad.parent) is None
            with pytest.raises(
                ValueError, match=r"cannot be loaded: it is (empty|not a checkpoint|cut short or damaged)"
            ):
                ak.checkpoint.load(bad)


@pytest.mark.parametrize("phase", [0, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in range(1, 16))])
def test_any_bit_that_flips_is_noticed_or_does_not_matter(small, tmp_path, phase):
    """Bytes whose number is ``phase`` mod 16, and one bit of each, another one each time."""
    data, expected = small.read_bytes(), dict(flat(ak.checkpoint.load(small, rng=False)))
    bad = tmp_path / "folder" / "bad.pt"
    bad.parent.mkdir()
    for position in range(phase, len(data), 16):
        bad.write_bytes(damaged(data, position, position // 16 % 8))
        with contextlib.suppress(ValueError):
            assert_same(dict(flat(ak.checkpoint.load(bad, rng=False))), expected)
        bad.write_bytes(data[:position])
        with pytest.raises(ValueError, match=r"cannot be loaded: it is (empty|not a checkpoint|cut short or damaged)"):
            ak.checkpoint.load(bad)


def replaced(source, target, record="", data=b"", compression=zipfile.ZIP_STORED):
    """A copy of a checkpoint, with other data in one record and checksums that fit."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            wanted = info.filename.endswith(record)
            to, kind = zipfile.ZipInfo(info.filename), compression if wanted else zipfile.ZIP_STORED
            new.writestr(to, data if wanted and data is not None else old.read(info), kind)


RUNS_CODE = b"\x80\x02}q\x00(X\x0b\x00\x00\x00amp_kernelsq\x01cos\nmkdir\nX\x03\x00\x00\x00ran\x85Ru."
NEWER = b"\x80\x02}q\x00(X\x0b\x00\x00\x00amp_kernelsq\x01K\x03u."
WRONG = [
    (lambda bad, small: replaced(small, bad, "data.pkl", b"\x80\x02}q\x00(X\x0b\x00\x00\x00amp_kernelsq\x01"), "cut short or damaged"),
    (lambda bad, small: replaced(small, bad, "data.pkl", RUNS_CODE), r"cut short or damaged \(Weights only load failed"),
    (lambda bad, small: replaced(small, bad, "data.pkl", NEWER), "it has format 3, of a newer amp_kernels"),
    (lambda bad, small: replaced(small, bad, "data/0", None, zipfile.ZIP_DEFLATED), "data/0 does not fit its checksum or is compressed"),
    (lambda bad, _: bad.write_text("text"), "it is not a checkpoint"),
    (lambda bad, _: bad.write_text(""), "it is empty"),
    (lambda bad, _: torch.save({"model": {}}, bad), "it is not a checkpoint of amp_kernels"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), WRONG)
def test_what_no_save_writes(small, tmp_path, monkeypatch, make, reason):
    monkeypatch.chdir(tmp_path)
    replaced(small, tmp_path / "same.pt", "none of them")
    make(tmp_path / "bad.pt", small)
    os.utime(tmp_path / "bad.pt", (2**32, 2**32))
    assert ak.checkpoint.latest(tmp_path) == tmp_path / "same.pt"
    with pytest.raises(ValueError, match=rf"{reason}.*; the newest intact checkpoint in its folder: .*same\.pt"):
        ak.checkpoint.load(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        MemoryError(),
        torch.OutOfMemoryError("CPU out of memory"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("function", ["latest", "load"])
def test_a_file_that_cannot_be_read_is_not_damaged(small, tmp_path, monkeypatch, function, error):
    """Whichever of its reads fails. An older file in its place would be training that is lost."""
    newest = tmp_path / "newest.pt"
    ak.checkpoint.save(newest, extra=1)
    calls = {"latest": lambda: ak.checkpoint.latest(tmp_path), "load": lambda: ak.checkpoint.load(newest, rng=False)}
    for reads in itertools.count():
        with Stumbles(monkeypatch, newest, error, reads) as stumbles, contextlib.suppress(type(error)):
            found = calls[function]()
            break
    assert found == {"latest": newest, "load": 1}[function]
    assert not stumbles.happened
    assert reads > 5


def test_offsets_before_the_file_and_files_that_disappear(small, tmp_path, monkeypatch):
    """The seek to an offset before the file fails with an error of the system, and the bytes are its cause."""
    data = bytearray(small.read_bytes())
    struct.pack_into("<Q", data, data.rindex(b"PK\6\6") + 48, 2 * len(data))  # of the list of records
    (tmp_path / "bad.pt").write_bytes(data)
    ak.checkpoint.save(tmp_path / "newest.pt")
    with Stumbles(monkeypatch, tmp_path / "newest.pt", FileNotFoundError(), 2):
        assert ak.checkpoint.latest(tmp_path) == small
    with pytest.raises(FileNotFoundError):
        ak.checkpoint.load(tmp_path / "absent.pt")

    def fail(*_):
        raise RuntimeError("unable to mmap 100 bytes from file <small.pt>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    for call in (ak.checkpoint.load, lambda path: ak.checkpoint.latest(path.parent)):
        with pytest.raises(RuntimeError, match="unable to mmap"):
            call(small)


def _state(kind, elements):
    if kind == "plain":
        return {"extra": [torch.ones(elements) for _ in range(8)]}
    weights = [torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16)) for _ in range(8)]
    optimizer = ak.optim.AdamW(weights, master_weights="split", state_dtype=torch.bfloat16)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {"optimizer": optimizer}


@pytest.mark.parametrize("kind", ["plain", "split"])
def test_memory_grows_by_one_parameter(tmp_path, kind):
    """Of eight of 16 MB, in a fork: its own peak is what counts."""
    elements = 4_000_000
    few, many = _state(kind, 200_000), _state(kind, elements)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ak.checkpoint.save(tmp_path / "few.pt", **few)  # touches pages of libraries, which count for this process
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # forget the peak so far
            before = _memory("VmRSS")
            ak.checkpoint.save(tmp_path / "c.pt", **many)
            code = 0 if _memory("VmHWM") - before < 4 * elements / 1024 + 20_000 else 2  # KiB
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "c.pt").stat().st_size > 8 * 4 * elements


def _memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
