"""Calibration text as token ids, and what a dense model's activations say about its channels."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.config import CalibrationConfig
from permtriton.errors import CalibrationError
from permtriton.experts import routed
from permtriton.forward import last_hidden_state
from permtriton.modules import SparseLinear
from permtriton.plan import Site, linear_module
from permtriton.progress import Advance, Progress

if TYPE_CHECKING:
    from datasets import Dataset

DEMO_FOLDER = Path(__file__).parent / "demo"

# name -> arguments of datasets.load_dataset: the subsets that PermLLM, Wanda and SparseGPT calibrate on.
HUB_DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"path": "allenai/c4", "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}, "split": "train"},
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "train"},
    "pile": {"path": "mit-han-lab/pile-val-backup", "split": "validation"},
}
# The held-out split of the one that has a customary one.
HUB_EVALUATION: dict[str, dict[str, Any]] = {"wikitext2": {**HUB_DATASETS["wikitext2"], "split": "test"}}
LINE_BY_LINE = "wikitext2"  # whose rows are lines of one text, customarily joined by blank lines
SURPLUS = 4  # tokens encoded for each token drawn, so that windows are a sample of the documents


def calibration_ids(
    config: CalibrationConfig, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, seed: int
) -> Tensor:
    """Draws calibration sequences.

    Args:
        config: source, number and length.
        tokenizer: of the model; may be None where the source holds ``input_ids``.
        vocabulary: rows of the model's embedding; every id must be below it.
        seed: of the draw.

    Returns:
        int64 ``[samples, sequence_length]``: windows that do not overlap.

    Raises:
        CalibrationError: a source that cannot be read or holds too little, or ids outside the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = config.samples * config.sequence_length
    stream = _encode(config.calibration, HUB_DATASETS, "calibration.txt", tokenizer, vocabulary, wanted, generator)
    windows = stream.numel() // config.sequence_length
    if windows < config.samples:
        raise CalibrationError(
            f"{config.calibration} holds {stream.numel():,} tokens, {windows} sequences of {config.sequence_length}: "
            f"{config.samples} are asked for. Lower --samples or --sequence-length, or give more text"
        )
    slack = stream.numel() - windows * config.sequence_length
    offset = int(torch.randint(0, slack + 1, (1,), generator=generator))
    order = torch.randperm(windows, generator=generator)[: config.samples]
    return stream[offset : offset + windows * config.sequence_length].view(windows, -1)[order].contiguous()


def evaluation_ids(
    source: str, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, sequence_length: int
) -> Tensor:
    """Returns held-out text as consecutive windows, int64 ``[windows, sequence_length]``.

    Args:
        source: ``demo``, ``wikitext2`` or a local file.
        tokenizer: of the model.
        vocabulary: rows of the model's embedding.
        sequence_length: tokens in a window; shorter text gives one shorter window.

    Raises:
        CalibrationError: as `calibration_ids`.
    """
    stream = _encode(source, HUB_EVALUATION, "heldout.txt", tokenizer, vocabulary, None, None)
    length = min(sequence_length, stream.numel())
    if length < 2:
        raise CalibrationError(f"{source} holds {stream.numel()} tokens: at least 2 are needed to evaluate")
    return stream[: stream.numel() // length * length].view(-1, length)


def ids_hash(ids: Tensor) -> str:
    """Returns the SHA-256 of token ids, so that two runs can be known to have seen the same."""
    return hashlib.sha256(str(tuple(ids.shape)).encode() + ids.to(torch.int64).numpy().tobytes()).hexdigest()


def _encode(
    source: str,
    hub: dict[str, dict],
    demo_file: str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    wanted: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Encodes documents, in a random order where ``generator`` is given, until there is plenty of them."""
    documents = _documents(source, hub, demo_file)
    if not len(documents):
        raise CalibrationError(f"{source} is empty: no text to use")
    order = torch.randperm(len(documents), generator=generator).tolist() if generator else range(len(documents))
    pieces, total = [], 0
    for position in order:
        document = documents[position]
        ids = _tokenize(document, tokenizer, source) if isinstance(document, str) else _whole_numbers(document, source)
        piece = torch.tensor(ids, dtype=torch.int64)
        pieces.append(piece)
        total += piece.numel()
        if wanted is not None and total >= SURPLUS * wanted:
            break
    stream = torch.cat(pieces)
    if not stream.numel():
        raise CalibrationError(f"{source} is empty: no text to use")
    low, high = int(stream.min()), int(stream.max())
    if low < 0 or high >= vocabulary:
        raise CalibrationError(
            f"{source}: token ids run from {low} to {high}, but the model's vocabulary is 0 to {vocabulary - 1}: "
            "the tokenizer or the ids belong to another model"
        )
    return stream


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase | None, source: str) -> list[int]:
    if tokenizer is None:
        raise CalibrationError(f"{source} holds text, but the model has no tokenizer: give a .jsonl with input_ids")
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or not ids or ids[-1] == end else [*ids, end]


def _whole_numbers(document: Any, source: str) -> list[int]:
    if isinstance(document, list) and all(isinstance(i, int) and -(2**63) <= i < 2**63 for i in document):
        return document
    raise CalibrationError(
        f"{source} holds {str(document)[:40]!r}: text must be a string, input_ids a list of whole numbers from the "
        "vocabulary"
    )


def _documents(source: str, hub: dict[str, dict], demo_file: str) -> Sequence[Any]:
    if source == "demo":
        return [(DEMO_FOLDER / demo_file).read_text(encoding="utf-8")]
    if source in hub:
        dataset = _from_hub(source, hub[source])
        documents = dataset[_column(dataset.column_names, source)]
        return ["\n\n".join(documents)] if source == LINE_BY_LINE else documents
    path = Path(source)
    if not path.is_file():
        raise CalibrationError(
            f"{source} is neither a file nor one of {', '.join(['demo', *hub])}: give one of these, "
            "or a local .txt, .jsonl or .parquet"
        )
    if path.suffix == ".txt":
        return [text] if (text := _read(path)).strip() else []
    if path.suffix in (".jsonl", ".json"):
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise CalibrationError(
        f"{source}: a {path.suffix or 'nameless'} file is not understood: give .txt, .jsonl or .parquet"
    )


def _from_hub(name: str, arguments: dict) -> "Dataset":
    from datasets import load_dataset

    try:
        return load_dataset(**arguments)
    except Exception as error:  # the hub client raises many kinds; none of them is a bug of ours
        raise CalibrationError(
            f"dataset {name} ({arguments['path']}) cannot be fetched: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}. Check the network, or give a local file"
        ) from error


def _column(names: Sequence[str], source: str) -> str:
    for name in ("input_ids", "text"):
        if name in names:
            return name
    raise CalibrationError(f"{source} has the columns {', '.join(names)}: one must be text or input_ids")


def _parquet(path: Path) -> Sequence[Any]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        name = _column(file.schema_arrow.names, str(path))
        return file.read([name]).column(name).to_pylist()
    except (ArrowException, OSError) as error:
        raise CalibrationError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _json_lines(path: Path) -> list[str | list[int]]:
    documents: list[str | list[int]] = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(f"{path} line {number} is not JSON: {error.msg}") from error
        value: Any = row.get("input_ids", row.get("text")) if isinstance(row, dict) else None
        ids = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        if not ids and not isinstance(value, str):
            raise CalibrationError(f'{path} line {number} needs "text" (a string) or "input_ids" (whole numbers)')
        documents.append(value)
    return documents


class _EverySiteSeen(Exception):
    """Ends a forward pass whose later layers nobody needs."""


@torch.no_grad()
def watch_inputs(
    model: PreTrainedModel,
    sites: Sequence[Site],
    ids: Tensor,
    batch: int,
    consume: Callable[[Site, Tensor], None],
    advance: Advance,
) -> None:
    """Runs the model and hands each site's input ``[tokens, channels]`` to ``consume`` as it appears, keeping none.

    What all experts of a layer read is watched where it enters the experts' module: no expert sees every token. An
    expert's intermediate channels are watched at the expert, which may see no token at all.
    """
    waiting: Counter[str] = Counter()

    def record(site: Site) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        reader = linear_module(model, site.linears[0])
        gather = reader.gather if isinstance(reader, SparseLinear) and reader.gather is not None else nn.Identity()
        return lambda _module, inputs: consume(site, gather(inputs[0]).reshape(-1, site.channels))

    def seen(site: Site) -> Callable[..., None]:
        def count(*_: object) -> None:
            waiting[site.name] -= 1
            if not +waiting:
                raise _EverySiteSeen

        return count

    handles = []
    for site in sites:
        reader = linear_module(model, site.linears[0])
        expert = routed(model, site.linears[0])
        if expert is None:
            handles += [reader.register_forward_pre_hook(hook(site)) for hook in (record, seen)]
        else:
            experts, reads_every_token = expert
            handles.append((experts if reads_every_token else reader).register_forward_pre_hook(record(site)))
            handles.append(experts.register_forward_hook(seen(site)))
    try:
        for rows in ids.split(batch):
            waiting.clear()
            waiting.update({site.name: site.runs for site in sites})
            with suppress(_EverySiteSeen):
                last_hidden_state(model, rows)
            advance(rows.shape[0])
    finally:
        for handle in handles:
            handle.remove()


def channel_norms(
    model: PreTrainedModel, sites: Sequence[Site], ids: Tensor, batch: int, progress: Progress
) -> dict[str, Tensor]:
    """Returns ``||X_j||`` of each site, float32 ``[channels]``: root of the sum of squares, averaged over sequences.

    A site that only zeros reach, or nothing (an expert that no token is sent to), gets ones: its weights then count
    by their size alone, and ``progress`` is told.

    Raises:
        CalibrationError: an activation is NaN or infinite.
    """
    sums = {s.name: torch.zeros(s.channels, dtype=torch.float64, device=model.device) for s in sites}

    def consume(site: Site, inputs: Tensor) -> None:
        sums[site.name] += inputs.float().square().sum(0)

    with progress.stage("calibrate", ids.shape[0]) as advance:
        watch_inputs(model, sites, ids, batch, consume, advance)
    for name, total in sums.items():
        check_finite(name, total)
        if not bool(total.any()):
            total.fill_(ids.shape[0])
            progress.say(f"{name}: nothing of the calibration text reaches it; its weights are scored by their size")
    return {name: (total / ids.shape[0]).sqrt().float() for name, total in sums.items()}


def hessians(
    model: PreTrainedModel, sites: Sequence[Site], ids: Tensor, batch: int, advance: Advance
) -> dict[str, Tensor]:
    """Returns ``X^T X`` over the tokens of each site, float32 ``[channels, channels]``.

    A site that only zeros reach, or nothing (an expert that no token is sent to), gets the identity: its weights then
    count by their size alone, and no update moves them.

    Raises:
        CalibrationError: an activation is NaN or infinite.
    """
    found = {s.name: torch.zeros(s.channels, s.channels, device=model.device) for s in sites}

    def consume(site: Site, inputs: Tensor) -> None:
        inputs = inputs.float()
        found[site.name].addmm_(inputs.T, inputs)

    watch_inputs(model, sites, ids, batch, consume, advance)
    for name, hessian in found.items():
        check_finite(name, hessian.diagonal())
        if not bool(hessian.diagonal().any()):
            hessian.fill_diagonal_(1)
    return found


def check_finite(name: str, values: Tensor) -> None:
    """Refuses statistics that are not finite, naming the site."""
    if not bool(values.isfinite().all()):
        raise CalibrationError(
            f"{name}: {int((~values.isfinite()).sum())} of {values.numel()} input channels are NaN or infinite on the "
            "calibration text: the model overflows in this dtype (try --dtype float32) or its weights are damaged"
        )
