"""`pytest` without a path runs all tests."""

from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """As pytest does by default with those called "build" or "dist"."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert {"tests", "build"} <= names
    passed_over = pytestconfig.getini("norecursedirs")
    assert not [name for name in names if any(fnmatch(name, pattern) for pattern in passed_over)]
    assert pytestconfig.getini("testpaths") == ["tests"]
