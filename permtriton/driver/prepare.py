"""The first stage of a compilation: what it is given, what is measured before anything changes, and its run."""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.checkpoint.names import stored_names
from permtriton.checkpoint.pruned import pruned_parameters
from permtriton.data.generated import BEGINNING, beginnings, generated_text, generation_refusal
from permtriton.data.held_out import prepared
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs, Samples
from permtriton.data.special_tokens import NONE
from permtriton.data.text import calibration_samples, check_samples, line_of_ids_without
from permtriton.driver.forecast import Forecast, check_disk, make_forecast
from permtriton.driver.identity import CHOOSING, WRITING, identify
from permtriton.driver.make_record import Origin
from permtriton.driver.memory import GENERATION, Devices, describe_low_memory, estimate, fits, spared
from permtriton.driver.planning import Planned, plan_model
from permtriton.driver.traced import graph_outputs, traced_sample, why_not_compared
from permtriton.errors import ConfigError, reasons_of
from permtriton.evaluation.measures import HeldOutMeasure
from permtriton.methods.compile_config import CompileConfig
from permtriton.methods.measure.fisher import row_weights
from permtriton.methods.measure.importance import error_importance, importances_of, inverts_hessians
from permtriton.methods.measure.statistics import site_statistics, tokens_of_experts, undersampled_warning
from permtriton.methods.needs import Needs
from permtriton.methods.prune.dense_share import DENSE_SHARE, most_sensitive, statistics_and_shares_left
from permtriton.methods.run import Run
from permtriton.methods.step import Stage
from permtriton.model.checks import check_same_outputs, model_outputs
from permtriton.model.experts import measure_all_experts
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS, with_tokens
from permtriton.model.prunable import check_original
from permtriton.model.reference import TOKENS, Reference
from permtriton.passes.plan import named_layers
from permtriton.recipe import check_recipe, config_from, suggested
from permtriton.running import ranks
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.onload import why_not_onloaded
from permtriton.running.placement import Placement, Way
from permtriton.running.state import StateFile
from permtriton.running.store import HostMemory
from permtriton.running.workspace import Workspace
from permtriton.util.machine import available_memory, format_bytes
from permtriton.util.progress import NoProgress, Progress


@dataclass(frozen=True)
class Given:
    """What a compilation is given beside its model: the arguments of `permtriton.driver.pipeline.compile_model`.

    Attributes:
        tokenizer: tokenizer of the calibration text, not needed if the text is already token ids; or the processor of
            images or sound. It is saved with the model.
        config: every option; the default recipe by default.
        ids: calibration samples in place of the config's: token ids, int64 ``[samples, tokens]``, or a mapping of the
            arguments of the model's ``forward`` to tensors with one row per sample, such as ``{"pixel_values": ...}``.
        held_out: held-out samples to evaluate dense and compiled models on: token ids, int64
            ``[windows, tokens]``, or a mapping as for ``ids``.
        resume_path: path of the files that keep the state of long stages, each with its stage's name before the suffix
            (``state.learned.safetensors``); a later call with equal inputs continues from them, and one with others is
            refused until they are deleted.
        say_needs: whether to measure the model first and report how much memory, time and disk the work will take.
        device: device that the model, which is on the CPU, shall run on; None where it is.
        ways: how the model may be placed on ``device``; of several, its memory decides.
        save_format: format in which it will be saved, for the estimate of the disk; None for dense.
        origin: what the record shall say beside what is known here; None for nothing more.

    Raises:
        ConfigError: the config is none, or prunes nothing or twice.
    """

    tokenizer: Processor | None = None
    config: CompileConfig = field(default_factory=config_from)
    _: KW_ONLY
    ids: Inputs | None = None
    held_out: Inputs | None = None
    progress: Progress | None = None
    resume_path: Path | None = None
    say_needs: bool = False
    device: torch.device | None = None
    ways: tuple[Way, ...] = tuple(Way)
    save_format: str | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, CompileConfig):
            raise ConfigError(f"config is a {type(self.config).__name__}: make one with permtriton.config_from")
        check_recipe(self.config)

    def workspace(self) -> Workspace:
        """Returns what the compilation works with."""
        return Workspace(self.progress or NoProgress(), self.resume_path)


def prepare(model: PreTrainedModel, given: Given) -> tuple[Run, HeldOutMeasure | None]:
    """Reads the calibration text, traces the model, and measures the dense model.

    Returns:
        The run, and the measure of the dense model on held-out samples, if there are any.

    Raises:
        PermTritonError: bad input, the state of another run, a model that cannot be traced, or too little memory or
            disk.
    """
    device, workspace = given.device or model.device, given.workspace()
    progress = workspace.progress
    start = planned(model, given, workspace)
    for reason in reasons_of(start.plan.skipped) if start.config.skip_indivisible else ():
        progress.say(f"left dense: {reason}")
    start, needs, placement, devices = placed(start, workspace, device, given.ways)
    config = start.config
    with workspace.timed("identify"):
        identify(workspace, model, config, start.samples, device)
    with workspace.timed("estimate"):
        forecast = make_forecast(
            start, needs, given.resume_path, devices, timed=given.say_needs, save_format=given.save_format
        )
    if refused := next(filter(None, ranks.gather(forecast.refused)), ""):
        raise ConfigError(refused)
    folder = _check_disk(workspace, forecast)
    if given.say_needs:
        progress.say(forecast.describe(folder))
        if saved := describe_low_memory(needs, config):
            progress.say(f"to save memory: {saved}")

    with workspace.timed("trace"):
        _check_traced(start)
    samples, generated = start.samples, _generated(start, workspace, placement)
    reference = Reference(model, samples)
    measure_all_experts(model, config.calibration.calibrate_all_experts)
    batch = max(TOKENS_WITHOUT_LOGITS // samples.longest, 1)
    held_out, expert_tokens = None, {}
    statistics: dict[str, Tensor] = {}
    choice = DenseShare.of(workspace) if config.dense_share else None
    left: dict[str, float] | None = None
    with placement.running(model, start.plan) as runs:
        if start.held_out is not None:
            with workspace.timed("evaluate"):
                layers = named_layers(model, start.plan)
                held_out = HeldOutMeasure(runs, start.held_out, progress, layers, workspace.store)
        if config.uses_importance:
            with workspace.timed("calibrate"):
                method = error_importance(config.importance) if config.dense_share else config.importance
                text = samples, batch, progress, workspace.store
                if choice is not None and choice.chosen is None and inverts_hessians(method) and config.updates:
                    statistics, left = statistics_and_shares_left(runs, start.plan, *text)
                else:
                    statistics = site_statistics(runs, start.plan, method, *text)
            expert_tokens = tokens_of_experts(runs, len(samples) * samples.longest)
            few = undersampled_warning(runs, expert_tokens)
            if few and not config.calibration.calibrate_all_experts:
                progress.say(few)
    run = Run(
        model=model,
        config=config,
        workspace=workspace,
        samples=samples,
        generated=generated,
        batch=batch,
        plan=start.plan,
        graph=start.graph,
        reference=reference,
        statistics={name: statistic.to(model.device) for name, statistic in statistics.items()},
        expert_tokens=expert_tokens,
        needs=needs,
        placement=placement,
    )
    return run if choice is None else without_dense_share(run, choice, left), held_out


def placed(
    start: Planned, workspace: Workspace, device: torch.device, ways: tuple[Way, ...]
) -> tuple[Planned, Needs, Placement, Devices]:
    """Decides how the model is placed and whether activations are recomputed; moves it where it is to run as a whole.

    Raises:
        ConfigError: the recipe cannot be done that way.
    """
    model = start.model
    devices = Devices.of(device, ranks.count(), ways)
    start, needs = with_needs(start, devices, workspace.progress)
    chosen = max(ranks.gather(needs.way))  # where one rank cannot hold the model, none does
    if chosen is not Way.WHOLE:
        check_way(chosen, start, devices)
        devices = replace(devices, ways=(chosen,))
        needs = needs if needs.way is chosen else estimate(start, devices)
        if chosen is Way.ONLOADED:
            workspace.store = HostMemory()
    elif device != model.device and fits(needs, devices):
        nn.Module.to(model, device)
        devices = replace(devices, free=available_memory(device))
        plan, graph = plan_model(model, start.config, start.samples)  # a graph is of one device
        start = replace(start, plan=plan, graph=graph)
        needs = estimate(start, devices)  # beside a model that is there
    return start, needs, Placement(chosen, device), devices


def with_needs(start: Planned, devices: Devices, progress: Progress) -> tuple[Planned, Needs]:
    """Returns the start and its needs; it writes no text where only the recipe asks for it, and it could not.

    Raises:
        ConfigError: the user asks for text.
    """
    start, needs = spared(start, devices)
    cannot = needs.way is Way.ONLOADED and bool(start.config.generated) and not fits(needs, devices, GENERATION)
    if not any(ranks.gather(cannot)):
        return start, needs
    reason = f"the dense model writes text only where a GPU holds all of it, {format_bytes(start.sizes.model)}"
    start = replace(start, config=_without_text(start.config, reason, progress))
    return spared(start, devices)


def planned(model: PreTrainedModel, given: Given, workspace: Workspace) -> Planned:
    """Reads all samples and traces the model; errors are those of `prepare`."""
    held_out = None if given.held_out is None else prepared(model, given.held_out)
    config, ids = given.config, given.ids
    check_original(model)
    with workspace.timed("calibration text"):
        if ids is not None:
            samples = check_samples(model, ids)
        else:
            samples = ranks.on_first(lambda: calibration_samples(config, given.tokenizer, model))
        if line := line_of_ids_without(samples, given.tokenizer):
            workspace.progress.say(line)
        ranks.check_shares(len(samples), ranks.count())
        samples = with_tokens(model, samples.to("cpu"))
        if config.generated and (reason := generation_refusal(model, samples)):
            config = _without_text(config, reason, workspace.progress)
    if config.layout == "fused" and not any(step.stage is Stage.ORDER for step in config.steps):
        workspace.progress.say(f"layout fused has no effect: no step of {config.recipe} orders channels")
    with workspace.timed("trace"):
        plan, graph = plan_model(model, config, samples)
    stored_names(model, pruned_parameters(model, plan), original=config.layout == "portable")  # refused now, not later
    return Planned(model, config, samples, plan, graph, held_out)


def _check_traced(start: Planned) -> None:
    """Compares the graph with the model, before hours are spent on a class that is traced as something else.

    Raises:
        VerificationError: the graph gives other outputs than the model.
    """
    model, graph = start.model, start.graph
    if why_not_compared(graph, model):
        return
    sample = traced_sample(graph, model, start.samples.start(1, TOKENS))
    traced = graph_outputs(graph, sample)
    if bool(traced.isfinite().all()):  # else `Reference` says what to do
        stage = f"the graph that torch.export traces of this {type(model).__name__}"
        check_same_outputs(traced, lambda: model_outputs(model, sample), model, stage)


@dataclass
class DenseShare:
    """The choice of which linears stay dense, and the file that keeps it; None for what is not there (yet)."""

    state: StateFile | None
    chosen: list[str] | None

    @classmethod
    def of(cls, workspace: Workspace) -> Self:
        """Returns the choice of an interrupted run: gradients of a GPU are not the same in every run."""
        state = workspace.state(StateFile, CHOOSING)
        stored = None if state is None else state.read()
        return cls(state, None if stored is None else json.loads(stored[1]["dense"]))


def without_dense_share(run: Run, choice: DenseShare, left: Mapping[str, float] | None) -> Run:
    """Returns a run that leaves the linears of the dense share out, planned anew.

    Args:
        choice: what an interrupted run chose; else the choice is made here.
        left: linear -> what an update of kept weights leaves of its cost; None where none is made.
    """
    model, config, sites = run.model, run.config, {name: site.name for site, name in run.plan.linears()}
    with run.workspace.timed(DENSE_SHARE):
        rows, chosen = None, choice.chosen
        if chosen is None:
            rows = row_weights(run)
            errors = importances_of(model, run.plan, error_importance(config.importance), run.statistics)
            chosen = most_sensitive(model, run.plan, run.importances(), errors, rows, config.dense_share, left)
            if choice.state is not None:
                choice.state.write({}, {"dense": json.dumps(chosen)})
        run.workspace.note(dense=chosen)
        run.progress.say(f"left dense, as the dense share: {', '.join(chosen) or 'nothing, as every linear is larger'}")
        plan, graph = plan_model(model, replace(config, ignore=(*config.ignore, *chosen)), run.samples)
    plan.skipped.update(dict.fromkeys(chosen, "of the dense share: its mask would raise the loss most per weight"))
    statistics = {site.name: run.statistics[sites[site.linears[0]]] for site in plan.sites}
    return replace(run, plan=plan, graph=graph, statistics=statistics, rows=rows)


def _generated(start: Planned, workspace: Workspace, placement: Placement) -> Tensor | None:
    """Lets the dense model write text beside the calibration samples, if it shall; int64 ``[texts, tokens]``.

    Raises:
        CalibrationError: it cannot write, or what it writes is not finite.
        OutputError: the text of an interrupted run is damaged, or cannot be written.
    """
    config, samples = start.config, start.samples
    if not config.generated:
        return None
    after = torch.tensor((samples.special or NONE).after, dtype=torch.int64)
    shape = config.generated, samples.tokens - len(after)
    with workspace.timed("generate"):
        state = workspace.state(StateFile, WRITING)
        stored = None if state is None else state.read()
        if stored is not None:
            ids = stored[0]["text"]
        else:
            starts = beginnings(samples, config.generated, max(samples.tokens // BEGINNING, 1))
            rounds = config.mixed_precision and placement.way is not Way.ONLOADED  # that GPU may hold no further copy
            with placement.writing(start.model), mixed_precision(start.model, rounds, fixed=True):
                texts = generated_text(start.model, starts, *shape, config.seed, workspace.progress)
            ids = torch.cat([texts, after.expand(len(texts), -1)], 1)
            if state is not None:
                state.write({"text": ids}, {})
        workspace.note(generated=Samples.of(ids).sha256)
    return ids


def _without_text(config: CompileConfig, reason: str, progress: Progress) -> CompileConfig:
    """Returns a config without generated text, which the model cannot write, where only the recipe asks for it.

    Raises:
        ConfigError: the user asks for it.
    """
    if config.generated != suggested(config).get("generated", 0):
        raise ConfigError(f"`generated={config.generated}`: {reason}. Leave it out, or give `generated=0`")
    progress.say(f"no text is generated: {reason}")
    return replace(config, calibration=replace(config.calibration, generated=0))


def check_way(way: Way, start: Planned, devices: Devices) -> None:
    """Checks, before any work, that a compilation can run a model that is placed this way.

    Raises:
        ConfigError: it cannot; the message says what to choose.
    """
    config = start.config
    if way is Way.WHOLE:
        return
    if way is Way.SPREAD:
        if config.generated:
            raise ConfigError(
                f"the dense model does not write text while {way.words}: give `generated=0`, or use GPUs that hold "
                "the whole model"
            )
        check_spread(config, len(start.samples), devices.count)
        return
    if devices.kind == "cpu":
        raise ConfigError("`onload=True` is for a GPU, but the device is cpu: leave it out")
    if reason := why_not_onloaded(start.model, start.plan):
        raise ConfigError(
            f"the layers of this {type(start.model).__name__} cannot come to the GPU one by one: {reason}"
        )
    if refused := [step.name for step in config.steps if not step.onloads]:
        raise ConfigError(
            f"the step {refused[0]} needs all weights at once, which is not done while {way.words}: leave "
            f"{refused[0]} out of `recipe=`, or use GPUs that hold the whole model (`onload=False`)"
        )


def check_spread(config: CompileConfig, samples: int, count: int) -> None:
    """Checks, before any work, that a compilation can run a model whose layers are spread.

    Args:
        samples: number of calibration samples.
        count: number of ranks.

    Raises:
        ConfigError: there is one rank only, not all ranks would run it equally often, or the config changes weights
            while it runs.
    """
    if count == 1:
        raise ConfigError("`shard=True` spreads weights over several processes: start permtriton with torchrun")
    if refused := [step.name for step in config.steps if not step.shards]:
        raise ConfigError(
            f"the step {refused[0]} changes weights while the model runs, which is not done with layers that are "
            "spread over GPUs: leave it out of `recipe=` (and prune with mask), or use GPUs that hold the whole model "
            "(`shard=False`)"
        )
    # The layers that give Hessians run on one sample at a time where they cannot take several.
    ranks.check_in_step(samples, 1 if inverts_hessians(config.importance) else config.micro_batch_size, count)
    for rows in {rows for step in config.steps for rows in step.batches(samples)}:
        ranks.check_in_step(rows, config.micro_batch_size, count)


def _check_disk(workspace: Workspace, forecast: Forecast) -> Path | None:
    """Refuses a disk that is too small, and returns the folder that the states are written to, if there is one."""
    folder = workspace.resume_path and workspace.resume_path.resolve().parent
    if folder is not None:
        ranks.on_first(lambda: check_disk(forecast.disk, folder))
    return folder
