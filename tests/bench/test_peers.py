"""The comparison with other libraries: who is wrong or absent is not timed, and the page says so."""

import json
from pathlib import Path

import torch

from bench import peers_page
from bench.harness.memory import held_bytes
from bench.ops import peers

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def test_a_peer_without_kernels_for_the_device_is_not_timed_and_not_imported(monkeypatch):
    monkeypatch.setattr(peers, "why_absent", lambda name: None)
    reasons = {name: peers.skipped(name, CPU) for name in peers.PEERS}
    assert {name for name, why in reasons.items() if why is None} == {"bitsandbytes", "torchao", "optimi", "dion"}
    assert peers.skipped("liger", torch.device("cuda")) is None
    assert all("install" in peer.install or "PYTHONPATH" in peer.install for peer in peers.PEERS.values())


def test_log_probs_of_fp32_logits_have_a_gradient(monkeypatch):
    """On a CPU torch has no product with another dtype's result."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight, target = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True), torch.arange(6)
    want = (x @ weight.t()).log_softmax(1)[target, target]
    got = peers.torch_log_probs(x, weight, target)
    upstream = torch.linspace(-1, 2, 6)
    grads = (torch.autograd.grad(of, (x, weight), upstream) for of in (got, want))
    torch.testing.assert_close((got, *next(grads)), (want, *next(grads)))


def test_quantized_state_counts_as_what_it_holds():
    class Quantized(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    assert held_bytes([Quantized(torch.zeros(64, dtype=torch.uint8), torch.zeros(2))]) == 64 + 8


def rows(folder):
    told = {"device": "Some CPU", "threads": 1, "versions": {"torch": "2.11.0"}, "commit": "abc", "load": 1.5}
    told |= {"date": "2026-01-02T03", "skipped": {"apex": "not installed"}, "shape": "tiny", "dtype": "fp32"}
    told |= {"op": "step", "params": 100, "state_bytes": 1200, "pipeline": "all", "error": 1e-7}
    timed = [
        {**told, "provider": name, "status": "ok", "p50_us": us, "speedup": 10 / us, "version": "1.2"}
        for name, us in (("torch", 10.0), ("amp_kernels", 2.5), ("optimi", 5.0))
    ]
    wrong = {**told, "provider": "torchao:fp8", "status": "wrong", "reason": "params[0]: relative error 1"}
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*timed, wrong]))
    training = {"model": "gpt2-124m", "layers": 1, "batch": 1, "dtype": "bf16", "provider": "optimi"}
    (folder / "gpt2.jsonl").write_text(json.dumps({**training, "ms": 20.0, "speedup": 1.1, "error": 1e-4}) + "\n")


def test_the_page_shows_who_was_timed_who_was_not_and_where(tmp_path):
    rows(tmp_path / "peers")
    page = tmp_path / "peers.md"
    page.write_text("# Title\n<!-- benchmarks: begin -->\n<!-- benchmarks: end -->\n")
    assert peers_page.main([str(tmp_path / "peers"), "--page", str(page)]) == 0
    text = page.read_text()
    for line in (
        "Some CPU, 1 thread; torch 2.11.0; commit abc, 2026-01-02. Load average 1.5 to 1.5",
        "![Optimizer steps of every library](peers/peers.png)",
        "| tiny, fp32 | amp_kernels 1.2 | all | 0.0025 | 4.00 | 12 | 1e-07 |",
        "| tiny, fp32 | optimi 1.2 | all | 0.005 | 2.00 | 12 | 1e-07 |",
        "| gpt2-124m, batch 1, 1 layers | bf16 | optimi | 20.0 | 1.10 |  | 1e-04 |",
        f"| apex | not installed | `{peers.PEERS['apex'].install}` |",
        "| torchao:fp8 | step tiny, fp32: params[0]: relative error 1 |  |",
    ):
        assert line in text
    assert (tmp_path / "peers" / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert peers_page.main([str(tmp_path / "absent")]) == 2


def test_the_readme_has_the_times_of_the_record():
    rows = map(json.loads, (ROOT / "bench/results/amd-epyc/peers/gpt2.jsonl").read_text().splitlines())
    seconds = {row["provider"]: f"{row['ms'] / 1e3:.2f} s" for row in rows}
    text = " ".join((ROOT / "README.md").read_text().split())
    ours, theirs, compiled = (seconds[name] for name in ("amp_kernels", "torch", "torch.compile"))
    assert f"takes {ours}, torch {theirs}, torch.compile {compiled}." in text
