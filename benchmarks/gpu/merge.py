"""Makes one file of the result files of several calls. Imports no torch and needs no GPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import CALLS, ROWS

MERGED = {False: "gpu.json", True: "rehearsal.json"}  # rehearsal -> name
PER_PART = ("call", "command", "started", "minutes", "commit", "hardware", "ceilings", "row_seconds", "gpu_state",
            "finished")  # fmt: skip


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the newest result of each row of the plan.

    A row is taken whole from the newest part that has a result of it, or, if none has, its reason from the newest part
    that left it out. Parts from another GPU or with other versions than the newest part are not used.

    Args:
        parts: contents of result files, at least one.
    """
    ordered = sorted(parts, key=lambda part: part["started"])
    newest = ordered[-1]
    alike = [part for part in ordered if _machine(part) == _machine(newest)]
    results: dict[str, dict[str, Any]] = {}
    reasons: dict[str, dict[str, Any]] = {}
    for part in alike:
        reasons |= dict.fromkeys(_groups(part, "left_out"), part)
        results |= dict.fromkeys(_groups(part, "rows") | _groups(part, "reports"), part)
    chosen = reasons | results
    order = {name: number for number, name in enumerate(ROWS)}
    groups = sorted(chosen, key=lambda group: order.get(group, len(order)))
    used = [part for part in alike if any(part is chosen[group] for group in groups)] or [newest]
    return {
        "rehearsal": newest["rehearsal"],
        "hardware": newest["hardware"],
        "versions": newest["versions"],
        "warnings": newest["warnings"],
        "parts": [{name: part[name] for name in PER_PART} for part in used],
        "missing": [call.name for call in CALLS if not any(row.name in chosen for row in call.rows)],
        "not_used": [f"{part['call']} of {part['started']}: another GPU or other versions"
                     for part in ordered if part not in alike],
        **{kind: [entry for group in groups for entry in chosen[group][kind] if entry["group"] == group]
           for kind in ("reports", "rows", "left_out")},
    }  # fmt: skip


def merge_folder(folder: Path, rehearsal: bool) -> Path | None:
    """Merges the result files of a folder into one; returns its path, or None where there is none to merge."""
    pattern = "rehearsal-*.json" if rehearsal else "gpu-*.json"
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]
    if not parts:
        return None
    target = folder / MERGED[rehearsal]
    target.write_text(json.dumps(merge(parts), indent=1), encoding="utf-8")
    return target


def _machine(part: dict[str, Any]) -> tuple[Any, ...]:
    return part["hardware"]["device"], part["versions"]


def _groups(part: dict[str, Any], kind: str) -> set[str]:
    return {entry["group"] for entry in part[kind]}
