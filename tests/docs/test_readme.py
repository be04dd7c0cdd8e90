"""The README tells the truth: its features exist, its hardware is what the dispatcher takes, its numbers are in the record."""

import functools
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import amp_kernels as ak
from amp_kernels._dispatch.policy import Built, choose
from bench import report, summary

from ..helpers.processes import python

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
H200 = ROOT / "bench" / "results" / "nvidia-h200"
NONE = "\u2013"


def table(after):
    """The rows of the first table behind the heading ``after``, as lists of cells."""
    lines = TEXT[TEXT.index(f"## {after}\n") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:stop]]


def features():
    """Head and rows of both tables of features."""
    text = TEXT[TEXT.index("## Compared") : TEXT.index("## Read on")]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield head, rows


FEATURES = list(features())


def test_the_prose_has_at_most_900_words():
    prose = re.sub(r"```.*?```|<!--.*?-->|^[|\[][^\n]*$", "", TEXT, flags=re.S | re.M)
    words = re.sub(r"\]\([^)]*\)", "]", prose).split()
    assert 600 < len(words) <= 900


def test_links_lead_somewhere_and_pictures_exist():
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if not target.startswith("https://"):
            assert (ROOT / target.partition("#")[0]).exists(), target
    for head, rows in FEATURES:
        for name in re.findall(r"\[(.+?)\]", " ".join(head)):
            assert re.search(rf"^\[{re.escape(name)}\]: https://", TEXT, re.M), name
        assert all(len(row) == len(head) for row in rows)


#: What the rows of a feature are called in the record of the H200: ops, or kinds of training step.
TIMED = {
    "GEMM with bias, activation and their gradients": ("linear", "mlp"), "norms that also add the residual": ("amp_kernels fused norms",),
    "rotary embedding of queries and keys, with their norms": ("rotary",), "grouped products for experts": ("grouped_mm",),
    "head and loss without all logits": ("linear_cross_entropy", "amp_kernels"),
    "log-probabilities and entropies of tokens from FP32 logits": ("linear_log_probs",), "16-bit logits, FP32 loss": ("cross_entropy",),
    "converts a model in place": ("amp_kernels",), "fused Adam, AdamW": ("step", "adamw_"),
    "fused SGD, Lion, LAMB, Muon": ("sgd_", "lion_", "lamb_", "muon_step"), "clipping inside the update": ("step",),
    "split master weights": ("bf16 + split master",), "8-bit moments": ("bf16 + split24, 8-bit moments",), "loss scaler": ("step",),
}  # fmt: skip


def test_features_were_timed_on_a_gpu_where_the_table_says_so():
    rows, training = report.published(H200)
    found = {row[key] for row in rows if row["provider"] == "amp_kernels" for key in ("op", "dtype")}
    found |= {row["provider"] for row in training}
    for name, _, cell, *_ in (row for _, rows in FEATURES for row in rows):
        names = TIMED.get(name)
        assert cell == (("timed" if found & set(names) else "not timed") if names else NONE), name


def test_what_others_have_stands_in_the_dated_file():
    """It names what was found in which version; a cell without an entry was not looked up."""
    facts = json.loads((ROOT / "tests/docs/packages.json").read_text())
    assert facts["date"] in TEXT[TEXT.index("## Compared") :]
    known = set()
    for head, rows in FEATURES:
        for column in range(3, len(head)):
            package = head[column].partition("[")[2].partition("]")[0]
            known.add(package)
            for row in rows:
                assert (row[column] == NONE) == (row[0] not in facts["packages"][package]), (package, row[0])
    assert known == set(facts["packages"])


@pytest.mark.parametrize("cell", [row[1] for _, rows in FEATURES for row in rows])
def test_our_features_exist(cell):
    if cell == NONE:
        return
    names = re.findall(r"`ak\.([\w.]+)(?:\((.*?)\))?`", cell)
    assert names
    for path, argument in names:
        thing = functools.reduce(getattr, path.split("."), ak)
        keyword, given, _ = argument.partition("=")
        if given:
            known = {*inspect.signature(thing).parameters, *ak.optim.MixedPrecision.__annotations__}
            assert keyword in known, f"{path} has no argument {keyword}"


def test_fp8_is_absent_as_the_table_says():
    row = next(row for row in FEATURES[0][1] if row[0] == "FP8")
    assert row[1] == NONE
    eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError):
        ak.matmul(eight, eight)


#: The rows of the hardware table: capabilities, or a device, and the backend of products and of other ops.
HARDWARE = {
    "Hopper (9.0)": [("cuda", (9, 0))],
    "Ampere, Ada, Blackwell RTX (8.x, 12.x)": [
        ("cuda", (major, minor)) for major, minor in ((8, 0), (8, 6), (8, 9), (12, 0))
    ],
    "Blackwell data centre (10.x)": [("cuda", (10, 0)), ("cuda", (10, 3))],
    "Turing (7.5)": [("cuda", (7, 5))],
    "x86-64 CPU": [("cpu", None)],
    "anything else": [("xpu", None), ("mps", None)],
}
BACKENDS = {"aten": "torch's", "cuda": "CUDA", "cpu": "CPU", "reference": "torch"}


def test_the_hardware_table_is_what_the_dispatcher_does():
    archs = re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1]
    built = Built(cpu=True, cuda=True, cuda_archs=tuple(re.split("[; ]", archs)), triton=True)
    rows = {row[0]: row for row in table("Install")[2:]}
    assert rows.keys() == HARDWARE.keys()
    for name, machines in HARDWARE.items():
        for device, capability in machines:
            product = choose("gemm", device, capability, replace(built, tensor_cores=True, aten=device == "cuda"))
            other = choose("layer_norm", device, capability, built)
            assert rows[name][1].startswith(BACKENDS[product.backend]), (name, capability)
            assert rows[name][2] == BACKENDS[other.backend], (name, capability)


def test_the_figures_are_those_of_the_record():
    begin, end = report.FIGURES
    assert TEXT.split(begin)[1].split(end)[0].strip() == summary.figures(*report.published(H200)), (
        "python -m bench.report bench/results/nvidia-h200 --readme README.md"
    )
    _, training = report.published(H200)
    ms = {row["provider"]: f"{row['ms']:.1f}" for row in training}
    said = TEXT[TEXT.index("**torch.compile already works") :].partition("\n- ")[0].replace("\n", " ")
    for provider in ("torch.compile", "amp_kernels compile", "amp_kernels fused norms"):
        assert re.search(rf"\b{re.escape(ms[provider])}\b", said), provider


def test_the_cases_in_which_torch_is_faster_are_those_of_the_record():
    rows = [json.loads(line) for line in (H200 / "rows.jsonl").read_text().splitlines()]
    ours = [row for row in rows if row["provider"] == "amp_kernels" and "speedup" in row]
    norm = min(row["speedup"] for row in ours if row["op"] == "layer_norm" and row["shape"].startswith("2048x32768"))
    assert f"torch is faster (ratio {norm:.2f})" in TEXT
    aligned = min(row["speedup"] for row in ours if "aligned" in row.get("families", ()))
    assert f"{aligned:.2f} in the worst case" in TEXT


@pytest.mark.parametrize("repository", ["", "https://example.org/amp_kernels"])
def test_an_index_gets_absolute_links_or_none(repository):
    shown = python("setup.py", "--quiet", "--long-description", AMP_KERNELS_REPOSITORY=repository).stdout
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert all(target.startswith("https://") for target in targets)
    assert f"{repository}/blob/main/docs/gpu.md" in targets or not repository
    assert f"{repository}/raw/main/bench/results/nvidia-h200/training.png" in targets or not repository
    assert "[All results]" in shown or not repository
    assert "All results, including missed goals" in shown or repository


def test_versions_and_formats_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project
    assert "Python 3.10 or newer" in TEXT
    needed = Requirement(re.search(r'^dependencies = \["(.+?)"\]', project, re.MULTILINE)[1]).specifier
    assert needed.contains("2.10.0a0+a36e1d39eb.nv26.1", prereleases=True)  # an NGC container's
    assert not needed.contains("2.9.1", prereleases=True)
    assert "from 2.10 on" in TEXT
