"""What a command takes, the function of the same name takes by the same name."""

import pickle
from inspect import signature

import pytest
import typer

import permtriton
from permtriton.cli.main import app
from permtriton.recipe import all_options

SHELL = {"json", "help_all", "dry_run", "devices"}  # of `dry_run` there is a function
# Files that the shell alone writes: from Python, the result is returned.
WRITTEN = {"inspect": {"graph", "only", "layer"}, "evaluate": {"output", "overwrite"}}


@pytest.mark.parametrize("name", ["compile", "compare", "evaluate", "export", "inspect", "report"])
def test_functions_take_what_commands_take(name):
    known = signature(getattr(permtriton, name)).parameters
    options = set(all_options()) if "options" in known else set()
    taken = {parameter.name for parameter in typer.main.get_command(app).commands[name].params}
    assert taken - set(known) - options - SHELL == WRITTEN.get(name, set())


def test_an_argument_that_there_is_not_is_named():
    with pytest.raises(TypeError, match=r"evaluate\(\) .*windo"):
        permtriton.evaluate("my-model", "my-heldout.txt", windo=3)
    with pytest.raises(permtriton.PermTritonError, match=r"unknown option outputt.*output"):
        permtriton.compare("my-model", outputt="table.csv")


@pytest.mark.parametrize("name", ["compile", "dry_run", "evaluate", "compare"])
def test_functions_made_of_what_may_be_asked_are_as_others(name):
    function = getattr(permtriton, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__name__ == name
