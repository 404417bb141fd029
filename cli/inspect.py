"""``permtriton inspect``."""

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import fx

from permtriton import load, planning
from permtriton.cli import options
from permtriton.cli.console import clear_errors, err, grouped, out, print_json, table
from permtriton.config import CompileConfig, LearnConfig, check_explicit_options
from permtriton.errors import ConfigError, OutputError
from permtriton.passes import drawing
from permtriton.passes.fuse_permutations import DECISIONS
from permtriton.passes.pipeline import PASS_NAMES, PassResult, run_passes, stand_in_passes
from permtriton.plan import Plan, Site
from permtriton.report import at_run_time, space_report
from permtriton.sparsity import NMPattern


def inspect(
    model: options.ModelArgument,
    sparsity: Annotated[str, typer.Option(help="N:M, for what fits into its groups.")] = "2:4",
    layout: Annotated[str, typer.Option(help="portable or fused, as compile takes them.")] = "portable",
    o_proj: Annotated[str, typer.Option(help="With fused: tied or free.")] = "tied",
    block_size: Annotated[int, typer.Option(help="Channels in a block of the permutation.")] = LearnConfig.block_size,
    skip_indivisible: Annotated[
        bool, typer.Option("--skip-indivisible", help="Leave linears dense whose input is no multiple of M.")
    ] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the graph after each compiler pass, with random permutations.")
    ] = False,
    only: Annotated[
        str | None, typer.Option("--pass", help=f"The graph after this pass only: {', '.join(PASS_NAMES)}.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="The graph of this layer only; --dot draws layer 0.")] = None,
    dot: Annotated[
        Path | None, typer.Option(help="Draw a layer's graph after --pass (or the last): .dot, or .svg with Graphviz.")
    ] = None,
    json: options.Json = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show what would be pruned, where each permutation would go and what it costs. Reads only MODEL's config."""
    with clear_errors():
        if only is not None and only not in PASS_NAMES:
            raise ConfigError(f"pass {only!r} is unknown: choose one of {', '.join(PASS_NAMES)}")
        graphs = graph or only is not None or dot is not None
        if layer is not None and not graphs:
            raise ConfigError("--layer has no effect without --graph, --pass or --dot: add one of them")
        if json and graphs:
            raise ConfigError("--json tells of sites, not of graphs: drop it, or --graph, --pass and --dot")
        if dot is not None:
            check_drawing(dot)
        given = {"sparsity": sparsity, "block_size": block_size, "layout": layout, "o_proj": o_proj}
        config = CompileConfig.from_options({**given, "skip_indivisible": skip_indivisible})
        check_explicit_options({"o_proj": o_proj} if o_proj != CompileConfig.o_proj else {}, config)
        source = load.Source(model, trust_remote_code=trust_remote_code)
        empty = load.load_empty_model(source)
        plan, traced = planning.plan_model(empty, config)
        if graphs:
            _graphs(plan, traced, config.sparsity, only, layer, dot)
        elif json:
            print_json(plan_report(plan, block_size))
        else:
            _print(plan, block_size)


def _graphs(
    plan: Plan, traced: fx.GraphModule, pattern: NMPattern, only: str | None, layer: int | None, file: Path | None
) -> None:
    """Runs the compiler with random permutations and prints or draws what each pass makes of the graph."""
    part = "" if layer is None and file is None else layer_name(plan, layer or 0)
    drawn = ""

    def show(result: PassResult) -> None:
        nonlocal drawn
        if only not in (None, result.name):
            return
        if file is not None:
            drawn = drawing.dot(result.graph_module, part)
            return
        changes = ", ".join(f"{name} {count:+d}" for name, count in result.changes.items()) or "no node"
        typer.echo(f"# {result.name}: {changes}")
        if result.name == "fuse_permutations":
            for decision in result.graph_module.meta[DECISIONS]:
                typer.echo(f"# {decision.space}: {decision.where}")
        typer.echo("\n".join(drawing.listing(result.graph_module, part)) + "\n")

    run_passes(traced, stand_in_passes(plan, traced, pattern), observe=show)
    if file is not None:
        write_drawing(drawn, file)
        err.print(f"{file}: {part} after {only or PASS_NAMES[-1]}", highlight=False, markup=False)


def layer_name(plan: Plan, layer: int) -> str:
    """Returns the module name of a layer, from the names of its linears.

    Raises:
        ConfigError: no site is in that layer.
    """
    for site in plan.sites:
        parts = site.linears[0].split(".")
        if site.layer == layer and str(layer) in parts:
            return ".".join(parts[: parts.index(str(layer)) + 1])
    known = sorted({site.layer for site in plan.sites})
    raise ConfigError(f"layer is {layer}: this model's pruned layers are {known[0]} to {known[-1]}")


def check_drawing(file: Path) -> None:
    """Refuses what `write_drawing` cannot write, before any work.

    Raises:
        ConfigError: another kind of file, or no Graphviz for an SVG.
    """
    if file.suffix not in (".dot", ".svg"):
        raise ConfigError(f"--dot {file}: write a file that ends in .dot or .svg")
    if file.suffix == ".svg" and shutil.which("dot") is None:
        raise ConfigError(f"--dot {file}: an SVG needs Graphviz's program dot; install it, or write a .dot file")


def write_drawing(text: str, file: Path) -> None:
    """Writes DOT, or an SVG that Graphviz makes of it.

    Raises:
        OutputError: the file cannot be written, or Graphviz fails.
    """
    try:
        if file.suffix == ".dot":
            file.write_text(text, encoding="utf-8")
        else:
            subprocess.run(["dot", "-Tsvg", "-o", str(file)], input=text.encode(), check=True, capture_output=True)
    except OSError as error:
        raise OutputError(f"--dot {file} cannot be written: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.decode(errors="replace").split())
        raise OutputError(f"--dot {file} cannot be written: Graphviz's program dot says {said!r}") from error


def _print(plan: Plan, block_size: int) -> None:
    sites = table("Sites", "site", "linears", "channels", "blocks", "permutation", "at run time")
    for row, _ in grouped([_row(plan, site, block_size) for site in plan.sites]):
        sites.add_row(*row)
    out.print(sites)
    spaces = table("Permutations", "permutation", "channels", "produced by", "where it goes, or why there is none")
    reports = [space_report(plan, space) for space in plan.spaces]
    rows = [(r["name"], str(r["channels"]), _few(r["producers"]), destination(r)) for r in reports]
    for row, _ in grouped(rows):
        spaces.add_row(*row)
    out.print(spaces)
    if plan.skipped:
        skipped = table("Not pruned", "left dense", "why")
        for row, _ in grouped(list(plan.skipped.items())):
            skipped.add_row(*row)
        out.print(skipped)
    for barrier in plan.barriers:
        out.print(f"barrier: {barrier}", highlight=False, markup=False)


def _row(plan: Plan, site: Site, block_size: int) -> tuple[str, ...]:
    blocks = "-" if site.space.frozen else str(len(site.space.blocks(block_size)))
    order = "its own" if site.space.name == site.name else site.space.name
    return site.name, str(len(site.linears)), str(site.channels), blocks, order, running(at_run_time(site))


def running(cost: dict[str, Any]) -> str:
    """Says what `permtriton.report.at_run_time` found: nothing, in a norm, or a gather with its bytes a token."""
    if cost["runs"] == "gather":
        times = f"{cost['gathers']} gathers" if cost["gathers"] > 1 else "a gather"
        return f"{times}, {cost['bytes_per_token']:,} bytes a token in bfloat16"
    return f"in the norm {cost['norm']}" if cost["runs"] == "in the norm" else "nothing"


def destination(space: dict[str, Any]) -> str:
    """Says where a permutation of `permtriton.report.space_report` goes, or why there is none."""
    if space["frozen"]:
        return f"stays: {space['frozen']}"
    if space["at_run_time"]:
        return running(space["at_run_time"][0])
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
                "at_run_time": at_run_time(site),
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
