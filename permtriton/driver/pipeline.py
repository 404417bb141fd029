"""The pipeline: prepare -> the steps of the recipe -> prove -> record."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from permtriton.checkpoint.quantizer import attach
from permtriton.checkpoint.record import Evaluation
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs
from permtriton.driver.forecast import Forecast, make_forecast
from permtriton.driver.identity import identify
from permtriton.driver.make_record import Origin, compilation_record
from permtriton.driver.memory import Devices
from permtriton.driver.options import CompileConfig
from permtriton.driver.prepare import check_offload, held_out_samples, needs_elsewhere, placed, planned, prepare
from permtriton.driver.result import CompiledModel
from permtriton.driver.run import Run
from permtriton.driver.step import Outcome, Stage
from permtriton.driver.workspace import Workspace
from permtriton.errors import ConfigError, VerificationError
from permtriton.methods.measure.importance import magnitudes
from permtriton.model.checks import check_pruned, check_same_outputs, model_outputs
from permtriton.model.experts import unstacked_experts
from permtriton.model.shared import shared_linears
from permtriton.passes.pipeline import pruning_passes, run_passes
from permtriton.passes.plan import Plan
from permtriton.passes.verify_graph import count_operators
from permtriton.passes.verify_graph import run as run_graph
from permtriton.recipe import check_recipe, config_from
from permtriton.running.offload import OffloadFolder, working
from permtriton.running.placement import Way
from permtriton.running.store import MEMORY
from permtriton.util.progress import NoProgress, Progress


def compile_model(  # noqa: PLR0913
    model: PreTrainedModel,
    tokenizer: Processor | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Inputs | None = None,
    evaluation_windows: Inputs | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
    say_needs: bool = False,
    device: torch.device | None = None,
    ways: tuple[Way, ...] = tuple(Way),
    offload: OffloadFolder | None = None,
    save_format: str | None = None,
    origin: Origin | None = None,
) -> CompiledModel:
    """Permutes the channels of ``model`` and prunes it to N:M, in place.

    Args:
        model: dense model on the device to work on; it is set to eval mode.
        tokenizer: tokenizer of the calibration text, not needed if the text is already token ids; or the processor of
            images or sound. It is saved with the model.
        config: every option; None means the default recipe.
        ids: calibration samples in place of the config's: token ids, int64 ``[samples, tokens]``, or a mapping of the
            arguments of the model's ``forward`` to tensors with one row per sample, such as ``{"pixel_values": ...}``.
        evaluation_windows: held-out samples to evaluate dense and compiled models on: token ids, int64
            ``[windows, tokens]``, or a mapping as for ``ids``.
        resume_path: path of the files that keep the state of long stages, each with its stage's name before the suffix
            (``state.learned.safetensors``); a later call with equal inputs continues from them, and one with others is
            refused until they are deleted.
        say_needs: whether to measure the model first and report how much memory, time and disk the work will take.
        device: device that the model, which is on the CPU, shall run on; None where it is.
        ways: how the model may be placed on ``device``; of several, its memory decides.
        offload: folder whose disk takes the place of memory, for a model on the CPU that does not fit there; its
            parameters stay in files of that folder as long as they are used.
        save_format: format in which it will be saved, for the estimate of the disk; None for dense.
        origin: what the record shall say beside what is known here; None for nothing more.

    Returns:
        The compiled model, which holds ``model`` itself.

    Raises:
        PermTritonError: bad input, too little memory or disk, or a failed check. The model may then be partly changed.
    """
    config, workspace = _checked(config, offload), Workspace(progress or NoProgress(), resume_path, offload or MEMORY)
    with working(offload, model.eval(), device), unstacked_experts(model), shared_linears(model):
        run = prepare(
            model,
            tokenizer,
            config,
            workspace,
            ids=ids,
            windows=evaluation_windows,
            say_needs=say_needs,
            device=device,
            ways=ways,
            save_format=save_format,
        )
        run_steps(run)
        comparison, evaluation = prove(run), measured(run)
        if run.config.layout == "fused":  # so that save_pretrained also writes the gathers and the permuted norms
            attach(model, str(run.config.sparsity))
        report = compilation_record(run, comparison, evaluation, origin)
    return CompiledModel(
        model, tokenizer, run.config, run.plan, report, run.reference.samples, offload, run.indices, workspace.states
    )


def forecast_model(  # noqa: PLR0913
    model: PreTrainedModel,
    tokenizer: Processor | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Inputs | None = None,
    evaluation_windows: Inputs | None = None,
    resume_path: Path | None = None,
    device: torch.device | None = None,
    devices: Devices | None = None,
    ways: tuple[Way, ...] = tuple(Way),
    offload: OffloadFolder | None = None,
    save_format: str | None = None,
) -> tuple[Plan, Forecast]:
    """Returns what `compile` would do to a model and what it would need; the model stays as it is.

    Arguments and errors are those of `compile_model`, and ``devices``, for which the estimate is made; None means
    ``device``, to which the model moves if it fits there. Too little memory is no error here, but gives no time.
    """
    config, workspace = _checked(config, offload), Workspace(NoProgress(), resume_path, offload or MEMORY)
    where = device if devices is None else torch.device(devices.kind)
    with working(offload, model.eval(), where), unstacked_experts(model), shared_linears(model):
        held_out = held_out_samples(model, evaluation_windows)
        start = planned(model, tokenizer, config, workspace, ids)
        if devices is None:
            start, needs, _, devices = placed(start, held_out, workspace, device or model.device, ways)
        else:
            start, needs = needs_elsewhere(start, held_out, devices, workspace.progress)
        identify(workspace, model, start.config, start.samples, model.device)
        forecast = make_forecast(start, needs, held_out, resume_path, devices, timed=True, save_format=save_format)
        return start.plan, forecast


def _checked(config: CompileConfig | None, offload: OffloadFolder | None) -> CompileConfig:
    config = config_from() if config is None else config
    if not isinstance(config, CompileConfig):
        raise ConfigError(f"config is a {type(config).__name__}: make one with permtriton.config_from")
    check_recipe(config)
    if offload is not None:
        check_offload(config)
    return config


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
        passes = pruning_passes(run.plan, magnitudes(model, run.plan), exact=True)
        if why_not := _not_comparable(run):
            run.run_passes(passes, run.batches)
            return why_not
        before = run.graph
        run.run_passes(passes)
        expected = run_graph(run.graph, run.batches[0], wide=False).float().cpu()
        try:
            check_same_outputs(expected, lambda: model_outputs(model, run.batches[0]), model, "after pruning")
        except VerificationError:
            run_passes(before, passes, run.batches)  # whose error, if there is one, names the pass that is wrong
            raise
    return "same outputs"


def _not_comparable(run: Run) -> str:
    """Returns why the graph need not give the outputs of the model; empty where it must."""
    if run.other_values:
        return "not compared: the graph takes all rows where the model selects some by their values"
    if run.model.dtype.itemsize < 4 and any("topk" in operator for operator in count_operators(run.graph)):
        return f"not compared: in {run.model.dtype} rounding sends tokens to other experts"
    return ""


def measured(run: Run) -> Evaluation:
    """Returns the held-out measure of the dense and the compiled model; empty without held-out samples."""
    if run.evaluation is None:
        return {}
    with run.workspace.timed("evaluate"), run.running() as model:
        compiled = run.evaluation.compiled(model, run.plan.hidden_order(run.indices))
    return {"measure": run.evaluation.measure, "dense": run.evaluation.dense, "compiled": compiled}
