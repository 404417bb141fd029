"""``permtriton inspect``."""

from typing import Annotated, Any

import typer

from permtriton import compiler, load
from permtriton.cli import options
from permtriton.cli.console import clear_errors, out, print_json, table
from permtriton.config import CompileConfig, LearnConfig
from permtriton.plan import Plan
from permtriton.report import space_report
from permtriton.sparsity import NMPattern


def inspect(
    model: options.ModelArgument,
    sparsity: Annotated[str, typer.Option(help="N:M, for what fits into its groups.")] = "2:4",
    block_size: Annotated[int, typer.Option(help="Channels in a block of the permutation.")] = LearnConfig.block_size,
    skip_indivisible: Annotated[
        bool, typer.Option("--skip-indivisible", help="Leave linears dense whose input is no multiple of M.")
    ] = False,
    json: options.Json = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what would be pruned and where each permutation would go. Reads only MODEL's config, no weights."""
    with clear_errors():
        source = load.Source(model, trust_remote_code=trust_remote_code)
        empty = load.load_empty_model(source)
        pattern = NMPattern.parse(sparsity)
        CompileConfig.from_options({"sparsity": sparsity, "block_size": block_size})
        plan = compiler.find_plan(empty, pattern, skip_indivisible=skip_indivisible)
        if json:
            print_json(plan_report(plan, block_size))
            return
        sites = table("Sites", "site", "linears", "channels", "blocks", "permutation")
        for site in plan.sites:
            blocks = "-" if site.space.frozen else str(len(site.space.blocks(block_size)))
            sites.add_row(site.name, str(len(site.linears)), str(site.channels), blocks, site.space.name)
        out.print(sites)
        spaces = table("Permutations", "permutation", "channels", "produced by", "fold, or why not")
        for space in plan.spaces:
            report = space_report(plan, space)
            spaces.add_row(report["name"], str(report["channels"]), _few(report["producers"]), destination(report))
        out.print(spaces)
        if plan.skipped:
            skipped = table("Not pruned", "left dense", "why")
            for name, reason in plan.skipped.items():
                skipped.add_row(name, reason)
            out.print(skipped)
        for barrier in plan.barriers:
            out.print(f"barrier: {barrier}", highlight=False, markup=False)


def destination(space: dict[str, Any]) -> str:
    """Says where a permutation of `permtriton.report.space_report` goes, or why there is none."""
    if space["frozen"]:
        return f"stays: {space['frozen']}"
    text = f"folded into {len(space['producers'])} producers, {len(space['readers'])} readers"
    if space["segments"] > 1:
        text += f"; within {space['segments']} heads"
    if space["tied"] > 1:
        text += f"; tied across {space['tied']} query heads"
    return text


def plan_report(plan: Plan, block_size: int) -> dict[str, Any]:
    """Returns the plan as JSON types."""
    return {
        "sites": [
            {
                "name": site.name,
                "linears": list(site.linears),
                "channels": site.channels,
                "permutation": site.space.name,
                "blocks": 0 if site.space.frozen else len(site.space.blocks(block_size)),
            }
            for site in plan.sites
        ],
        "permutations": [space_report(plan, space) for space in plan.spaces],
        "skipped": plan.skipped,
        "barriers": plan.barriers,
    }


def _few(names: list[str], limit: int = 4) -> str:
    shown = "\n".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}\nand {len(names) - limit} more"
