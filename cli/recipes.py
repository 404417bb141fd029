"""The command ``permtriton recipes``: lists the recipes and the steps."""

from permtriton.cli.console import out, print_json, table
from permtriton.methods.steps import STEPS
from permtriton.recipes import RECIPES


def run(*, json: bool) -> None:
    """Prints the recipes and the steps."""
    if json:
        named = {name: {"steps": each.names.split(","), "summary": each.summary} for name, each in RECIPES.items()}
        print_json({"recipes": named, "steps": {step.name: step.summary for step in STEPS}})
        return
    recipes = table("Recipes, for --recipe", "recipe", "its steps", "what for")
    for name, each in RECIPES.items():
        recipes.add_row(name, each.names.replace(",", ", "), each.summary)
    out.print(recipes)
    steps = table("Steps, for --recipe STEP,STEP,...", "step", "what it does")
    for step in STEPS:
        steps.add_row(step.name, step.summary)
    out.print(steps)
