"""The functions of ``import permtriton``."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from permtriton.arguments import CompareArgs, CompileArgs, EvaluateArgs, Words
from permtriton.checkpoint import export as exporting
from permtriton.checkpoint.formats import Format
from permtriton.checkpoint.plan_entries import plan_report
from permtriton.data.in_memory import Data, is_named, selected
from permtriton.data.media import Processor
from permtriton.driver.job import DryRun, Job
from permtriton.driver.result import CompiledModel
from permtriton.errors import ConfigError
from permtriton.evaluation import compare as comparing
from permtriton.evaluation.evaluate import Against, Evaluated, Model, evaluate_with
from permtriton.methods import planning
from permtriton.methods.step import Step
from permtriton.model import load
from permtriton.model.name import location_of
from permtriton.model.source import Source, source_of
from permtriton.recipe import resolve
from permtriton.util.bars import Shown, reporter
from permtriton.util.machine import as_torch_starts
from permtriton.util.output_files import path_of, real_path

Args = TypeVar("Args", CompileArgs, CompareArgs, EvaluateArgs)


@as_torch_starts()
def compile(
    model: Model,
    *,
    recipe: str | Sequence[Step] | None = None,
    protocol: str | None = None,
    data: Data | None = None,
    text_column: str | None = None,
    split: str | None = None,
    tokenizer: Processor | None = None,
    eval_data: Data | None = "none",
    eval_windows: int | None = None,
    config: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Shown = False,
    output: str | Path | None = None,
    save_format: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    shard: bool | None = None,
    onload: bool | None = None,
    **options: Any,
) -> CompiledModel:
    """Prunes a model to N:M sparsity in the best channel order, as ``permtriton compile`` does.

    Args:
        model: folder, hub name, .gguf file or ``demo``; or a loaded transformers model, which is changed in place.
        recipe: ``default``, ``best``, ``fast``, ``values`` or ``permllm``, or steps: their names separated by commas,
            or a list of them, which may hold steps of yours. `permtriton.recipes` describes them.
        protocol: ``wanda`` or ``permllm`` for the calibration data of that paper: 128 sequences of 2048 or 1024 tokens
            of ``c4``, each from one document, without special tokens around it; options that are given take precedence.
        data: calibration data:

            - a name: ``c4`` (the default), ``wikitext2``, ``pile``, ``demo``, or that of a dataset on the hub;
            - a .txt, .jsonl or .parquet file of text, or a .safetensors file with the tensors that the model reads;
            - a list of texts or of lists of token ids, or a ``datasets.Dataset``; documents are joined, and cut into
              ``samples`` sequences of ``sequence_length`` tokens;
            - token ids in a tensor ``[samples, tokens]``, a dict of tensors by the names of arguments of the model's
              ``forward``, or a ``DataLoader`` of batches of either. The first ``samples`` rows are taken unchanged;
              without ``samples``, all rows of tensors and 128 of a DataLoader.
        text_column: column of a ``datasets.Dataset``, a dataset on the hub or a .jsonl or .parquet file; None for the
            first that it has of ``input_ids``, ``text``, ``messages`` and ``conversations``.
        split: part of a dataset on the hub.
        tokenizer: tokenizer or processor of a loaded model; text needs it, and it is saved with the model.
        eval_data: held-out data, of the same kinds as ``data``, on which the dense and the compiled model are measured
            for the report; None for ``wikitext2`` (``demo`` for the demo model), ``none`` for no measurement.
        eval_windows: number of windows of ``eval_data`` to measure, the first ones; None for all.
        config: TOML file of options; ``options`` and ``data`` take precedence.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``, for a model that this call loads.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``float16`` or ``bfloat16``, for a model that this call loads.
        trust_remote_code: whether code that comes with the model may run.
        gguf_file: name of a GGUF file in the folder or the hub repository, whose weights are read and dequantized.
        revision: branch, tag or commit of a model on the hub; None for its main branch.
        token: token of the hub, for reading the model; None for the token of ``hf auth login`` or ``HF_TOKEN``, which
            is used for datasets, too. It is never printed or saved.
        output: folder to write the model to. States of long stages are kept beside it, so that after an interruption
            the same call continues. None writes nothing.
        save_format: format of ``output``, as ``format`` of `CompiledModel.save_pretrained`.
        overwrite: whether an earlier output may be replaced.
        restart: whether to start from scratch instead of resuming.
        shard: in processes that ``torchrun`` started, whether to spread the weights of layers over the GPUs; None does
            so if one GPU cannot hold them.
        onload: whether the model stays in host memory and its layers come to the GPU one by one; None does so if the
            GPU cannot hold the model. Refused for steps that need all weights at once.
        progress: True draws the bars of the command line; a function is called with each `permtriton.Event`.
        options: every other option of ``permtriton compile``, with underscores: ``sparsity``, ``samples``,
            ``sequence_length``, ``layout``, ``targets``, ``ignore``, ``seed``, ``learn_epochs`` and so on;
            docs/options.md lists them. Strings are read as on the command line.

    Returns:
        The compiled model, with `CompiledModel.evaluate`, `~CompiledModel.save_pretrained`, and its ``report``.

    Raises:
        PermTritonError: a bad option, model or text, too little memory or disk, or a failed check. A loaded model may
            then be partly changed.

    Example:
        >>> import permtriton
        >>> compiled = permtriton.compile("my-model", data="my-text.txt", recipe="fast", samples=16, sequence_length=32)
        >>> compiled.report["config"]["recipe"]
        'refit'
    """
    job = _job(model, _collected(CompileArgs, locals()), options)
    reports = reporter(progress)
    with job.claimed(reports):
        compiled = job.run(reports)
        job.save(compiled, reports)
    return compiled


@as_torch_starts()
def dry_run(model: Model, **arguments: Any) -> DryRun:
    """Returns what `compile` would do and need, as ``permtriton compile --dry-run`` does; writes no output.

    Args:
        model: as `compile` takes it.
        arguments: all other arguments of `compile`.

    Raises:
        PermTritonError: as `compile` up to its plan. Too little memory is no error here, but then no time is estimated.

    Example:
        >>> import permtriton
        >>> planned = permtriton.dry_run("my-model", data="my-text.txt", recipe="fast", samples=16, sequence_length=32)
        >>> planned.forecast.seconds
        {'refit': ...}
    """
    args = CompileArgs(
        **{part.name: arguments.pop(part.name) for part in fields(CompileArgs) if part.name in arguments}
    )
    return _job(model, args, arguments).dry_run(reporter(args.progress))


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
        model: folder, hub name or ``demo``, of which no weights are read; or a loaded transformers model.
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
    config, _ = resolve(_name(model), _not_none(options))
    source = source_of(model, trust_remote_code=trust_remote_code, gguf_file=gguf_file, revision=revision, token=token)
    if isinstance(source, Source):
        model = load.load_empty_model(source)
    assert isinstance(model, PreTrainedModel)
    plan, _ = planning.plan_model(model, config)
    return {**plan_report(plan), **planning.sizes(model, plan)}


@as_torch_starts()
def evaluate(
    model: Model,
    eval_data: Data | None = None,
    *,
    protocol: str | None = None,
    window: int | None = None,
    eval_windows: int | None = None,
    tasks: str | Sequence[str] | None = None,
    limit: int | None = None,
    tasks_dir: str | Path | None = None,
    special_tokens: str | None = None,
    against: Against = None,
    tokenizer: Processor | None = None,
    hidden_order: Tensor | None = None,
    text_column: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Shown = False,
) -> Evaluated:
    """Measures a model, dense or compiled in any format: perplexity, distance from the dense model, zero-shot tasks.

    Args:
        model: folder, hub name or ``demo``, or a loaded model, which is measured unchanged.
        eval_data: held-out text: ``wikitext2``, ``c4``, ``demo``, a file, or ``none`` for tasks alone; or
            texts, token ids or tensors in memory, as `permtriton.compile` takes them. None for ``demo`` with the demo
            model, else ``wikitext2``.
        protocol: ``wanda`` or ``permllm`` for what these papers measure: ``wikitext2`` in windows of 2048 tokens, and
            Wanda's seven tasks or PermLLM's five, without special tokens; arguments that are given take precedence.
        window: tokens per window; None for 2048, or the model's limit if that is lower.
        eval_windows: number of windows to measure, the first ones; None for all.
        special_tokens: ``auto`` for the special tokens around each window that the tokenizer puts around a single text;
            ``none`` for none. None for the protocol's value, or ``auto`` without a protocol.
        against: the dense model, its folder or its hub name, to measure its perplexity, and the KL and the cosine of
            both models, too. A named model is loaded for this call only, and both are in memory at once.
        tokenizer: tokenizer or processor of a loaded model; text needs it.
        hidden_order: index ``[C]`` from the dense model's channels of the last hidden state to those of ``model``; None
            where they did not move, or for a folder, whose record holds the index.
        tasks: tasks of lm-eval: names in a list, or separated by commas.
        limit: documents per task; None for all.
        tasks_dir: folder with more tasks: lm-eval's YAML files. A task may run code, so use only what you trust.
        batch_size: windows, or requests of tasks, per forward pass; None for as many windows as make 2048 tokens, and 8
            requests.
        text_column: of a dataset in memory, as `permtriton.compile` takes it.
        gguf_file, revision: as `permtriton.compile` takes them, for ``model``.
        device, dtype, trust_remote_code, token, progress: as `permtriton.compile` takes them, for both models.

    Raises:
        ConfigError: there is nothing to measure, or an option makes no sense.
        ModelError: a model cannot be loaded, or the two cannot be compared.
        CalibrationError: the text cannot be read, or a measure is not finite.
        TaskError: a task cannot be run.
        MemoryTooSmallError: the GPU cannot hold both models, or memory runs out with one window per forward pass.
        MissingExtraError: a package for tasks or data is not installed.

    Example:
        >>> import permtriton
        >>> measured = permtriton.evaluate("my-model-2of4", "my-heldout.txt", against="my-model")
        >>> print(measured)
        perplexity ..., dense ..., KL ..., cosine ... on my-heldout.txt (...)
    """
    return evaluate_with(model, _collected(EvaluateArgs, locals()))


@as_torch_starts()
def compare(
    model: str | Path,
    eval_data: Data | None = None,
    *,
    protocol: str | None = None,
    window: int | None = None,
    eval_windows: int | None = None,
    tasks: str | Sequence[str] | None = None,
    limit: int | None = None,
    tasks_dir: str | Path | None = None,
    seeds: int | str | Sequence[int] = 0,
    methods: Words = None,
    sparsity: Words = None,
    ablate: str | None = None,
    values: Words = None,
    config: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Shown = False,
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Prunes a model by every method on the same text and measures each, as ``permtriton compare``; saves no model.

    Args:
        model: folder, hub name, .gguf file or ``demo``.
        protocol: ``wanda`` or ``permllm`` for what these papers do: calibration as `compile` takes it, text, windows
            and tasks as `permtriton.evaluate` does; arguments beside it take precedence.
        eval_data, window, eval_windows, tasks, limit, tasks_dir: as `permtriton.evaluate` takes them.
        seeds: seeds of the calibration draw and of learning.
        methods: methods, recipes, steps joined by ``" + "``, or lists of steps, such as ``["wanda", [Heuristic(),
            Mine()]]``; None for all methods, or for the default recipe with ``ablate``.
        sparsity: N:M pattern, or several, such as ``["2:4", "4:8"]``; None for 2:4.
        ablate: name of an option; each method is run with each of ``values``.
        values: values of the option that ``ablate`` names.
        config, device, dtype, trust_remote_code, gguf_file, revision, token, progress: as `compile` takes them.
        output: JSON file to write the report to. Finished results are kept beside it, so that the same call, also with
            more methods, continues.
        overwrite: whether to measure everything again, and to replace earlier files.
        options: as `compile` takes them, except the recipe: each row has its own.

    Returns:
        What ``permtriton compare --json`` prints: ``rows``, the dense model's first, each with ``method``, ``mean``,
            ``kl``, ``cosine``, ``tasks`` and further measurements.

    Raises:
        PermTritonError: as `compile` and `permtriton.evaluate`, or a method that is unknown.

    Example:
        >>> import permtriton
        >>> calibration = {"calibration": "my-text.txt", "samples": 4, "sequence_length": 32}
        >>> report = permtriton.compare("my-model", eval_data="my-heldout.txt", methods=["wanda"], **calibration)
        >>> [row["method"] for row in report["rows"]]
        ['dense', 'wanda']
    """
    args = _collected(CompareArgs, locals())
    args = replace(args, config=_path("config", config), tasks_dir=_path("tasks_dir", tasks_dir))
    return comparing.compare(location_of(model), args, _not_none(options), reporter(progress))


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
        output: folder to write; None for ``FOLDER-FORMAT`` in the current folder.
        format: ``packed`` or ``dense``: the same weights bit for bit; or ``packed-fp8`` or ``fp8``: weights in 8 bits,
            in which pruned weights stay zero.
        overwrite: whether an earlier output of permtriton may be replaced.
        progress: as `compile` takes it.

    Returns:
        ``output``, and the entry ``export`` of its ``permtriton.json``: sizes, what loads it, and in 8 bits how many
            linears are quantized, how many of them were not rounded before, and how many weights became zero.

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


def _collected(kind: type[Args], values: Mapping[str, Any]) -> Args:
    """Returns the dataclass ``kind`` with values by field name, such as a function's local variables."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def _job(model: Model, args: CompileArgs, options: Mapping[str, Any]) -> Job:
    for name in ("overwrite", "restart", "save_format"):
        if args.output is None and getattr(args, name):
            raise ConfigError(f"`{name}=` has no effect without `output=`: name a folder, or leave it out")
    data, options = args.data, _not_none(options)
    if data is None or is_named(data):
        options |= _not_none({"text_column": args.text_column, "split": args.split})
    else:
        data = selected(data, args.text_column, args.split)
    held_out_columns = getattr(args.eval_data, "column_names", ())
    eval_data = selected(args.eval_data, args.text_column if args.text_column in held_out_columns else None)
    if data is not None and "calibration" in options:
        raise ConfigError("`data=` and `calibration=` are two names of one thing: give one of them")
    if is_named(data):
        options["calibration"], data = str(data), None
    args = replace(
        args,
        data=data,
        eval_data=eval_data,
        config=_path("config", args.config),
        output=_path("output", args.output),
    )
    config, overrides = resolve(_name(model), options, args.recipe, args.config, args.protocol, args.save_format)
    return Job(source_of(model, **args.loading), config, overrides, args)


def _path(what: str, name: str | Path | None) -> Path | None:
    return None if name is None else path_of(what, name)


def _name(model: Model) -> str:
    return location_of(model) if isinstance(model, str | Path) else ""


def _not_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
