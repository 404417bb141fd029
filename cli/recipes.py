"""The command ``permtriton recipes``: lists the recipes and the steps."""

from permtriton import recipe
from permtriton.cli.console import print_json, show


def run(*, json: bool) -> None:
    """Prints the recipes and the steps."""
    known = recipe.recipes()
    if json:
        print_json(known)
        return
    rows = ((name, ", ".join(each["steps"]), each["summary"]) for name, each in known["recipes"].items())
    show("Recipes, for --recipe", rows, "recipe", "its steps", "what for")
    show("Steps, for --recipe STEP,STEP,...", known["steps"].items(), "step", "what it does")
