"""The command ``permtriton inspect``: prints a model's plan, or its graph after each compiler pass."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from permtriton.checkpoint.plan_entries import at_run_time, destination, grouped, permutation_report, plan_report
from permtriton.cli.console import echo, out, print_json, show
from permtriton.driver import planning
from permtriton.driver.options import CompileConfig
from permtriton.errors import ConfigError, OutputError
from permtriton.model import load
from permtriton.model.name import layer_number
from permtriton.model.source import Source
from permtriton.passes import drawing
from permtriton.passes.pipeline import PASS_NAMES, PassResult, run_with_stand_ins
from permtriton.passes.plan import Plan
from permtriton.util.bars import err
from permtriton.util.output_files import check_file, write_file


def run(
    source: Source,
    config: CompileConfig,
    graph: bool,
    only: str | None,
    layer: int | None,
    dot: Path | None,
    *,
    overwrite: bool,
    json: bool,
) -> None:
    """Prints the plan of a model, or its graph after each compiler pass.

    Raises:
        PermTritonError: as `permtriton.driver.planning.plan_model`, options that exclude each other, or a drawing that
            cannot be written.
    """
    if only is not None and only not in PASS_NAMES:
        raise ConfigError(f"pass {only!r} is unknown: choose one of {', '.join(PASS_NAMES)}")
    graphs = graph or only is not None or dot is not None
    if layer is not None and not graphs:
        raise ConfigError("--layer has no effect without --graph, --pass or --dot: add one of them")
    if json and graphs:
        raise ConfigError("--json prints sites, not graphs: drop it, or --graph, --pass and --dot")
    if dot is not None:
        check_drawing(dot, source.name, overwrite=overwrite)
    empty = load.load_empty_model(source)
    plan, traced = planning.plan_model(empty, config)
    if graphs:
        _graphs(plan, traced, only, layer, dot)
    elif json:
        print_json(plan_report(plan))
    else:
        _print(plan)


def _graphs(plan: Plan, traced: fx.GraphModule, only: str | None, layer: int | None, file: Path | None) -> None:
    """Runs the compiler passes with random permutations, and prints or draws the graph after each pass."""
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
        echo(f"# {result.name}: {changes}")
        if result.name == "fuse_permutations":
            for space in plan.spaces:
                echo(f"# {space.name}: {destination(permutation_report(plan, space))}")
        echo("\n".join(drawing.listing(result.graph_module, part)) + "\n")

    run_with_stand_ins(plan, traced, show)
    if file is not None:
        write_drawing(drawn, file)
        err.print(f"{file}: {part} after {only or PASS_NAMES[-1]}", highlight=False, markup=False)


def layer_name(plan: Plan, layer: int) -> str:
    """Returns the module name of a layer, such as ``model.layers.3``.

    Raises:
        ConfigError: the layer holds no site.
    """
    for site in plan.sites:
        if site.layer == layer >= 0:
            return next(path for path in site.layer_paths if layer_number(path) == layer)
    known = sorted({site.layer for site in plan.sites})
    raise ConfigError(f"layer is {layer}: this model's pruned layers are {known[0]} to {known[-1]}")


def check_drawing(file: Path, model: str, *, overwrite: bool) -> None:
    """Refuses, before any work, a file that `write_drawing` cannot write.

    Raises:
        ConfigError: another suffix than .dot and .svg, or an SVG without Graphviz.
        OutputError: as `permtriton.util.output_files.check_file`.
    """
    if file.suffix not in (".dot", ".svg"):
        raise ConfigError(f"--dot {file}: write a file that ends in .dot or .svg")
    if file.suffix == ".svg" and shutil.which("dot") is None:
        raise ConfigError(f"--dot {file}: an SVG needs the program dot of Graphviz; install it, or write a .dot file")
    check_file(file, overwrite=overwrite, ours=_is_drawing, reads=[model])


def _is_drawing(file: Path) -> bool:
    with file.open("rb") as opened:
        start = opened.read(1000)
    return start.startswith(b"digraph permtriton {") or b"<!-- Title: permtriton " in start  # as Graphviz has it


def write_drawing(text: str, file: Path) -> None:
    """Writes a drawing as DOT, or as an SVG that Graphviz makes of it.

    Args:
        file: file that ends in .dot or .svg.

    Raises:
        OutputError: the file cannot be written, or Graphviz fails.
    """
    drawing = text.encode()
    try:
        if file.suffix == ".svg":
            drawing = subprocess.run(["dot", "-Tsvg"], input=drawing, check=True, capture_output=True).stdout
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.decode(errors="replace").split())
        raise OutputError(f"--dot {file} cannot be written: the program dot of Graphviz says {said!r}") from error
    write_file(file, drawing)


def _print(plan: Plan) -> None:
    report = plan_report(plan)
    permutations = {entry["name"]: entry for entry in report["permutations"]}
    sites = [_site_row(site, report["patterns"], permutations) for site in report["sites"]]
    _show_grouped("Sites", sites, "site", "linears", "channels", "pattern", "permutation", "at run time")
    rows = [(p["name"], str(p["channels"]), _shortened(p["producers"]), destination(p)) for p in permutations.values()]
    _show_grouped("Permutations", rows, "permutation", "units", "produced by", "where it goes, or why there is none")
    if plan.skipped:
        _show_grouped("Not pruned", list(plan.skipped.items()), "left dense", "why")
    for barrier in plan.barriers:
        out.print(f"barrier: {barrier}", highlight=False, markup=False)


def _show_grouped(title: str, rows: Sequence[tuple[str, ...]], *columns: str) -> None:
    show(title, (row for row, _ in grouped(rows)), *columns)


def _site_row(
    site: dict[str, Any], patterns: Mapping[str, str], permutations: Mapping[str, dict[str, Any]]
) -> tuple[str, ...]:
    permutation, linears = permutations[site["permutation"]], site["linears"]
    order = "its own" if permutation["name"] == site["name"] else permutation["name"]
    pattern = ", ".join(dict.fromkeys(patterns[name] for name in linears))
    return site["name"], str(len(linears)), str(site["channels"]), pattern, order, at_run_time(permutation)


def _shortened(names: list[str], limit: int = 4) -> str:
    shown = "\n".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}\nand {len(names) - limit} more"
