"""The first stage of a compilation: its inputs, what it needs, and the `Run` made of them."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.checkpoint.names import stored_names
from permtriton.checkpoint.pruned import pruned_parameters
from permtriton.checkpoint.read_record import Record
from permtriton.data.check_samples import check_samples, line_of_ids_without
from permtriton.data.generated import BEGINNING, beginnings, generated_text, generation_refusal
from permtriton.data.held_out import prepared
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs, Samples
from permtriton.data.special_tokens import NONE
from permtriton.driver.check_graph import check_graph
from permtriton.driver.choose_placement import place, without_text
from permtriton.driver.deciding_inputs import check_states
from permtriton.driver.forecast import Forecast, check_disk, make_forecast
from permtriton.driver.memory_forecast import Devices
from permtriton.errors import ConfigError, reasons_of
from permtriton.methods.planning import Planned, plan_model
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.run import Run
from permtriton.methods.step import Stage
from permtriton.model.experts import measure_all_experts
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS, with_tokens
from permtriton.model.reference import Reference
from permtriton.model.seq2seq import check_ends
from permtriton.running.mixed_precision import mixed_precision
from permtriton.running.placement import DevicePlacement, ModelPlacement
from permtriton.running.resume import State, Workspace
from permtriton.util import ranks


@dataclass(frozen=True)
class CompileInputs:
    """The inputs of a compilation."""

    model: PreTrainedModel  # the dense model
    config: CompileConfig
    # calibration samples: token ids, int64 ``[samples, tokens]``, or a mapping of the arguments of the model's
    # ``forward`` to tensors with one row per sample, such as ``{"pixel_values": ...}``
    samples: Inputs
    tokenizer: Processor | None = None  # the tokenizer or processor that is saved with the model
    held_out: Inputs | None = None  # held-out samples to evaluate both models on, in the form of ``samples``
    # where states are kept: a later call with equal inputs continues from the states, and a call with other inputs is
    # refused until they are deleted
    workspace: Workspace = field(default_factory=Workspace)
    # whether to measure a pass of the model first, and report how much memory, time and disk the work will take
    say_needs: bool = False
    device: torch.device | None = None  # device to move the model to; None leaves it where it is
    # allowed placements on ``device``; its memory decides which is used
    placements: tuple[DevicePlacement, ...] = tuple(DevicePlacement)
    save_format: str | None = None  # format that the model will be saved in, for the estimate of disk; None for dense
    text: str = ""  # name of the held-out data, or why there are none; empty if the record says nothing of them
    record: Record = field(default_factory=dict)  # entries of the record that only the caller knows


def prepare(inputs: CompileInputs) -> Run:
    """Plans the compilation, and checks that it can run, before any weight changes."""
    start, forecast = begin(inputs)
    model, workspace, progress = start.model, start.workspace, start.workspace.progress
    memory, placement = forecast.memory, ModelPlacement(forecast.memory.placement, inputs.device or model.device)
    if refused := next(filter(None, ranks.gather(forecast.refused)), ""):
        raise ConfigError(refused)
    folder = None if workspace.resume_path is None else workspace.resume_path.resolve().parent
    if folder is not None:
        ranks.on_first(lambda: check_disk(forecast.disk, folder))
    if inputs.say_needs:
        progress.say("; ".join(f"{name}: {value}" for name, value in forecast.rows(folder)))
    with workspace.timed("trace"):
        reference = Reference(model, start.samples)
        what = f"the graph that torch.export traces of this {type(model).__name__}"
        check_graph(start.graph, model, reference.samples, what)  # before hours are spent on a wrong trace
    run = Run(
        **{part.name: getattr(start, part.name) for part in fields(Planned)},
        generated_ids=_generated(start) if start.config.generated else None,
        batch_size=max(TOKENS_WITHOUT_LOGITS // start.samples.longest, 1),
        reference=reference,
        placement=placement,
        memory=memory,
    )
    measure_all_experts(model, start.config.calibration.calibrate_all_experts)
    return run


def begin(inputs: CompileInputs, devices: Devices | None = None) -> tuple[Planned, Forecast]:
    """Returns the planned model and the forecast of its compilation.

    Without ``devices``, the forecast is for ``inputs.device``, to which the model moves if it fits there.
    """
    start, device = planned(inputs), inputs.device or inputs.model.device
    devices = devices or Devices.of(device, inputs.placements)
    ranks.check_shares(len(start.samples), devices.count)
    start, memory, devices = place(start, device, devices)
    with start.workspace.timed("identify"):
        check_states(start)
    with start.workspace.timed("estimate"):
        return start, make_forecast(start, memory, devices, inputs.save_format, timed=inputs.say_needs)


def planned(inputs: CompileInputs) -> Planned:
    """Checks all samples, traces the model and plans which linears to prune and which channels to permute."""
    model, config, workspace, progress = inputs.model, inputs.config, inputs.workspace, inputs.workspace.progress
    held_out = None if inputs.held_out is None else prepared(model, inputs.held_out)
    samples = check_samples(model, inputs.samples)
    if line := line_of_ids_without(samples, inputs.tokenizer):
        progress.say(line)
    check_ends(model, samples)
    samples = with_tokens(model, samples.to("cpu"))
    if config.generated and (reason := generation_refusal(model, samples)):
        config = without_text(config, reason, progress)
    if config.layout == "fused" and not any(step.stage is Stage.ORDER for step in config.steps):
        progress.say(f"layout fused has no effect: no step of {config.recipe} orders channels")
    with workspace.timed("trace"):
        plan, graph = plan_model(model, config, samples)
    for reason in reasons_of(plan.skipped) if config.skip_indivisible else ():
        progress.say(f"left dense: {reason}")
    stored_names(model, pruned_parameters(model, plan), original=config.layout == "portable")  # raises its errors early
    return Planned(model, config, samples, plan, graph, held_out, workspace)


def _generated(start: Planned) -> Tensor:
    """Returns texts that the dense model writes, as further samples, int64 ``[texts, tokens]``."""
    config, samples, workspace = start.config, start.samples, start.workspace
    after = torch.tensor((samples.special or NONE).after, dtype=torch.int64)
    shape = config.generated, samples.tokens - len(after)

    def write() -> State:
        starts = beginnings(samples, config.generated, max(samples.tokens // BEGINNING, 1))
        with mixed_precision(start.model, config.mixed_precision, fixed=True):
            texts = generated_text(start.model, starts, *shape, config.seed, workspace.progress)
        return {"text": torch.cat([texts, after.expand(len(texts), -1)], 1)}, {}

    with workspace.timed("generate"):
        ids = workspace.state("generated").once(write)[0]["text"]
        workspace.inputs["generated"] = Samples.of(ids).sha256
    return ids
