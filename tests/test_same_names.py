"""What a command takes, the function of the same name takes by the same name."""

from dataclasses import fields
from inspect import signature

import pytest

import permtriton
from permtriton.arguments import CompareArgs, CompileArgs, EvaluateArgs
from permtriton.cli.main import command_named
from permtriton.recipe import all_options

SHELL = {"json", "help_all", "dry_run", "devices"}  # of `dry_run` there is a function
# Files that the shell alone writes: from Python, the result is returned.
WRITTEN = {"evaluate": {"output", "overwrite"}}


@pytest.mark.parametrize("name", ["compile", "compare", "evaluate", "export", "inspect", "report"])
def test_functions_take_what_commands_take(name):
    known = signature(getattr(permtriton, name)).parameters
    options = set(all_options()) if "options" in known else set()
    taken = {parameter.name for parameter in command_named(name).params}
    assert taken - set(known) - options - SHELL == WRITTEN.get(name, set())


def test_an_argument_that_there_is_not_is_named():
    with pytest.raises(TypeError, match=r"evaluate\(\) .*windo"):
        permtriton.evaluate("my-model", "my-heldout.txt", windo=3)
    with pytest.raises(permtriton.PermTritonError, match=r"unknown option 'outputt'.*output"):
        permtriton.compare("my-model", outputt="table.csv")


@pytest.mark.parametrize(
    ("name", "args"),
    [("compile", CompileArgs), ("compare", CompareArgs), ("evaluate", EvaluateArgs)],
)
def test_arguments_and_their_defaults_are_those_of_the_dataclass(name, args):
    defaults = {each.name: each.default for each in signature(getattr(permtriton, name)).parameters.values()}
    assert {n: d for n, d in defaults.items() if n not in ("model", "options")} == {
        each.name: each.default for each in fields(args)
    }
