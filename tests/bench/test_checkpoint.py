import os

import pytest
import torch

from bench import checkpoint


def test_round_trip(tmp_path):
    content = {"a": torch.arange(5.0), "b": [1, 2.5, None, "x"], "c": {"d": True}}
    checkpoint.save(tmp_path / "new" / "c.pt", content)
    loaded = checkpoint.load(tmp_path / "new" / "c.pt")
    assert torch.equal(loaded.pop("a"), content.pop("a"))
    assert loaded == {"format": checkpoint.FORMAT, **content}


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"value": 1})

    def crash(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, {"value": 2})
    monkeypatch.undo()
    assert checkpoint.load(path)["value"] == 1
    assert os.listdir(tmp_path) == ["c.pt"]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (order.append(name), real(*args)))
    checkpoint.save(tmp_path / "c.pt", {})
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"format": checkpoint.FORMAT, "payload": Payload()}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="no readable checkpoint"):
        checkpoint.load(tmp_path / "c.pt")
    assert not (tmp_path / "ran").exists()


def test_absent_damaged_and_foreign_files_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        checkpoint.load(tmp_path / "none.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match="no readable checkpoint"):
        checkpoint.load(tmp_path / "damaged.pt")
    torch.save({"format": checkpoint.FORMAT + 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no checkpoint of this version"):
        checkpoint.load(tmp_path / "other.pt")
