"""What a command takes, the function of the same name takes by the same name."""

from inspect import signature

import pytest
import typer

import permtriton
from permtriton.cli.main import app

ONLY_IN_SHELL = {"json", "help", "help_all", "dry_run", "devices", "help-all"}
RENAMED = {"folders": "folders", "calibration": "data"}
COMMANDS = ("compile", "compare", "evaluate", "export", "inspect", "report")


@pytest.mark.parametrize("name", COMMANDS)
def test_functions_take_what_commands_take(name):
    command = typer.main.get_command(app).commands[name]
    known = signature(getattr(permtriton, name)).parameters
    options = {"options"} <= set(known)  # any option of a compilation, which docs/options.md lists
    every = set(permtriton.config_from().to_dict()) | {
        option for option in __import__("permtriton.recipe", fromlist=["all_options"]).all_options()
    }
    taken = {parameter.name for parameter in command.params} - ONLY_IN_SHELL
    missing = {each for each in taken if each not in known and not (options and each in every)}
    assert missing <= {"graph", "only", "layer", "dot", "overwrite"} if name == "inspect" else missing == set()
