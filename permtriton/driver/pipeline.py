"""The pipeline: prepare -> the steps of the recipe -> prove -> record."""

from typing import Any

from transformers import PreTrainedModel

from permtriton.checkpoint.quantizer import attach
from permtriton.driver.forecast import Forecast, make_forecast
from permtriton.driver.identity import identify
from permtriton.driver.make_record import compilation_record
from permtriton.driver.memory import Devices
from permtriton.driver.planning import Planned
from permtriton.driver.prepare import Given, check_way, placed, planned, prepare, with_needs
from permtriton.driver.result import CompiledModel
from permtriton.driver.traced import check_graph, traced_sample, why_not_compared
from permtriton.evaluation.measures import HeldOutMeasure
from permtriton.methods.measure.importance import magnitudes
from permtriton.methods.run import Run
from permtriton.methods.step import Outcome, Stage
from permtriton.model.checks import check_pruned
from permtriton.model.experts import unstacked_experts
from permtriton.model.shared import shared_linears
from permtriton.passes.pipeline import pruning_passes
from permtriton.running import ranks
from permtriton.util.machine import as_torch_starts


def compile_given(model: PreTrainedModel, given: Given) -> CompiledModel:
    """Permutes the channels of ``model`` and prunes it to N:M, in place.

    Args:
        model: dense model on the device to work on; it is set to eval mode.

    Returns:
        The compiled model, which holds ``model`` itself.

    Raises:
        PermTritonError: bad input, too little memory or disk, or a failed check. The model may then be partly changed.
    """
    with unstacked_experts(model.eval()), shared_linears(model):
        run, held_out = prepare(model, given)
        run_steps(run)
        comparison, evaluation = prove(run), measured(run, held_out)
        if run.config.layout == "fused":  # so that save_pretrained also writes the gathers and the permuted norms
            attach(model, str(run.config.sparsity))
        report = compilation_record(run, comparison, evaluation, given.origin)
    return CompiledModel(
        model,
        given.tokenizer,
        run.config,
        run.plan,
        report,
        run.reference.samples,
        run.indices,
        run.workspace.states,
        device=run.placement.device,
    )


@as_torch_starts()
def compile_model(model: PreTrainedModel, *arguments: Any, **named: Any) -> CompiledModel:
    """Does the same with the arguments of `Given` as its own."""
    return compile_given(model, Given(*arguments, **named))


def forecast_model(model: PreTrainedModel, given: Given, devices: Devices | None) -> tuple[Planned, Forecast]:
    """Returns what `compile_given` would start from and what it would need; the model stays as it is.

    Too little memory is no error here, but gives no time.

    Args:
        devices: what the estimate is made for; None means ``given.device``, to which the model moves if it fits there.

    Raises:
        PermTritonError: as `compile_given`.
    """
    workspace = given.workspace()
    with unstacked_experts(model.eval()), shared_linears(model):
        start = planned(model, given, workspace)
        if devices is None:
            start, needs, _, devices = placed(start, workspace, given.device or model.device, given.ways)
        else:
            ranks.check_shares(len(start.samples), devices.count)
            start, needs = with_needs(start, devices, workspace.progress)
            check_way(needs.way, start, devices)
        identify(workspace, model, start.config, start.samples, model.device)
        return start, make_forecast(start, needs, given.resume_path, devices, timed=True, save_format=given.save_format)


def run_steps(run: Run) -> None:
    """Runs the steps of the recipe, one after another.

    Raises:
        PermTritonError: a step fails, or a check of its result does.
    """
    steps = run.config.steps
    for number, step in enumerate(steps):
        with run.workspace.timed(step.name):
            if step.stage is Stage.PRUNE:
                run.keep_dense(steps[number:])
            run.outcomes[step.name] = step.run(run) or Outcome()
            if not any(later.dense_weights for later in steps[number + 1 :]):
                run.dense_weights.clear()


def prove(run: Run) -> str:
    """Checks that the pruned model is N:M and gives the outputs of the lowered graph.

    Returns:
        ``"same outputs"`` if the outputs were compared, else why they were not.

    Raises:
        VerificationError: a check failed.
    """
    model = run.model
    with run.workspace.timed("prove"):
        check_pruned(model, run.plan)
        # The model is N:M: masks by magnitude keep all of it.
        run.run_passes(pruning_passes(run.plan, magnitudes(model, run.plan)))
        if reason := why_not_compared(run.graph, model):
            return reason
        sample = traced_sample(run.graph, model, run.reference.samples)
        check_graph(run.graph, model, sample, "after pruning")
    return "same outputs"


def measured(run: Run, held_out: HeldOutMeasure | None) -> dict[str, Any]:
    """Returns the held-out measure of the dense and the compiled model; empty without held-out samples."""
    if held_out is None:
        return {}
    with run.workspace.timed("evaluate"), run.running() as model:
        compiled = held_out.compiled(model, run.plan.hidden_order(run.indices))
    samples = held_out.samples
    return {
        "measure": held_out.name,
        "dense": held_out.dense,
        "compiled": compiled,
        "windows": [len(samples), samples.tokens],
        **({} if samples.special is None else {"special_tokens": samples.special.words}),
    }
