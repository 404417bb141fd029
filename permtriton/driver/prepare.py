"""The first stage of a compilation: what is read and measured before anything changes."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from permtriton.checkpoint.names import stored_names
from permtriton.checkpoint.save import pruned_parameters
from permtriton.config import WRITTEN
from permtriton.data.generated import BEGINNING, beginnings, first_token, generated_text, why_not
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs, Samples
from permtriton.data.text import calibration_samples, check_inputs, check_samples, vocabulary_of
from permtriton.driver.compilation import WRITING, Compilation
from permtriton.driver.forecast import Forecast, check_disk, make_forecast
from permtriton.driver.memory import IN_PLACE, Devices, Needs, describe_thrift, estimate, fits
from permtriton.driver.options import CompileConfig
from permtriton.driver.planning import plan_model
from permtriton.errors import ConfigError, reasons_of
from permtriton.evaluation.held_out import Evaluation
from permtriton.methods.measure.importance import inverts_hessians
from permtriton.methods.measure.statistics import describe_few, site_statistics, tokens_of_experts
from permtriton.methods.prune.dense_share import DENSE_SHARE, costliest
from permtriton.model.experts import measure_all_experts
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS, check_length, with_tokens
from permtriton.model.load import check_original
from permtriton.model.reference import Reference
from permtriton.passes.plan import Plan, named_layers
from permtriton.passes.trace import OTHER_VALUES
from permtriton.recipe import suggested_text
from permtriton.running import ranks
from permtriton.running.offload import OffloadFolder
from permtriton.running.onload import HostMemory
from permtriton.running.placement import running
from permtriton.running.state import StateFile


@dataclass(frozen=True)
class Prepared:
    """What the report and the end of a compilation need of its start.

    Attributes:
        needs: estimated memory.
        evaluation: held-out evaluation, with the measure of the dense model; None without held-out samples.
    """

    needs: Needs
    evaluation: Evaluation | None


def prepare(
    run: Compilation,
    tokenizer: Processor | None,
    ids: Inputs | None,
    windows: Inputs | None,
    say_needs: bool = False,
    device: torch.device | None = None,
    spread: bool | None = None,
    onload: bool | None = None,
) -> Prepared:
    """Reads the calibration text, traces the model, and measures the dense model.

    Args:
        run: run, whose samples, plan, graph, reference and statistics are filled in.
        tokenizer: tokenizer of the calibration text, or processor.
        ids: calibration samples in place of the config's: token ids, int64 ``[samples, tokens]``, or a mapping of the
            arguments of the model's ``forward`` to tensors with one row per sample, such as ``{"pixel_values": ...}``.
        say_needs: whether to report how much memory, time and disk the work will take.

    Raises:
        PermTritonError: bad input, the state of another run, a model that cannot be traced, or too little memory or
            disk.
    """
    samples, plan, graph = planned(run, tokenizer, ids, device)
    model, config = run.model, run.config
    for left in reasons_of(plan.skipped) if config.skip_indivisible else ():
        run.progress.say(f"left dense: {left}")
    held_out = held_out_samples(model, windows)
    device = device or model.device
    devices = Devices.of(device, ranks.count(), spread, offloaded=run.offload is not None, onload=onload)
    needs = estimate(model, plan, config, samples, held_out, devices)
    spread_on = device if any(ranks.gather(needs.spread)) else None
    if spread_on is not None:
        devices = replace(devices, spread=True)
        check_spread(config, len(samples))
    elif any(ranks.gather(needs.onload)):
        devices = replace(devices, onload=True)
        check_onload(config)
        run.onload_on, run.offload = device, HostMemory()
    elif device != model.device and fits(needs, devices):
        nn.Module.to(model, device)
        plan, graph = plan_model(model, config, samples)  # a graph is of one device
    with run.timed("estimate"):
        forecast = make_forecast(
            model, plan, config, samples, held_out, run.resume_path, timed=say_needs, devices=devices
        )
    if refused := next(filter(None, ranks.gather(forecast.refused)), ""):
        raise ConfigError(refused)
    folder = _check_disks(run, forecast)
    if say_needs:
        run.progress.say(forecast.describe(folder))
        if saved := describe_thrift(forecast.needs, config):
            run.progress.say(f"to save memory: {saved}")
    batch = max(TOKENS_WITHOUT_LOGITS // samples.longest, 1)
    evaluation = None
    if config.writes:
        with run.timed("generate"):
            samples = _with_text(run, samples)
    reference = Reference(model, samples, plan.unseen)
    measure_all_experts(model, config.calibration.calibrate_all_experts)
    with running(model, plan, spread_on, run.onload_on) as runs:
        if held_out is not None:
            with run.timed("evaluate"):
                evaluation = Evaluation(runs, held_out, run.progress, named_layers(model, plan), run.offload)
        statistics = {}
        if config.uses_importance:
            with run.timed("calibrate"):
                statistics = site_statistics(runs, plan, config.importance, samples, batch, run.progress, run.offload)
            _note_experts(run, runs, samples)
    run.samples, run.batch, run.plan, run.graph, run.reference = samples, batch, plan, graph, reference
    run.statistics = {name: statistic.to(model.device) for name, statistic in statistics.items()}
    run.batches, run.indices = _batches(model, graph, reference.samples), run.unmoved()
    run.other_values = OTHER_VALUES in graph.meta
    run.spread_on, run.thrifty = spread_on, forecast.needs.thrifty
    _leave_dense(run)
    return Prepared(forecast.needs, evaluation)


def _note_experts(run: Compilation, runs: PreTrainedModel, samples: Samples) -> None:
    """Notes how many tokens each expert of a mixture was sent, and says so where they are few."""
    run.expert_tokens = tokens_of_experts(runs, len(samples) * samples.longest)
    if not run.config.calibration.calibrate_all_experts and (few := describe_few(runs, run.expert_tokens)):
        run.progress.say(few)


def _leave_dense(run: Compilation) -> None:
    """Chooses the linears of the dense share, if there is one, and plans anew without them."""
    model, config, sites = run.model, run.config, {name: site.name for site, name in run.plan.linears()}
    if not config.dense_share:
        return
    with run.timed(DENSE_SHARE):
        chosen = costliest(model, run.plan, run.importances(), run.row_weights(), config.dense_share)
        run.note(dense=chosen)
        run.progress.say(f"left dense, as the dense share: {', '.join(chosen) or 'nothing, as every linear is larger'}")
        run.plan, run.graph = plan_model(model, replace(config, ignore=(*config.ignore, *chosen)), run.samples)
    run.plan.skipped.update(dict.fromkeys(chosen, "of the dense share: its mask would raise the loss most per weight"))
    run.statistics = {site.name: run.statistics[sites[site.linears[0]]] for site in run.plan.sites}
    run.batches, run.indices = _batches(model, run.graph, run.reference.samples), run.unmoved()


def _with_text(run: Compilation, samples: Samples) -> Samples:
    """Returns the calibration samples once the dense model has written its text, which may be all of them.

    Raises:
        CalibrationError: it cannot write, or what it writes is not finite.
        OutputError: the text of an interrupted run is damaged, or cannot be written.
    """
    config, shape = run.config, (run.config.writes, samples.tokens)
    state = run.state(StateFile, WRITING)
    ids = None if state is None else _stored_text(state, shape, vocabulary_of(run.model))
    if ids is None:
        starts = beginnings(samples, config.writes, 1 if config.alone else min(BEGINNING, samples.tokens - 1))
        ids = generated_text(run.model, starts, *shape, config.seed, run.progress)
        if state is not None:
            state.write({"text": ids}, {})
    run.note(generated=Samples.of(ids).sha256)
    if config.alone:
        return Samples.of(ids)
    run.generated = ids
    return samples


def _stored_text(state: StateFile, shape: tuple[int, int], vocabulary: int) -> Tensor | None:
    """Returns the text of an interrupted run, int64 of this shape; None if there is none.

    Raises:
        OutputError: the state belongs to another run, or is damaged.
    """
    found = state.read()
    if found is None:
        return None
    ids = found[0].get("text")
    if ids is None or (ids.dtype, ids.shape) != (torch.int64, shape) or ids.min() < 0 or ids.max() >= vocabulary:
        raise state.damaged(f"its text is not {shape[0]} x {shape[1]} token ids")
    return ids


def _no_text(run: Compilation, tokenizer: Processor | None) -> Samples:
    """Returns what stands for calibration samples until the dense model has written them all: their first token.

    Raises:
        ConfigError: the model cannot write text.
        CalibrationError: the samples are longer than the model can take.
    """
    config = run.config.calibration
    if reason := why_not(run.model, run.offload):
        raise ConfigError(f"`calibration={WRITTEN}`: {reason}. Give a text, or what else the model reads")
    if not config.generated:
        raise ConfigError(f"`calibration={WRITTEN}`: the model writes all text; say how many sequences by `generated=`")
    check_length(run.model, config.sequence_length)
    token = first_token(run.model, tokenizer)
    return Samples.of(torch.full((config.generated, config.sequence_length), token))


def _check_writing(run: Compilation, samples: Samples) -> None:
    """Leaves generated text out where the model cannot write it and only the recipe, not the user, asks for it.

    Raises:
        ConfigError: the user asks for it.
    """
    config = run.config
    if not config.generated or not (reason := why_not(run.model, run.offload, samples)):
        return
    if config.generated != suggested_text(config):
        raise ConfigError(f"`generated={config.generated}`: {reason}. Leave it out, or give `generated=0`")
    run.progress.say(f"no text is generated: {reason}")
    run.config = replace(config, calibration=replace(config.calibration, generated=0))


def check_offload(config: CompileConfig) -> None:
    """Refuses several processes, and methods that need all weights, or their gradients, in memory.

    Raises:
        ConfigError: there are several, or the config asks for such a method; the message says what to choose.
    """
    if ranks.count() > 1:
        raise ConfigError("`offload=` is for one process: start permtriton without torchrun, or leave `offload=` out")
    for step in config.steps:
        if not step.offloads:
            raise ConfigError(
                f"the step {step.name} with `offload=` is refused: {step.not_offloaded}; leave {step.name} out of "
                "`recipe=`, or leave `offload=` out"
            )


def check_onload(config: CompileConfig) -> None:
    """Refuses methods that need all weights, or their gradients, on the device.

    Raises:
        ConfigError: the config asks for such a method; the message says what to choose.
    """
    if config.writes:
        raise ConfigError(
            "the dense model does not write text while its layers come to the GPU one by one: give `calibration=` a "
            "text and `generated=0`, or use a GPU that holds the whole model"
        )
    for step in config.steps:
        if not step.offloads:
            raise ConfigError(
                f"the step {step.name} is refused where layers come to the GPU one by one: it needs all weights there; "
                f"leave {step.name} out of `recipe=`, or use a GPU that holds the whole model"
            )


def check_spread(config: CompileConfig, samples: int) -> None:
    """Checks, before any work, that a compilation can run a model whose layers are spread.

    Args:
        samples: number of calibration samples.

    Raises:
        ConfigError: there is one rank only, not all ranks would run it equally often, or the config changes weights
            while it runs.
    """
    if ranks.count() == 1:
        raise ConfigError("`shard=True` spreads weights over several processes: start permtriton with torchrun")
    if config.writes:
        raise ConfigError(
            "the dense model does not write text while its layers are spread over GPUs: give `calibration=` a text and "
            "`generated=0`, or use GPUs that hold the whole model"
        )
    if refused := [step.name for step in config.steps if not step.shards]:
        raise ConfigError(
            f"the step {refused[0]} changes weights while the model runs, which is not done with layers that are "
            "spread over GPUs: leave it out of `recipe=` (and prune with mask), or use GPUs that hold the whole model "
            "(`shard=False`)"
        )
    # The layers that give Hessians run on one sample at a time where they cannot take several.
    ranks.check_in_step(samples, 1 if inverts_hessians(config.importance) else config.micro_batch_size)
    for rows in {rows for step in config.steps for rows in step.batches(samples)}:
        ranks.check_in_step(rows, config.micro_batch_size)


def _batches(model: PreTrainedModel, graph: fx.GraphModule, given: Samples) -> list[Samples]:
    """Returns single samples of the traced shapes, on which passes are verified."""
    taken = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            rows = given.inputs[str(node.target)]
            if given.is_text:
                tokens = node.meta["val"].shape[1]
                rows = rows.repeat(1, math.ceil(tokens / rows.shape[1]))[:, :tokens]  # which may be fewer than traced
            taken[str(node.target)] = rows
    return list(Samples(taken).to(model.device, model.dtype).split(1))


def _check_disks(run: Compilation, forecast: Forecast) -> Path | None:
    """Refuses disks that are too small, and returns the folder that the states are written to, if there is one."""
    folder = run.resume_path and run.resume_path.resolve().parent
    if folder is not None:
        ranks.on_first(lambda: check_disk(forecast.disk, folder))
    if isinstance(run.offload, OffloadFolder):
        needed = {name: size for name, size in forecast.needs.offloaded.items() if name != IN_PLACE}
        check_disk(needed, run.offload.folder)
    return folder


def held_out_samples(model: PreTrainedModel, windows: Inputs | None) -> Samples | None:
    """Returns held-out samples with the number of tokens that the model makes of each; None without any."""
    return None if windows is None else with_tokens(model, check_inputs(model, windows))


def planned(
    run: Compilation, tokenizer: Processor | None, ids: Inputs | None, device: torch.device | None = None
) -> tuple[Samples, Plan, fx.GraphModule]:
    """Reads the calibration samples and traces the model; arguments and errors are those of `prepare`."""
    model, config = run.model, run.config
    check_original(model)
    with run.timed("calibration text"):
        if ids is not None and config.alone:
            raise ConfigError(f"calibration is {WRITTEN}, but samples were given: leave one of them out")
        if ids is not None:
            samples = check_samples(model, ids)
        elif config.alone:
            samples = _no_text(run, tokenizer)
        else:
            samples = ranks.on_first(lambda: calibration_samples(config, tokenizer, model))
        ranks.check_shares(len(samples))
        samples = with_tokens(model, samples.to("cpu"))
        _check_writing(run, samples)
    with run.timed("identify"):
        run.identify(samples, device or model.device)
    with run.timed("trace"):
        plan, graph = plan_model(model, config, samples)
    stored_names(model, pruned_parameters(model, plan), original=config.layout == "portable")  # refused now, not later
    return samples, plan, graph
