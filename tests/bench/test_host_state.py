"""The rows of state in host memory run on a CPU with small sizes, and tell a kind with other bits."""

import json

from bench import host_state

SMALL = [
    "--device",
    "cpu",
    "--layers",
    "3",
    "--width",
    "64",
    "--tokens",
    "4,8",
    "--rounds",
    "1",
    "--bucket",
    "8192",
    "--sleep",
    "0.0001",
]


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(host_state._host, "BUCKET_BYTES", host_state._host.BUCKET_BYTES)  # put back
    assert host_state.main([*SMALL, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "host_state.json").read_text())
    assert [(row["tokens"], row["kind"]) for row in record["rows"]] == [
        (t, kind) for t in (4, 8) for kind in host_state.KINDS
    ]
    assert record["pipeline"]["ratio"] >= 1
    rows = record["rows"]
    rows[3]["digest"][0] += 1
    assert host_state.differing(rows, host_state.torch.device("cpu")) == [
        "host state at 4 tokens",
        "host state, released at 4 tokens",
    ]
