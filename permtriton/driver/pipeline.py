"""The pipeline: prepare -> the steps of the recipe -> prove -> record."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from permtriton.checkpoint.quantizer import attach
from permtriton.data.calibration import calibration_samples
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs
from permtriton.driver.check_graph import check_graph
from permtriton.driver.make_record import compilation_record
from permtriton.driver.prepare import CompileInputs, prepare
from permtriton.driver.result import CompiledModel
from permtriton.evaluation.measures import HeldOutMeasure
from permtriton.methods.measure.importance import magnitudes
from permtriton.methods.measure.statistics import site_statistics
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.run import Run
from permtriton.methods.step import Outcome, Stage
from permtriton.methods.steps import all_steps
from permtriton.model.experts import unstacked_experts
from permtriton.model.prunable import check_original
from permtriton.model.shared import shared_linears
from permtriton.passes.pipeline import pruning_passes
from permtriton.passes.plan import check_pruned
from permtriton.recipe import config_from
from permtriton.running.resume import Workspace
from permtriton.util.machine import as_torch_starts
from permtriton.util.progress import NoProgress, Progress


def compile_loaded(inputs: CompileInputs) -> CompiledModel:
    """Permutes the channels of a dense model and prunes it to N:M, in place, on the device that ``inputs`` names."""
    model = inputs.model
    with unstacked_experts(model.eval()), shared_linears(model):
        run = prepare(inputs)
        held_out = measure_dense(run)
        steps = all_steps(run.config)
        for number, step in enumerate(steps):
            with run.workspace.timed(step.name):
                if step.stage is Stage.PRUNE:
                    run.keep_dense(steps[number:])
                run.outcomes[step.name] = step.run(run) or Outcome()
                if not any(later.dense_weights for later in steps[number + 1 :]):
                    run.dense_weights.clear()
        comparison, evaluation = prove(run), measured(run, held_out)
        if inputs.text:
            evaluation["text"] = inputs.text
        if run.config.layout == "fused":  # so that save_pretrained also writes the gathers and the permuted norms
            attach(model, str(run.config.sparsity))
        report = compilation_record(run, comparison, evaluation) | inputs.record
    samples, device = run.reference.samples, run.placement.device
    states = [path for paths in run.workspace.states.values() for path in paths]
    return CompiledModel(
        model, inputs.tokenizer, run.config, run.plan, report, samples, run.indices, states, device=device
    )


@as_torch_starts()
def compile_model(
    model: PreTrainedModel,
    tokenizer: Processor | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Inputs | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
    **inputs: Any,
) -> CompiledModel:
    """Calls `compile_loaded` on ``ids`` or, if they are None, on samples that the config names.

    ``inputs`` are further `CompileInputs`; ``resume_path`` is as in `permtriton.running.resume.Workspace`.
    """
    config = config or config_from()
    check_original(model)
    if ids is None:
        ids, config = calibration_samples(config, tokenizer, model)
    workspace = Workspace(progress or NoProgress(), resume_path)
    return compile_loaded(CompileInputs(model, config, ids, tokenizer, workspace=workspace, **inputs))


def measure_dense(run: Run) -> HeldOutMeasure | None:
    """Returns the dense model's held-out measure; also stores the statistics that the importance reads in the run.

    Without held-out samples the result is None, and without an importance there are no statistics.
    """
    config, held_out = run.config, None
    if run.held_out is not None:
        with run.workspace.timed("evaluate"), run.placed_model() as model:
            held_out = HeldOutMeasure(model, run.held_out, run.progress)
    if config.uses_importance and not config.dense_share:  # choosing dense linears measures statistics itself
        with run.workspace.timed("calibrate"):
            run.calibrate(lambda walk: site_statistics(walk, config.importance, run.progress))
    return held_out


def prove(run: Run) -> str:
    """Checks that the pruned model is N:M and gives the outputs of the lowered graph.

    Returns:
        ``"same outputs"`` if the outputs were compared, else why they were not.
    """
    model = run.model
    with run.workspace.timed("prove"):
        check_pruned(model, run.plan)
        # The pruned model is N:M, so masks by magnitude drop only zeros.
        run.run_passes(pruning_passes(run.plan, magnitudes(model, run.plan)))
        return check_graph(run.graph, model, run.reference.samples, "after pruning") or "same outputs"


def measured(run: Run, held_out: HeldOutMeasure | None) -> dict[str, Any]:
    """Returns the held-out measure of the dense and the compiled model; empty without held-out samples."""
    if held_out is None:
        return {}
    with run.workspace.timed("evaluate"), run.placed_model() as model:
        compiled = held_out.compiled(model, run.plan.hidden_order(run.indices))
    samples = held_out.samples
    return {
        "measure": held_out.name,
        "dense": held_out.dense,
        "compiled": compiled,
        "windows": [len(samples), samples.tokens],
        **({} if samples.special is None else {"special_tokens": samples.special.words}),
    }
