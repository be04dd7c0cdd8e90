"""`pytest` without a path runs all tests, and says how far it is."""

import re
from fnmatch import fnmatch
from pathlib import Path

from ..progress import Progress

ROOT = Path(__file__).parents[2]


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """As pytest does by default with those called "build" or "dist"."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert {"tests", "build"} <= names
    passed_over = pytestconfig.getini("norecursedirs")
    assert not [name for name in names if any(fnmatch(name, pattern) for pattern in passed_over)]
    assert pytestconfig.getini("testpaths") == ["tests"]


def test_progress_names_the_case_that_has_taken_longest():
    progress = Progress(10)
    assert re.fullmatch(r"\[0 s\] 0 of \? cases", progress.line())
    progress.pytest_xdist_node_collection_finished(ids=["a", "b", "c"])
    for case in "abc":
        progress.pytest_runtest_logstart(case)
    progress.pytest_runtest_logfinish("a")
    assert re.fullmatch(r"\[\d+ s\] 1 of 3 cases; for \d+ s: b", progress.line())
