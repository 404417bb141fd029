"""What ``permtriton.json``, the record of a compilation, holds; a file of any other form is refused."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from permtriton.checkpoint.format import Format
from permtriton.errors import ConfigError, ModelError
from permtriton.model.headers import REPORT_FILE, read_json
from permtriton.model.name import is_hub_name
from permtriton.model.source import fetched
from permtriton.util.permutation import is_permutation
from permtriton.util.sparsity import NMPattern, PrunedWeight, in_words
from permtriton.util.validation import checked

# What to do with weights of another tool, or of a training that saved them without the record.
PRUNED_ELSEWHERE = (
    "If its weights are N:M already, this packs them as they are: permtriton compile FOLDER --recipe mask "
    "--importance magnitude --save-format packed"
)


def pattern(text: str) -> str:
    """Returns an N:M pattern as it was written; raises a ValueError where it is none."""
    try:
        right = str(NMPattern.parse(text)) == text
    except ConfigError:
        right = False
    if not right:
        raise ValueError("a pattern such as 2:4")
    return text


def _permutation(index: list[int]) -> list[int]:
    if not is_permutation(torch.tensor(index, dtype=torch.int64)):
        raise ValueError("a permutation")
    return index


Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]  # longer ones are damage, and cannot be formatted as floats
Pattern = Annotated[str, AfterValidator(pattern)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Index = Annotated[list[Integer], AfterValidator(_permutation)]
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # what is only shown is not looked at
Shown = dict[str, Any]


@with_config(OPEN)
class Config(TypedDict):
    """The options of a compilation."""

    sparsity: Pattern
    importance: str
    recipe: str
    layout: str
    calibration: str
    seed: Integer


@with_config(OPEN)
class Site(TypedDict):
    """A site and the order of its channels: channel ``j`` was channel ``index[j]`` of the dense model."""

    name: str
    linears: list[str]
    index: Index


class Rows(TypedDict):
    """Linears whose rows moved: row ``j`` was row ``index[j]`` of the dense model."""

    linears: list[str]
    index: Index


class SameOrder(TypedDict):
    """The channels of hidden states have the dense model's order."""

    permuted: Literal[False]


class NewOrder(TypedDict):
    """They have another: channel ``j`` was channel ``index[j]`` of the dense model; ``undo`` is the inverse."""

    permuted: Literal[True]
    index: Index
    undo: Index


class UnknownOrder(TypedDict):
    """Only that of the last hidden state is known."""

    permuted: Literal["unknown"]
    why: str
    last: Annotated[SameOrder | NewOrder, Field(discriminator="permuted")]


HiddenStates = Annotated[SameOrder | NewOrder | UnknownOrder, Field(discriminator="permuted")]


class Gguf(TypedDict):
    """The GGUF file whose weights were dequantized."""

    file: str
    tensors: dict[str, Integer]


class Tensors(TypedDict):
    """How many tensors of a folder were compared with those in memory, and how many of them are N:M."""

    tensors: Integer
    pruned_weights: Integer


class Reloaded(TypedDict):
    """How a folder that was loaded again was compared with the model in memory."""

    reloaded: str
    reload_difference: NotRequired[float]


class Verification(Tensors, Reloaded):
    """What was checked of the folder."""


class File(TypedDict):
    """A file of weights."""

    bytes: Integer
    sha256: Sha256


@with_config(OPEN)
class Export(TypedDict):
    """What `permtriton.checkpoint.export.export` did."""

    format: Annotated[Format, Field(strict=False)]
    dense_bytes: Integer
    stored_bytes: Integer


class Always(TypedDict):
    """What every compilation reports; docs/formats.md describes it."""

    model: str
    on_hub: NotRequired[bool]  # whether that is a name on the hub; earlier versions did not say
    command: str
    versions: dict[str, str]
    device: str
    determinism: Shown
    dtype: Annotated[str, Field(pattern="^(float16|float32|float64|bfloat16)$")]
    config: Config
    calibration: Shown
    generated: Shown | None
    parameters: Annotated[Integer, Field(gt=0)]
    pruned_parameters: Integer
    sparsity_by_layer: dict[str, float]
    permutations: list[Shown]
    skipped: dict[str, str]
    barriers: list[str]
    hidden_states: HiddenStates
    steps: list[Shown]
    retained_importance: dict[str, dict[str, float]]
    evaluation: Shown
    proof: Shown
    seconds: dict[str, float]
    memory: Shown
    sites: list[Site]
    rows: list[Rows]


class Sometimes(TypedDict):
    """What only some compilations report."""

    gguf: NotRequired[Gguf]
    left_out: NotRequired[list[str]]  # tensors of the dense checkpoint that the model's class does not use
    expert_tokens: NotRequired[dict[str, list[Integer]]]  # experts -> calibration tokens sent to each


class Report(Always, Sometimes):
    """What a compilation reports: ``permtriton.json`` but for what is known once a folder is written."""


class Written(TypedDict):
    """What is known once a folder is written."""

    verification: Verification
    pruned_weights: Annotated[dict[str, Integer], Field(min_length=1)]  # parameter -> its input dimension
    patterns: NotRequired[dict[str, Pattern]]  # parameter -> its pattern, where it is not that of the config
    trained: NotRequired[str]  # where the model was loaded from whose weights were trained, with the pattern kept
    files: dict[str, File]
    card: str | None


@with_config(OPEN)
class Record(Always, Written, Sometimes):
    """``permtriton.json``; an export keeps the order of its entries."""

    export: NotRequired[Export]


def described_sparsity(record: Mapping[str, Any]) -> str:
    """Returns the patterns of a record, as `permtriton.util.sparsity.in_words` has them."""
    return in_words(record["config"]["sparsity"], record.get("patterns", {}).values(), len(record["pruned_weights"]))


def recorded_weights(record: Mapping[str, Any]) -> dict[str, PrunedWeight]:
    """Returns pruned parameter -> its input dimension and pattern."""
    own, sparsity = record.get("patterns", {}), record["config"]["sparsity"]
    dims = record["pruned_weights"].items()
    return {name: PrunedWeight(dim, NMPattern.parse(own.get(name, sparsity))) for name, dim in dims}


def read_record(folder: Path) -> Record:
    """Returns ``permtriton.json`` of a folder.

    Raises:
        ModelError: the file is missing, cannot be read, or has another form than permtriton writes.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder} was not written by permtriton (it holds no {REPORT_FILE}): give an output of permtriton compile"
            f". {PRUNED_ELSEWHERE}"
        )
    return checked(Record, read_json(path), lambda problem: ModelError(f"{path}: {problem}: the file is damaged"))


def find_record(location: str, hub: Mapping[str, str] = MappingProxyType({})) -> Record | None:
    """Returns ``permtriton.json`` of a folder or of a name on the hub; None where there is none.

    Args:
        hub: what the hub is asked with beside the name: ``revision``, ``token``.

    Raises:
        ModelError: as `read_record`.
    """
    path = fetched(location, REPORT_FILE, hub) if is_hub_name(location) else Path(location, REPORT_FILE)
    return read_record(path.parent) if location and path and path.is_file() else None
