"""The command ``permtriton inspect``: prints a model's plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from permtriton import api
from permtriton.checkpoint.plan_entries import at_run_time, destination, grouped
from permtriton.cli.console import out, print_json, say, show
from permtriton.cli.options import Flags, GgufFile, Json, Model, Revision, Token, TrustRemoteCode, takes
from permtriton.util.bars import BarProgress
from permtriton.util.machine import format_bytes


@takes(("sparsity", "pattern", "layout", "o_proj", "skip_indivisible", "targets", "ignore"))
def inspect(
    model: Model,
    flags: Flags,
    json: Json = False,
    gguf_file: GgufFile = None,
    revision: Revision = None,
    token: Token = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    with BarProgress().stage("inspect", 0):
        location = {"gguf_file": gguf_file, "revision": revision, "token": token}
        report = api.inspect(model, trust_remote_code=trust_remote_code, **location, **flags)
    if json:
        print_json(report)
    else:
        _print(report)
        say(_summary(report))


def _summary(report: Mapping[str, Any]) -> str:
    """Returns a line that says how much would be pruned, and how large the weights are dense and packed."""
    pruned, total = report["pruned_parameters"], report["parameters"]
    dense, packed = (format_bytes(report[name]) for name in ("dense_bytes", "packed_bytes"))
    return f"to be pruned: {pruned:,} of {total:,} parameters ({pruned / total:.1%}); {dense} dense, {packed} packed"


def _print(report: Mapping[str, Any]) -> None:
    permutations = {entry["name"]: entry for entry in report["permutations"]}
    sites = []
    for site in report["sites"]:
        permutation, linears = permutations[site["permutation"]], site["linears"]
        order = "its own" if permutation["name"] == site["name"] else permutation["name"]
        pattern = ", ".join(dict.fromkeys(report["patterns"][name] for name in linears))
        size = str(len(linears)), str(site["channels"])
        sites.append((site["name"], *size, pattern, order, at_run_time(permutation)))
    _show_grouped("Sites", sites, "site", "linears", "channels", "pattern", "permutation", "at run time")
    rows = [(p["name"], str(p["channels"]), _shortened(p["producers"]), destination(p)) for p in permutations.values()]
    _show_grouped("Permutations", rows, "permutation", "units", "produced by", "where it goes, or why there is none")
    if report["skipped"]:
        _show_grouped("Not pruned", list(report["skipped"].items()), "left dense", "why")
    for barrier in report["barriers"]:
        out.print(f"barrier: {barrier}", highlight=False, markup=False)


def _show_grouped(title: str, rows: Sequence[tuple[str, ...]], *columns: str) -> None:
    show(title, (row for row, _ in grouped(rows)), *columns)


def _shortened(names: list[str]) -> str:
    more = [f"and {len(names) - 4} more"] if len(names) > 4 else []
    return "\n".join(names[:4] + more)
