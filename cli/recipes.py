"""The command ``permtriton recipes``: lists the recipes and the steps."""

from permtriton import recipe
from permtriton.cli.console import out, print_json, table


def run(*, json: bool) -> None:
    """Prints the recipes and the steps."""
    known = recipe.recipes()
    if json:
        print_json(known)
        return
    recipes = table("Recipes, for --recipe", "recipe", "its steps", "what for")
    for name, each in known["recipes"].items():
        recipes.add_row(name, ", ".join(each["steps"]), each["summary"])
    out.print(recipes)
    steps = table("Steps, for --recipe STEP,STEP,...", "step", "what it does")
    for name, summary in known["steps"].items():
        steps.add_row(name, summary)
    out.print(steps)
