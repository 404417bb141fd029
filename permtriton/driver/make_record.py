"""Makes the record of a run: ``permtriton.json`` without entries of the caller and of saving; see docs/formats.md."""

from dataclasses import asdict
from typing import Any

from permtriton.checkpoint.plan_entries import hidden_states_report, permutation_report, rows_report, site_report
from permtriton.checkpoint.read_record import Record
from permtriton.data.samples import Samples
from permtriton.methods.run import Run
from permtriton.model.core import divides_text
from permtriton.model.name import is_hub_name
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.recipe import compile_command
from permtriton.util.machine import determinism, device_name, peak_memory, versions
from permtriton.util.permutation import moved


def compilation_record(run: Run, comparison: str, evaluation: dict[str, Any]) -> Record:
    """Returns the content of ``permtriton.json``, except for the entries that saving adds.

    Args:
        comparison: what `permtriton.driver.pipeline.prove` returned.
        evaluation: measure, with its values for the dense and the compiled model; empty if nothing was measured.
    """
    model, config, plan, indices = run.model, run.config, run.plan, run.indices
    name = model.name_or_path or ""
    weights = {name: weight_in_out(linear_module(model, name)) for _, name in plan.linears()}
    return {
        "model": name,
        "on_hub": is_hub_name(name),
        "command": compile_command(name, config),
        "versions": versions(),
        "device": device_name(run.placement.device),
        "determinism": {"seed": config.seed, **determinism()},
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": config.to_dict(),
        "calibration": _calibration(run),
        "generated": None
        if run.generated_ids is None
        else {"sha256": Samples.of(run.generated_ids).sha256, "shape": list(run.generated_ids.shape)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "pruned_parameters": sum(weight.numel() for weight in weights.values()),
        "sparsity_by_layer": {name: float((weight == 0).float().mean()) for name, weight in weights.items()},
        "permutations": [
            {**permutation_report(plan, space), "moved": moved(indices[space.name])} for space in plan.spaces
        ],
        "skipped": plan.skipped,
        "barriers": plan.barriers,
        "hidden_states": hidden_states_report(plan.hidden_order(indices), run.reference.unproved),
        "steps": [
            {"name": step.name, "samples": len(run.samples_for(step)), **asdict(run.outcomes[step.name])}
            for step in config.steps
        ],
        "retained_importance": run.importance_shares,
        "evaluation": evaluation,
        "proof": {"fold_difference": run.max_output_difference, "lowered_graph": comparison},
        "seconds": {stage: round(value, 3) for stage, value in run.workspace.seconds.items()},
        "memory": {"peak": peak_memory(run.placement.device), "estimate": run.memory.report()},
        **({"expert_tokens": run.expert_tokens} if run.expert_tokens else {}),
        "sites": [
            {**site_report(site), "index": site.expand(indices[site.space.name]).tolist()} for site in plan.sites
        ],
        "rows": rows_report(model, plan, indices),
    }


def _calibration(run: Run) -> dict[str, Any]:
    """Returns the samples' hash and size; if a model divides a text into two halves, the tokens of both count."""
    samples = run.samples
    widths = [tensor.shape[1] for name, tensor in samples.inputs.items() if name.endswith("input_ids")]
    both = samples.is_text and widths and divides_text(run.model)
    width = sum(widths) if both else samples.tokens
    return {
        "sha256": samples.sha256,
        "shape": [len(samples), width],
        "unit": "tokens" if samples.is_text else "positions",
        **({} if samples.special is None else {"special_tokens": samples.special.words}),
    }
