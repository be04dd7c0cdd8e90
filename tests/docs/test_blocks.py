"""The Python blocks of the pages run, top to bottom, as one program a page.

A block is left out by a line ``<!-- not run: reason -->`` before it. A block of ``>>>`` lines is compared with what it prints.
"""

import ast
import doctest
import functools
import io
import re
import textwrap
from pathlib import Path

import pytest
import torch

import amp_kernels as ak

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?P<fence> *```)(?:python|pycon|py)\b.*\n(?P<code>(?:.*\n)*?)(?P=fence)$", re.M)
_NOT_RUN = re.compile(r"<!-- not run: \S.*-->\s*\Z")


def blocks(text: str) -> list[tuple[int, str]]:
    """Number of the first line and code of each block that is to run."""
    found = []
    for match in _BLOCK.finditer(text):
        before = text[: match.start()]
        if not _NOT_RUN.search(before):
            found.append((before.count("\n") + 2, textwrap.dedent(match["code"])))
    return found


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page.read_text())]
)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page.read_text()):
        if code.startswith(">>>"):
            report = io.StringIO()
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line - 1)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
            runner.run(test, out=report.write, clear_globs=False)
            assert runner.failures == 0, report.getvalue()
            namespace = test.globs
        else:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)  # a traceback shows the page's line


DIFFS = [
    pytest.param(textwrap.dedent(code), id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("code", DIFFS)
def test_both_sides_of_a_diff_are_python_and_ours_has_names_that_exist(code):
    lines = code.splitlines()
    assert all(line[:2] in ("", "- ", "+ ", "  ") for line in lines)
    before, after = ("\n".join(line[2:] for line in lines if line[:1] != sign) for sign in "+-")
    ast.parse(before)
    ast.parse(after)
    names = re.findall(r"\bak\.([\w.]+)", after)
    assert names
    for name in names:
        functools.reduce(getattr, name.split("."), ak)


def test_fenced_python_counts_as_a_block():
    text = (
        "```python\na = 1\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n"
        "<!-- not run: -->\n```python\nc = 3\n```\n"
        "```bash\npip install .\n```\n"
        "- a list\n\n    ```python title='x'\n    if a:\n        d = 4\n    ```\n"
        "```pycon\n>>> a\n1\n```\n"
    )
    assert blocks(text) == [(2, "a = 1\n"), (10, "c = 3\n"), (18, "if a:\n    d = 4\n"), (22, ">>> a\n1\n")]
