"""The command ``permtriton recipes``: lists the recipes and the steps."""

from permtriton import recipe
from permtriton.cli.console import print_json, show
from permtriton.cli.options import Json


def recipes(json: Json = False) -> None:
    known = recipe.recipes()
    if json:
        print_json(known)
        return
    rows = ((name, ", ".join(entry["steps"]), entry["summary"]) for name, entry in known["recipes"].items())
    show("Recipes, for --recipe", rows, "recipe", "its steps", "what for")
    show("Steps, for --recipe STEP,STEP,...", known["steps"].items(), "step", "what it does")
