"""What the JSON report of ``permtriton compare`` holds; a file of any other form is refused."""

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from permtriton.checkpoint.record import Integer
from permtriton.errors import ModelError
from permtriton.model.headers import read_json
from permtriton.util.validation import checked


class Row(TypedDict):
    """A row of a comparison; see `permtriton.comparison.summary.report_of`."""

    method: str
    pattern: str
    setting: str
    config: NotRequired[dict[str, str | int | float | bool | list[str]]]  # every option but the seed
    values: Annotated[list[float], Field(min_length=1)]
    mean: float
    spread: float
    kl: float | None
    cosine: float | None
    tasks: dict[str, float | None]
    accuracy: NotRequired[float | None]  # mean of the tasks
    seconds: float
    compile_seconds: float | None
    peak_bytes: Integer | None
    by_seed: list[dict[str, Any]]


class Comparison(TypedDict):
    """The JSON report of ``permtriton compare``."""

    model: str
    measure: str
    text: str
    media: NotRequired[bool]  # whether its windows are of images, sound or other tensors
    tokens: Integer
    window: Integer
    special_tokens: NotRequired[str]  # what stands around each window, in words
    seeds: list[Integer]
    patterns: list[str]
    ablation: str | None
    config: dict[str, str | int | float | bool | list[str]]  # what the rows share
    versions: dict[str, str]
    device: str
    system: str
    rows: Annotated[list[Row], Field(min_length=1)]


def read_comparison(path: Path) -> Comparison:
    """Returns the JSON report of ``permtriton compare``.

    Raises:
        ModelError: the file is missing, cannot be read, or has another form.
    """

    def refuse(problem: str) -> ModelError:
        return ModelError(f"{path}: {problem}: expected a file that permtriton compare --output wrote")

    comparison = checked(Comparison, read_json(path), refuse)
    for number, row in enumerate(comparison["rows"]):
        if row["tasks"].keys() != comparison["rows"][0]["tasks"].keys():
            raise refuse(f"rows[{number}] has other tasks than rows[0]")
    return comparison
