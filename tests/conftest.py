"""Which tests run. Their fixtures are in `fixtures.py`."""

import importlib
import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before the client of the hub reads it; a test that needs the hub stands in for it


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run what is marked slow, too (`make slow`)")
    parser.addoption("--quick", action="store_true", help="leave it out of files that are named, too (`make numeric`)")
    parser.addoption("--soak", action="store_true", help="and try many more random cases (`make soak`)")


def pytest_configure(config):
    """Registers the fixtures, which take seconds to import, where they are used: not where tests are handed out."""
    hands_out = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out and os.environ.get("TRITON_INTERPRET") != "1":
        config.pluginmanager.register(importlib.import_module(".fixtures", __package__), "permtriton-fixtures")


def pytest_collection_modifyitems(config, items):
    """Leaves out what is marked slow, or of its cases those that the mark says; nothing with --slow.

    A file or a test that is named in the command runs whole, unless --quick is given.
    """
    _check_named_cases(items, whole=not any("::" in argument for argument in config.args))
    if config.getoption("--slow") or config.getoption("--soak"):
        return
    files = [] if config.getoption("--quick") else config.args
    named = {Path(config.invocation_params.dir, argument.split("::")[0]) for argument in files}
    left_out = [item for item in items if _is_slow(item) and item.path not in named]
    kept = set(items) - set(left_out)
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)


def _check_named_cases(items, *, whole: bool) -> None:
    """Refuses a mark that names a case which is not there: another one would silently be left out, or run."""
    there: dict = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            for names in mark.kwargs.values():
                there.setdefault(item.nodeid.partition("[")[0], (set(names), set()))[1].add(item.callspec.id)
    for test, (names, found) in there.items():
        if whole and names - found:
            raise pytest.UsageError(f"{test}: the mark slow names {sorted(names - found)}, none of its cases")


def _is_slow(item) -> bool:
    """Whether any of its marks says so: that of the test, or that of the case."""
    return any(_says_slow(mark.kwargs, item) for mark in item.iter_markers("slow"))


def _says_slow(names: dict, item) -> bool:
    if "only" in names:
        return item.callspec.id in names["only"]
    return not names or item.callspec.id not in names["but"]
