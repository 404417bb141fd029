"""One compilation that a command or a Python call starts: it reads, compiles and saves a model."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from permtriton.arguments import CompileArgs
from permtriton.checkpoint.export import check_format
from permtriton.checkpoint.formats import Format
from permtriton.checkpoint.fp8 import check_quantizable
from permtriton.checkpoint.output import check_apart, check_output, claimed, resume_path
from permtriton.checkpoint.plan_entries import plan_report
from permtriton.data.calibration import calibration_samples, fitted, stand_in
from permtriton.data.held_out import read_held_out
from permtriton.data.in_memory import name_of
from permtriton.driver.forecast import Forecast
from permtriton.driver.memory_forecast import Devices
from permtriton.driver.pipeline import compile_loaded
from permtriton.driver.prepare import CompileInputs, begin
from permtriton.driver.result import CompiledModel
from permtriton.errors import ConfigError, OutputError
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model import load, outline
from permtriton.model.experts import unstacked_experts
from permtriton.model.name import lasting_name, shown_name
from permtriton.model.prunable import (
    check_loaded,
    check_made_by_config,
    check_not_compiled,
    check_original,
    rehearse_saving,
)
from permtriton.model.shared import shared_linears
from permtriton.model.source import Source, resolve_device
from permtriton.passes.plan import Plan
from permtriton.recipe import compile_command, with_suggested
from permtriton.running.placement import DevicePlacement, allowed_placements
from permtriton.running.resume import Workspace
from permtriton.util import ranks
from permtriton.util.output_files import real_path
from permtriton.util.progress import Progress


@dataclass(frozen=True)
class DryRun:
    """What a compilation would do and need.

    Attributes:
        plan: sites and channel spaces.
        forecast: time, memory and disk.
        config: every option.
        pruned_parameters: number of weights in the linears that would be pruned, kept weights included.
        parameters: number of the model's parameters.
        fetched: whether the weights are on this machine; if not, no time is measured.
    """

    plan: Plan
    forecast: Forecast
    config: CompileConfig
    pruned_parameters: int
    parameters: int
    fetched: bool

    @property
    def report(self) -> dict[str, Any]:
        """The plan and the forecast as JSON values, as ``permtriton compile --dry-run --json`` prints them."""
        forecast = self.forecast
        return {
            **plan_report(self.plan),
            "memory": forecast.memory.report(),
            "seconds": dict(forecast.seconds) or None,  # None where no time was estimated
            "assumed": forecast.assumed,
            "disk": dict(forecast.disk),
            "refused": forecast.refused,
        }


@dataclass(frozen=True)
class Job:
    """One compilation of a model, with its options; `run` and `save` carry it out, in this order."""

    model: Source | PreTrainedModel  # where the model is, or the model in memory
    config: CompileConfig  # every option
    # names of options that the user, a file or a protocol set; defaults of the others may depend on the model
    overrides: Collection[str]
    args: CompileArgs  # all other arguments; ``args.data`` is None or data in memory

    def __post_init__(self) -> None:
        if self.args.tokenizer is not None and not hasattr(self.args.tokenizer, "save_pretrained"):
            raise ConfigError(
                f"tokenizer is a {type(self.args.tokenizer).__name__}: expected a tokenizer or processor, as "
                "AutoTokenizer.from_pretrained returns it"
            )
        permuted = self.config.layout == "fused"
        check_format(self.args.save_format or Format.DENSE, permuted=permuted, what="the compiled model")
        allowed_placements(self.args.shard, self.args.onload)

    @cached_property
    def _source(self) -> Source | None:
        """The source, from which the model is loaded to the CPU, because GPU memory is checked later.

        None for a model in memory.
        """
        return replace(self.model, device="cpu") if isinstance(self.model, Source) else None

    @property
    def placements(self) -> tuple[DevicePlacement, ...]:
        return allowed_placements(self.args.shard, self.args.onload)

    @property
    def output(self) -> Path | None:
        """The output folder, beside which states of long stages are kept; None if nothing is written."""
        return None if self.args.output is None else Path(self.args.output)

    @contextmanager
    def claimed(self, progress: Progress) -> Iterator[None]:
        """Locks the output inside the context, and deletes states on a restart; only the first rank does both."""
        if self.output is None or ranks.number():
            yield
            return
        self._check_apart()
        with claimed(self.output, overwrite=self.args.overwrite, say=progress.say):
            states = Workspace(resume_path=resume_path(self.output)).states if self.args.restart else {}
            for paths in states.values():
                progress.say(f"deleting {paths[0].name}, the state of an interrupted run")
                for path in paths:
                    path.unlink()
            yield

    def run(self, progress: Progress) -> CompiledModel:
        """Loads and compiles the model. Call it inside `claimed`; `save` writes the output."""
        inputs = self._loaded(progress)
        source = self._source and self._source.at_commit()
        compiled = compile_loaded(inputs)
        # A device that holds the compiled model can hold the dense one, too.
        source = source and replace(source, device=compiled.model.device.type, name=lasting_name(source.name))
        return replace(compiled, source=source)

    def _command(self, config: CompileConfig) -> str:
        """Returns a command with the same result; empty for a model in memory."""
        args, source = self.args, self.model
        if not isinstance(source, Source):
            return ""
        return compile_command(
            source.name,
            config,
            eval_data=None if args.eval_data is None else shown_name(name_of(args.eval_data)),
            eval_windows=None if args.eval_windows is None else str(args.eval_windows),
            dtype=None if source.dtype == "auto" else source.dtype,
            gguf_file=source.gguf_file,
            revision=source.revision,
            save_format=args.save_format,
            trust_remote_code=source.trust_remote_code,
        )

    def save(self, compiled: CompiledModel, progress: Progress) -> None:
        """Writes the output, if there is one; only the first rank writes."""
        if self.output is not None and not ranks.number():
            progress.say(f"saving and verifying {self.output}")
            with progress.stage("save", 0):
                compiled.save_pretrained(self.output, format=self.args.save_format, overwrite=self.args.overwrite)

    def dry_run(self, progress: Progress, devices: Devices | None = None) -> DryRun:
        """Loads the model and returns what its compilation would do and need; writes no output.

        If the weights of a hub model are not on this machine, only its config, its tokenizer and the headers of its
        weights are downloaded.

        Args:
            devices: devices to plan for; None for those that the model is on.
        """
        if self.output is not None:
            self._check_apart()
            check_output(self.output, overwrite=True)  # the output of a dry run may exist, but must be writable
        fetched = self._source is None or outline.is_here(self._source)
        inputs = self._loaded(progress, fetched, planned_for=devices)
        if self.args.restart or not fetched:
            inputs = replace(inputs, workspace=Workspace(progress))
        model = inputs.model
        with unstacked_experts(model.eval()), shared_linears(model):
            start, forecast = begin(inputs, devices)
        total = sum(parameter.numel() for parameter in model.parameters())
        return DryRun(start.plan, forecast, inputs.config, start.sizes.pruned, total, fetched)

    def _check_apart(self) -> None:
        """Refuses an output that overlaps an input. The input of a GGUF model is the file, not the file's folder."""
        assert self.output is not None
        source = self._source
        if source is not None:
            check_apart(self.output, source.gguf.path if source.gguf else source.folder)
        for read in (self.config.calibration.calibration, name_of(self.args.eval_data), self.args.config or ""):
            if os.path.exists(read) and real_path(Path(read)).is_relative_to(real_path(self.output)):
                raise OutputError(f"output {self.output} contains {read}, which is an input: choose another folder")

    def _loaded(self, progress: Progress, fetched: bool = True, planned_for: Devices | None = None) -> CompileInputs:
        """Reads the model and its data.

        Args:
            fetched: whether the weights are on this machine.
            planned_for: devices to plan for in place of this machine's; if set, no default text is read.
        """
        source, args = self._source, self.args
        gguf = source.gguf if source else None
        model: Any = self.model
        tokenizer = args.tokenizer
        device = resolve_device(args.device) if source is not None and planned_for is None else None
        if source is not None:
            if fetched:
                model, beside = load.load_original(source, saved=True, progress=progress)
            else:
                model, beside = outline.load_outline(source, progress)
            tokenizer = tokenizer or beside
        else:
            check_loaded(model)
            check_not_compiled(model)
            if self.output is not None:
                rehearse_saving(f"this {type(model).__name__}", model, tokenizer)
                check_made_by_config(model)
        check_original(model)
        no_text = planned_for is not None and "calibration" not in self.overrides
        held_out, text = read_held_out(
            source.name if source else "",
            "none" if no_text and args.eval_data is None else args.eval_data,
            tokenizer,
            model,
            count=args.eval_windows,
            special_tokens=self.config.calibration.special_tokens,
            progress=progress,
        )
        if held_out is None:
            progress.say(f"no held-out evaluation: {text}")
        if args.save_format == Format.FP8:
            check_quantizable(model)
        calibration = fitted(self.config.calibration, self.overrides, model, progress)
        # The sequence length decides the suggested batch size, and so how much text is drawn.
        config = with_suggested(replace(self.config, calibration=calibration), self.overrides)
        data = stand_in(calibration, model) if no_text else args.data
        with progress.stage("calibration text", 0):
            samples, config = calibration_samples(config, tokenizer, model, data, self.overrides)
        if data is not None:
            config = with_suggested(config, self.overrides)  # data in memory decide the number of samples
        entries = {
            "command": self._command(config),
            "gguf": {"file": gguf.path.name, "tensors": gguf.types} if gguf else None,
        }
        return CompileInputs(
            model,
            config,
            samples,
            tokenizer=tokenizer,
            held_out=held_out,
            workspace=Workspace(progress, self.output and resume_path(self.output)),
            say_needs=True,
            device=device,
            placements=self.placements,
            save_format=args.save_format,
            text=text,
            record={name: value for name, value in entries.items() if value},
        )
