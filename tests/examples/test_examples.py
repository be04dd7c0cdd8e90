"""Every example runs as a reader would run it, in a process and an empty folder of its own, and what it trains gets better."""

import ast
import os
import re
from pathlib import Path

import pytest

from ..helpers.processes import python

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {
    "gpt2": "transformers",
    "gpt2_finetune": "transformers",
    "llama_fsdp": "transformers",
    "resnet_cifar": "torchvision",
    "lightning_module": "lightning",
    "accelerate_loop": "accelerate",
    "rl_trl": "trl",
    "lora_peft": "peft bitsandbytes",
}
EXPECTED = re.compile(r"Expected on a CPU: (?:loss|distance) (\d+\.\d+) -> (\d+\.\d+),\s+in \d+ seconds")
LAST_LINE = re.compile(r"(?:loss|distance) (\d+\.\d+) -> (\d+\.\d+)")

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
each_that_runs_here = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.needs(*NEEDS[path.stem].split()) if path.stem in NEEDS else ())
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)


def check_learning(path, folder, **environment):
    """Run the file: its last line tells that the loss fell by a quarter or more, what it checks holds, no file stays behind."""
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    run = python(path, cwd=folder, **environment)
    last = LAST_LINE.fullmatch(run.stdout.splitlines()[-1])
    assert last, run.stdout
    before, after = map(float, last.groups())
    assert after < 0.75 * before, run.stdout
    if said := EXPECTED.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))):
        expected = map(float, said.groups())
        if environment.get("CUDA_VISIBLE_DEVICES") == "":  # a GPU runs larger models
            assert all(
                abs(found - told) <= 0.25 * before for found, told in zip((before, after), expected, strict=True)
            ), run.stdout
    assert "False" not in run.stdout
    assert not list(folder.iterdir())


@pytest.mark.own_backend
@each_that_runs_here
def test_on_the_cpu(path, tmp_path):
    check_learning(path, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.own_backend
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem not in NEEDS], ids=lambda path: path.stem)
def test_on_cuda(path, tmp_path):
    check_learning(path, tmp_path)


@each_example
def test_is_short_and_says_how_to_run_it(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert f"\npython examples/{path.name}" in ast.get_docstring(ast.parse(source))


def test_the_examples_that_people_start_from_say_what_to_expect():
    said = {path.stem for path in EXAMPLES if EXPECTED.search(path.read_text(encoding="utf-8"))}
    assert said >= {"gpt2_finetune", "resnet_cifar", "llama_fsdp", "rl_policy", "muon"}


@each_example
def test_uses_the_public_api_alone(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.module.startswith("amp_kernels")
        elif isinstance(node, ast.Import):
            names = [(name.name, name.asname) for name in node.names if name.name.startswith("amp_kernels")]
            assert names in ([], [("amp_kernels", "ak")])
        elif isinstance(node, ast.Attribute):
            assert not re.match("_[^_]", node.attr)


def test_the_index_lists_every_example_once():
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]
