"""The functions of ``import permtriton``: what may be asked for, and by which names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from permtriton.checkpoint import export as exporting
from permtriton.checkpoint.format import Format
from permtriton.checkpoint.plan_entries import plan_report
from permtriton.comparison.asked import AskedComparison
from permtriton.data.in_memory import is_named, selected
from permtriton.driver import adapt as adapting
from permtriton.driver import planning
from permtriton.driver.asked import Asked
from permtriton.driver.job import DryRun, Job
from permtriton.driver.result import CompiledModel
from permtriton.errors import ConfigError, near
from permtriton.evaluation.compare import Comparison
from permtriton.evaluation.report import report as write_report
from permtriton.methods.step import Step
from permtriton.model import load
from permtriton.model.name import checked_token, location_of
from permtriton.model.source import Source, source_of
from permtriton.passes.plan import Plan
from permtriton.recipe import all_options, build_config, given_by, steps_of
from permtriton.util.asking import arguments, asking_with_options
from permtriton.util.bars import Shown, reporter
from permtriton.util.machine import as_torch_starts
from permtriton.util.output_files import path_of, real_path
from permtriton.util.sparsity import NMPattern

Model: TypeAlias = PreTrainedModel | str | Path


@asking_with_options(Asked)
def compile(model: Model, asked: Asked, options: dict[str, Any]) -> CompiledModel:
    """Prunes a model to N:M sparsity in the best channel order, as ``permtriton compile`` does.

    Args:
        model: folder, hub name, .gguf file or ``demo``; or a loaded transformers model, which is changed in place.
        recipe: ``default``, ``best``, ``fast``, ``values`` or ``permllm``, or steps: their names separated by commas
            (``my_steps.py:Mine`` for one of yours), or a list of them. `permtriton.recipes` describes them.
        protocol: ``wanda`` or ``permllm`` for their calibration data: 128 sequences of 2048 or 1024 tokens of ``c4``,
            each drawn from one document; options that are given win over it.
        data: calibration data:

            - a name: ``c4`` (the default), ``wikitext2``, ``pile``, ``demo``, or that of a dataset on the hub;
            - a .txt, .jsonl or .parquet file of text, or a .safetensors file with the tensors that the model reads;
            - a list of texts or of lists of token ids, or a ``datasets.Dataset``; they are joined, and cut into
              ``samples`` sequences of ``sequence_length`` tokens;
            - token ids in a tensor ``[samples, tokens]``, a dict of tensors by the names of arguments of the model's
              ``forward``, or a ``DataLoader`` of batches of either. They are taken as they are: the first ``samples``
              rows; without ``samples``, all rows of tensors and 128 of a DataLoader.
        text_column: column of a ``datasets.Dataset``, a dataset on the hub or a .jsonl or .parquet file; None for
            ``input_ids`` or ``text``.
        split: name of the dataset to take from a ``DatasetDict``, or part of a dataset on the hub.
        tokenizer: tokenizer or processor of a loaded model; text needs it, and it is saved with the model.
        eval_data: held-out data, of the same kinds as ``data``, on which the dense and the compiled model are measured
            for the report; None for ``wikitext2`` (``demo`` for the demo model), ``none`` for no measurement.
        eval_windows: number of its windows to measure, the first ones; None for all.
        config: TOML file of options; ``options`` and ``data`` win.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``, for a model that is loaded here.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``float16`` or ``bfloat16``, for a model that is loaded here.
        trust_remote_code: whether code that comes with the model may run.
        gguf_file: name of a GGUF file in the folder or beside the hub name, which is read instead and dequantized.
        revision: branch, tag or commit of a hub name; None for its main branch.
        token: token of the hub, for reading the model and publishing; None for that of ``hf auth login`` or
            ``HF_TOKEN``, which is used for datasets, too. It is never printed or saved.
        output: folder to write, too. It keeps the state of long stages beside it: after an interruption, the same call
            continues.
        save_format: ``packed``, ``dense``, ``plain`` or ``fp8``, as ``format`` of `CompiledModel.save_pretrained`.
        push_to_hub: name of a repository on the hub to publish ``output`` in, such as ``me/my-model-2of4``. It is made
            before the work, so that a wrong name or token is found then.
        private: whether that repository, where it is new, is private; None for the default of its owner.
        overwrite: whether an earlier output may be replaced.
        restart: whether to start from scratch instead of resuming.
        shard: in processes that ``torchrun`` started, whether to spread the weights of layers over the GPUs; None does
            where one cannot hold them.
        onload: whether the model stays in host memory and its layers come to the GPU one by one; None does where the
            GPU cannot hold it. Not for steps that need all weights at once.
        progress: True draws the bars of the command line; a function is called with each `permtriton.Event`.
        options: every other option of ``permtriton compile``, with underscores: ``sparsity``, ``samples``,
            ``sequence_length``, ``layout``, ``targets``, ``ignore``, ``seed``, ``learn_epochs`` and so on;
            docs/options.md lists them. Texts stand for what they mean on the command line.

    Returns:
        The compiled model: `CompiledModel.evaluate`, `~CompiledModel.save_pretrained`, `~CompiledModel.push_to_hub`,
        and its ``report``.

    Raises:
        PermTritonError: a bad option, model or text, too little memory or disk, or a failed check. A loaded model may
            then be partly changed.

    Example:
        >>> import permtriton
        >>> compiled = permtriton.compile("my-model", data="my-text.txt", recipe="fast", samples=16, sequence_length=32)
        >>> compiled.report["config"]["recipe"]
        'refit'
    """
    job, reports = _job(model, asked, options), reporter(asked.progress)
    with job.claimed(reports):
        compiled = job.run(reports)
        job.save(compiled, reports)
    job.publish(compiled, reports)
    return compiled


@asking_with_options(Asked)
def dry_run(model: Model, asked: Asked, options: dict[str, Any]) -> DryRun:
    """Returns what `compile` would do and what it would need, as ``permtriton compile --dry-run``; changes nothing.

    Args:
        model: as `compile` takes it.
        asked: everything else that `compile` takes.
        options: as `compile` takes them.

    Raises:
        PermTritonError: as `compile` up to its plan. Too little memory is no error here, but then no time is measured.

    Example:
        >>> import permtriton
        >>> planned = permtriton.dry_run("my-model", data="my-text.txt", recipe="fast", samples=16, sequence_length=32)
        >>> planned.forecast.seconds
        {'refit': ...}
    """
    return _job(model, asked, options).dry_run(reporter(asked.progress))


@as_torch_starts()
def inspect(
    model: Model,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns what would be pruned, and where each permutation would go, as ``permtriton inspect --json`` prints it.

    Args:
        model: folder, hub name or ``demo``, of which only the config is read; or a loaded transformers model.
        trust_remote_code: whether code that comes with the model may run.
        gguf_file, revision, token: as `compile` takes them.
        options: ``sparsity``, ``pattern``, ``layout``, ``o_proj``, ``skip_indivisible``, ``targets`` and ``ignore``, as
            `compile` takes them.

    Returns:
        ``sites``, ``patterns`` (by linear), ``permutations``, ``skipped`` (what stays dense, and why), ``barriers``,
            ``parameters``, ``pruned_parameters``, ``dense_bytes`` and ``packed_bytes``; see docs/formats.md.

    Raises:
        PermTritonError: a bad option, or a model that cannot be read or traced.

    Example:
        >>> import permtriton
        >>> permtriton.inspect("demo", layout="fused")["skipped"]
        {'model.embed_tokens.weight': 'output head, tied to the embedding'}
    """
    given = _parsed(options)
    chosen = build_config(_name(model), None, given, given)
    loading = {"trust_remote_code": trust_remote_code, "gguf_file": gguf_file, "revision": revision, "token": token}
    source = source_of(model, **loading)
    if isinstance(source, Source):
        model = load.load_empty_model(source)
    assert isinstance(model, PreTrainedModel)
    plan, _ = planning.plan_model(model, chosen)
    return {**plan_report(plan), **planning.sizes(model, plan)}


@as_torch_starts()
def find_plan(model: PreTrainedModel, sparsity: NMPattern | str, **options: Any) -> Plan:
    """Returns the plan of a loaded model; weights are not needed, so it may be on the meta device.

    Args:
        options: as `inspect` takes them.

    Raises:
        PermTritonError: as `inspect`.
    """
    given = _parsed({"sparsity": sparsity, **options})
    return planning.plan_model(model, build_config("", None, given, given))[0]


@asking_with_options(AskedComparison)
def compare(model: str | Path, asked: AskedComparison, options: dict[str, Any]) -> dict[str, Any]:
    """Prunes a model by every method on the same text and measures each, as ``permtriton compare``; saves no model.

    Args:
        model: folder, hub name, .gguf file or ``demo``.
        protocol: ``wanda`` or ``permllm`` for what these papers do: calibration as `compile` takes it, text, windows
            and tasks as `permtriton.evaluate` does; what is given beside it wins.
        eval_data, window, eval_windows, tasks, limit, tasks_dir: as `permtriton.evaluate` takes them.
        seeds: seeds of the calibration draw and of learning.
        methods: methods, recipes, steps joined by ``" + "``, or lists of steps, such as ``["wanda", [Heuristic(),
            Mine()]]``; None for all methods.
        sparsity: N:M pattern, or several, such as ``["2:4", "4:8"]``; None for 2:4.
        ablate: option of which each method is run with several values.
        values: these values.
        config, device, dtype, trust_remote_code, gguf_file, revision, token, progress: as `compile` takes them.
        output: JSON file to write the report to. Finished results are kept beside it,
            so that the same call, also with more methods, continues.
        overwrite: whether everything is measured again, and earlier files are replaced.
        options: as `compile` takes them, but for the recipe, which each row has.

    Returns:
        What ``permtriton compare --json`` prints: ``rows``, the dense model's first, each with ``method``, ``mean``,
            ``kl``, ``cosine``, ``tasks`` and what else is known of it.

    Raises:
        PermTritonError: as `compile` and `permtriton.evaluate`, or a method that is unknown.

    Example:
        >>> import permtriton
        >>> calibration = {"calibration": "my-text.txt", "samples": 4, "sequence_length": 32}
        >>> report = permtriton.compare("my-model", eval_data="my-heldout.txt", methods=["wanda"], **calibration)
        >>> [row["method"] for row in report["rows"]]
        ['dense', 'wanda']
    """
    asked = replace(asked, config=_path("config", asked.config), tasks_dir=_path("tasks_dir", asked.tasks_dir))
    return Comparison.of(location_of(model), asked, _parsed(options)).run(reporter(asked.progress))


def export(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    format: str = Format.PACKED,
    overwrite: bool = False,
    progress: Shown = False,
) -> dict[str, Any]:
    """Rewrites a compiled folder in another format, as ``permtriton export`` does.

    Args:
        folder: folder that permtriton wrote.
        output: folder to write; None for ``FOLDER-FORMAT`` in the present folder.
        format: ``packed``, ``dense`` or ``plain``: the same weights bit for bit; or ``fp8``: 8 bits, whose zeros are
            the same.
        overwrite: whether an earlier output of permtriton may be replaced.
        progress: as `compile` takes it.

    Returns:
        ``output``, and the entry ``export`` of its ``permtriton.json``: sizes, how it was compared, and of ``fp8``
            the loss that it adds.

    Raises:
        PermTritonError: an unknown format, a folder that cannot be read or written, or a failed check.

    Example:
        >>> import permtriton
        >>> permtriton.export("my-model-2of4", format="packed")["output"]
        'my-model-2of4-packed'
    """
    place = path_of("folder", folder)
    target = path_of("output", f"{real_path(place).name}-{format}" if output is None else output)
    result = exporting.export(place, target, format, overwrite=overwrite, progress=reporter(progress))
    return {"output": str(target), **result}


def adapt(
    adapter: str | Path, to: str | Path, output: str | Path | None = None, *, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Writes an adapter that was trained on the dense model for a compiled folder, as ``permtriton adapt`` does.

    In a folder of layout ``portable``, channels have another order; the adapter is brought into it, exactly.

    Args:
        adapter: folder that PEFT's ``save_pretrained`` wrote: LoRA (DoRA, AdaLoRA), IA3, or a soft prompt.
        to: folder that permtriton compiled from that dense model.
        output: folder to write; None for ``ADAPTER-for-FOLDER`` in the present folder.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        ``output``, and the number of ``tensors``, and of those that were ``reordered``.

    Raises:
        PermTritonError: an adapter of another kind or model, layout ``fused``, or the output cannot be written.
    """
    source, folder = path_of("adapter", adapter), path_of("to", to)
    default = f"{real_path(source).name}-for-{real_path(folder).name}"
    target = path_of("output", default if output is None else output)
    return adapting.adapt(source, folder, target, trust_remote_code=trust_remote_code)


def report(
    folders: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    comparison: str | Path | None = None,
    masks: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes one HTML page about compiled folders, as ``permtriton report`` does.

    Args:
        folders: one folder that permtriton wrote, or several, which are shown side by side.
        output: file to write; None for ``FOLDER-report.html`` in the present folder, by the first folder's name.
        comparison: JSON report of ``permtriton compare``, whose table is shown, too.
        masks: name of the linear whose masks are drawn side by side; None for the last one of the first layer.
        overwrite: whether an earlier file may be replaced.

    Returns:
        The absolute path of the file.

    Raises:
        PermTritonError: a folder cannot be read, or the file cannot be written.

    Example:
        >>> import permtriton
        >>> permtriton.report(["my-model-2of4", "my-model-2of4-fused"], "report.html").name
        'report.html'
    """
    several: Sequence[Any] = folders if isinstance(folders, list | tuple) else [folders]
    named = [path_of("folders", each) for each in several]
    page, compared = _path("output", output), _path("comparison", comparison)
    return write_report(named, page, comparison=compared, masks=masks, overwrite=overwrite)


def _job(model: Model, asked: Asked, options: Mapping[str, Any]) -> Job:
    """Returns the job that the arguments of `compile` ask for."""
    if asked.output is None and (asked.overwrite or asked.restart):
        raise ConfigError(
            "`overwrite=` and `restart=` have no effect without `output=`: name a folder, or leave them out"
        )
    if asked.save_format is not None and asked.output is None:
        raise ConfigError("`save_format=` has no effect without `output=`: leave it out")
    options = _parsed(options, asked.recipe)
    data, of_text = asked.data, {"text_column": asked.text_column, "split": asked.split}
    if data is None or is_named(data):
        options |= {name: value for name, value in of_text.items() if value is not None}
    else:
        data = selected(data, asked.text_column, asked.split)
    held_out_columns = getattr(asked.eval_data, "column_names", ())
    eval_data = selected(asked.eval_data, asked.text_column if asked.text_column in held_out_columns else None)
    if data is not None and "calibration" in options:
        raise ConfigError("`data=` and `calibration=` are two names of one thing: give one of them")
    if is_named(data):
        options["calibration"], data = str(data), None
    asked = replace(
        asked,
        data=data,
        eval_data=eval_data,
        config=_path("config", asked.config),
        output=_path("output", asked.output),
    )
    given = given_by(asked.config, options, asked.protocol, _name(model))
    chosen = build_config(_name(model), asked.recipe, given, options)
    return Job(source_of(model, **asked.loading), chosen, given, replace(asked, token=checked_token(asked.token)))


def _path(what: str, name: str | Path | None) -> Path | None:
    return None if name is None else path_of(what, name)


def _name(model: Model) -> str:
    return location_of(model) if isinstance(model, str | Path) else ""


def _parsed(options: Mapping[str, Any], recipe: str | Sequence[Step] | None = None) -> dict[str, Any]:
    """Returns options with texts as the values that they stand for on the command line; None is the default.

    Raises:
        ConfigError: an unknown option; the message names those like it.
    """
    known = all_options(None if recipe is None else steps_of(recipe))
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name}{near(name, [*known, *(each.name for each in arguments(Asked))])}")
    return {name: known[name].parse(value) for name, value in options.items() if value is not None}
