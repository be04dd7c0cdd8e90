"""The file: what it holds, that nothing wrong with it passes, and what writing it costs in memory."""

import contextlib
import errno
import itertools
import json
import os
import struct
import zipfile

import pytest
import torch

import amp_kernels as ak
from amp_kernels.checkpoint import _file

from .loop import Loop, assert_same, flat
from .stumbles import Stumbles


def content():
    """One of each kind that a file can hold."""
    base = torch.arange(24.0).view(4, 6)
    return {
        "tensors": [
            base,
            base.t(),
            base[1:, ::2],
            torch.tensor(2.5),
            torch.empty(0, 3),
            torch.ones(3, dtype=torch.uint16),
        ],
        "odd": (
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.tensor([True, False]),
            torch.ones(5).to(torch.float8_e4m3fn),
        ),
        "plain": [None, True, 3, -(2**70), 1.5, float("nan"), "text", b"bytes", torch.bfloat16, torch.Size([2, 3])],
        4: {"nested": {(1, "key"): torch.full((2,), -0.0)}},
    }


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The smallest file: without random states, which are most of one."""
    monkeypatch.setattr("amp_kernels.checkpoint._state._random_state", dict)
    path = tmp_path / "small.pt"
    ak.checkpoint.save(path, extra={"rate": 0.125, "weight": torch.arange(5.0)})
    return path


def test_a_round_trip_keeps_everything(tmp_path):
    ak.checkpoint.save(tmp_path / "c.pt", extra=content())
    expected = dict(flat(content()))
    assert_same(dict(flat(ak.checkpoint.load(tmp_path / "c.pt"))), expected)
    assert_same(dict(flat(torch.load(tmp_path / "c.pt", weights_only=True)["extra"])), expected)
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert archive.testzip() is None


def test_records_larger_than_a_zip_of_32_bits_can_hold(tmp_path, monkeypatch):
    """With the limit moved down to where a test can afford it."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    test_a_round_trip_keeps_everything(tmp_path)
    test_tensors_are_where_mmap_wants_them(tmp_path)


def test_the_versions_of_modules_are_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    ak.checkpoint.save(tmp_path / "c.pt", model=model)
    saved = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    assert saved._metadata == model.state_dict()._metadata


def test_subclasses_are_saved_as_what_they_derive_from(tmp_path):
    numpy = pytest.importorskip("numpy")
    ak.checkpoint.save(tmp_path / "c.pt", extra={"lr": numpy.float64(0.1)})
    loaded = ak.checkpoint.load(tmp_path / "c.pt")
    assert loaded == {"lr": 0.1}
    assert type(loaded["lr"]) is float


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50))
    model[1].weight = model[0].weight
    ak.checkpoint.save(tmp_path / "c.pt", model=model)
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert sum(info.file_size == 50 * 50 * 4 for info in archive.infolist()) == 1


@pytest.mark.parametrize("background", [False, True])
def test_views_of_the_same_memory_that_have_other_values(tmp_path, background):
    """conj() and the imaginary part of it are lazy: same address, shape, strides and dtype, and another sign."""
    z, x = torch.tensor([1 + 2j, 3 - 4j]), torch.arange(3.0)
    extra = {
        "z": z,
        "conj": z.conj(),
        "imag": z.imag,
        "neg": z.conj().imag,
        "x": x,
        "-x": torch._neg_view(x),
        "again": x[:],
    }
    ak.checkpoint.save(tmp_path / "c.pt", extra=extra, background=background)
    loaded = ak.checkpoint.load(tmp_path / "c.pt")
    assert_same(dict(flat(loaded)), dict(flat(extra)))


def test_tensors_are_where_mmap_wants_them(tmp_path):
    ak.checkpoint.save(tmp_path / "c.pt", extra=content())
    for _, value in flat(torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)):
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() % 64 == 0
    first = torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)["extra"]["tensors"][1]
    assert first.data_ptr() % 64 == 0


class Custom:
    pass


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": [0, Custom()]}, r"extra\.a\[1\] has type .*Custom; accepted: tensors, numbers"),
        ({"a": torch.ones(3).to_sparse()}, r"extra\.a is a tensor of layout torch.sparse_coo .*; accepted: dense"),
        ({"a": torch.ones(3, device="meta")}, "on meta; accepted: dense tensors with data"),
        ({Custom(): 1}, "a key of extra has type .*Custom"),
    ],
)
def test_values_that_cannot_be_loaded_are_not_saved(tmp_path, extra, message):
    with pytest.raises(TypeError, match=message):
        ak.checkpoint.save(tmp_path / "c.pt", extra=extra)
    assert not list(tmp_path.iterdir())


def test_objects_without_state_are_not_saved(tmp_path):
    with pytest.raises(TypeError, match="data has type list; accepted: an object with state_dict and load_state_dict"):
        ak.checkpoint.save(tmp_path / "c.pt", data=[1])
    assert not list(tmp_path.iterdir())


def damaged(data, position, bit=0):
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


@pytest.mark.parametrize("phase", [0, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in range(1, 8))])
def test_any_bit_that_flips_is_noticed_or_does_not_matter(small, tmp_path, phase):
    """Bytes whose number is ``phase`` mod 8, and one bit of each, another one each time."""
    data, expected = small.read_bytes(), dict(flat(ak.checkpoint.load(small, rng=False)))
    bad = tmp_path / "folder" / "bad.pt"
    bad.parent.mkdir()
    refused = 0
    for position in range(phase, len(data), 8):
        bad.write_bytes(damaged(data, position, position // 8 % 8))
        try:
            found = ak.checkpoint.load(bad, rng=False)
        except ValueError:
            refused += 1
        else:
            assert_same(dict(flat(found)), expected)
    assert refused > len(data) // 8 / 3  # the rest is padding, dates and the like


def test_any_file_that_is_cut_short_is_refused(small, tmp_path):
    data = small.read_bytes()
    bad = tmp_path / "folder" / "bad.pt"
    bad.parent.mkdir()
    for size in range(0, len(data), 7):
        bad.write_bytes(data[:size])
        with pytest.raises(
            ValueError, match=r"cannot be loaded: it is (empty|not a checkpoint|cut short or damaged|a zip)"
        ):
            ak.checkpoint.load(bad)


def test_the_message_names_the_tensor_and_the_checkpoint_to_go_back_to(tmp_path):
    for step in (1, 2, 3):
        ak.checkpoint.save(tmp_path / f"{step}.pt", model=torch.nn.Linear(30, 30))
    with zipfile.ZipFile(tmp_path / "3.pt") as archive:
        weight = next(info for info in archive.infolist() if info.file_size == 3600)
    data = (tmp_path / "3.pt").read_bytes()
    extra = struct.unpack_from("<H", data, weight.header_offset + 28)[0]
    (tmp_path / "3.pt").write_bytes(damaged(data, weight.header_offset + 30 + len(weight.filename) + extra + 1000))
    reason = r"it is damaged: model\.weight \(Bad CRC-32.*\); the newest intact checkpoint in its folder is .*2\.pt"
    with pytest.raises(ValueError, match=reason):
        ak.checkpoint.load(tmp_path / "3.pt", model=torch.nn.Linear(30, 30))


def rewritten(source, target, record, data, compression):
    """A copy of a checkpoint, with other data in one record."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            wanted = info.filename.endswith(record)
            to, kind = zipfile.ZipInfo(info.filename), compression if wanted else zipfile.ZIP_STORED
            new.writestr(to, data(old.read(info)) if wanted else old.read(info), kind)


@pytest.mark.parametrize(
    ("record", "data", "compression", "reason"),
    [
        ("data.pkl", lambda _: b"", zipfile.ZIP_STORED, r"it is cut short or damaged \(EOFError\)"),
        ("data.pkl", lambda _: b"\x80\x02.", zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("data.pkl", lambda _: b"\x80\x02cos\nsystem\n.", zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("manifest.json", lambda _: b"", zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("manifest.json", lambda _: b"[]", zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("manifest.json", lambda _: b'{"format": "1"}', zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("manifest.json", lambda _: b"[" * 10**5, zipfile.ZIP_STORED, "it is cut short or damaged"),
        ("manifest.json", lambda _: b'{"format": 1, "tensors": {}}', zipfile.ZIP_STORED, "it is damaged: its records are"),
        ("manifest.json", lambda text: text + b" " * 10**6, zipfile.ZIP_DEFLATED, "its manifest.json is compressed"),
        ("manifest.json", lambda text: text + b" " * 2**26, zipfile.ZIP_STORED, "compressed or larger than 67108864 bytes"),
        ("data/0", lambda data: data, zipfile.ZIP_DEFLATED, "it is damaged: its records are not the uncompressed ones"),
    ],
)  # fmt: skip
def test_records_that_no_save_writes(small, tmp_path, caplog, record, data, compression, reason):
    """With checksums that fit. A file that is inflated could take any memory."""
    rewritten(small, tmp_path / "bad.pt", record, data, compression)
    assert ak.checkpoint.latest(tmp_path) == small
    assert "bad.pt is skipped: it is" in caplog.text
    with pytest.raises(ValueError, match=rf"{reason}.*; the newest intact checkpoint in its folder is .*small\.pt"):
        ak.checkpoint.load(tmp_path / "bad.pt")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        PermissionError(errno.EACCES, "Permission denied"),
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
    call = {"latest": lambda: ak.checkpoint.latest(tmp_path), "load": lambda: ak.checkpoint.load(newest, rng=False)}[
        function
    ]
    for reads in itertools.count():
        with Stumbles(monkeypatch, newest, error, reads) as stumbles, contextlib.suppress(type(error)):
            found = call()
            break
    assert found == {"latest": newest, "load": 1}[function]
    assert not stumbles.happened
    assert reads > 5


def test_an_offset_to_before_the_file(small, tmp_path):
    """The seek fails with an error of the system, and the bytes are its cause."""
    data = bytearray(small.read_bytes())
    struct.pack_into("<I", data, data.rindex(b"PK\5\6") + 16, len(data))  # of the list of records
    (tmp_path / "bad.pt").write_bytes(data)
    assert ak.checkpoint.latest(tmp_path) == small


def test_a_file_that_disappears_is_passed_over(small, tmp_path, monkeypatch):
    ak.checkpoint.save(tmp_path / "newest.pt")
    with Stumbles(monkeypatch, tmp_path / "newest.pt", FileNotFoundError(), 2):
        assert ak.checkpoint.latest(tmp_path) == small


def test_a_lack_of_memory_for_the_tensors(small, monkeypatch):
    def fail(*args):
        raise RuntimeError("unable to mmap 100 bytes from file <small.pt>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    with pytest.raises(RuntimeError, match="unable to mmap"):
        ak.checkpoint.load(small, rng=False)


def test_files_that_are_no_checkpoints_are_refused(small, tmp_path):
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(
        ValueError, match=r"it is a zip, but not a checkpoint of amp_kernels; the newest intact .*small\.pt"
    ):
        ak.checkpoint.load(tmp_path / "foreign.pt")
    with pytest.raises(
        ValueError, match=r"it is not a checkpoint; the newest intact checkpoint in its folder is .*small\.pt"
    ):
        ak.checkpoint.load(tmp_path / "text.pt")
    with pytest.raises(FileNotFoundError):
        ak.checkpoint.load(tmp_path / "absent.pt")


def test_a_newer_format_is_refused(small, tmp_path, monkeypatch):
    monkeypatch.setattr(_file, "FORMAT", 2)
    ak.checkpoint.save(tmp_path / "newer.pt")
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"it has format 2, of a newer amp_kernels; accepted: up to 1; .* is .*small\.pt"
    ):
        ak.checkpoint.load(tmp_path / "newer.pt")


def test_code_in_a_file_is_not_run(small, tmp_path, monkeypatch):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    monkeypatch.setattr("amp_kernels.checkpoint._state.plain", lambda value, name: value)
    ak.checkpoint.save(tmp_path / "bad.pt", extra=Payload())
    with pytest.raises(ValueError, match=r"it is cut short or damaged \(Weights only load failed"):
        ak.checkpoint.load(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


def test_the_manifest_says_what_is_there_without_torch(tmp_path):
    ak.checkpoint.save(tmp_path / "c.pt", **Loop().parts)
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        manifest = json.loads(archive.read(archive.namelist()[0]))
    assert manifest["format"] == 1
    assert manifest["sections"] == ["model", "optimizer", "scaler", "scheduler", "data", "random", "extra"]
    assert {"model.0.weight", "random.cpu"} <= set(manifest["tensors"].values())


def _state(kind, elements):
    if kind == "plain":
        return {"extra": [torch.ones(elements) for _ in range(2)]}
    weight = torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
    optimizer = ak.optim.AdamW([weight], master_weights="split", state_dtype=torch.bfloat16)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {"optimizer": optimizer}


@pytest.mark.parametrize("kind", ["plain", "split"])
def test_no_second_copy_in_memory(tmp_path, kind):
    """The peak of a process that saves 160 million bytes or more, in a fork: its own peak is what counts."""
    elements = 20_000_000
    few, many = _state(kind, 1000), _state(kind, elements)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ak.checkpoint.save(
                tmp_path / "few.pt", **few
            )  # pages of libraries count for this process once it has touched them
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # forget the peak so far
            before = _memory("VmRSS")
            ak.checkpoint.save(tmp_path / "c.pt", **many)
            code = 0 if _memory("VmHWM") - before < 48_000 else 2  # KiB
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "c.pt").stat().st_size > 8 * elements


def _memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
