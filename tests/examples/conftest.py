"""Tests that need packages of others are left out where these are absent. With EXAMPLES=all (`make examples`) they run, or fail."""

import importlib.util
import os


def is_absent(package):
    return os.environ.get("EXAMPLES") != "all" and importlib.util.find_spec(package) is None


collect_ignore = ["test_model_families.py"] if any(map(is_absent, ("transformers", "torchvision"))) else []


def pytest_collection_modifyitems(config, items):
    left = [item for item in items if any(is_absent(name) for mark in item.iter_markers("needs") for name in mark.args)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
