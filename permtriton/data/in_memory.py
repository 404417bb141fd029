"""What the arguments for data take: names, files, and texts, token ids and tensors that are in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Union

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from permtriton.data.columns import documents_in
from permtriton.data.documents import Documents
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError, shown

if TYPE_CHECKING:
    from datasets import Dataset

# What ``data=`` takes: a name or a file (`is_named`), or what is in memory.
Data = Union[
    str, Path, Sequence[str], Sequence[int], Sequence[Sequence[int]], Tensor, np.ndarray, Mapping[str, Tensor],
    Samples, DataLoader, "Dataset",
]  # fmt: skip
KINDS = (
    "a name (c4, wikitext2, pile, demo), a file, a list of texts, a datasets.Dataset, token ids in a list or tensor, a "
    "DataLoader, or a dict of the tensors that the model's forward takes"
)


def is_named(data: object) -> TypeGuard[str | Path]:
    """Whether data are the name of a text, or the path of a file or folder."""
    return isinstance(data, str | Path)


def name_of(data: object) -> str:
    return str(data) if is_named(data) else f"{type(data).__name__} in memory"


def selected(data: Any, column: str | None = None, split: str | None = None) -> Any:
    """Returns the documents of a dataset; returns other data unchanged. Token ids of datasets lose their padding.

    ``column`` is the column of the dataset; None for the first of `permtriton.data.columns.COLUMNS` that it has.
    """
    if isinstance(data, Mapping) and data and all(hasattr(table, "column_names") for table in data.values()):
        raise CalibrationError(f"a dictionary of datasets, which has {', '.join(data)}: give one of them alone")
    if split is not None:
        raise ConfigError("`split=` has an effect on a dataset on the hub only: leave it out")
    if not hasattr(data, "column_names"):
        if column is not None:
            raise ConfigError("text_column has an effect on a datasets.Dataset only: leave it out")
        return data
    if not hasattr(data, "__len__"):
        raise CalibrationError("a streamed dataset has no length: give a list of its first texts")
    return documents_in(data.column_names, data.__getitem__, "the Dataset", column or "")


def documents_of(data: Any) -> Documents | None:
    """Returns texts or lists of token ids in memory, which are cut into sequences.

    Returns:
        None if data are tensors, whose rows are samples already.
    """
    if isinstance(data, Tensor | np.ndarray | Mapping | Samples | DataLoader):
        return None
    if isinstance(data, Sequence) and len(data):
        if isinstance(data[0], int):
            return [data]
        if isinstance(data[0], str | Sequence | Tensor | np.ndarray):
            return data
    raise CalibrationError(f"data is {shown(data)}, a {type(data).__name__}: expected {KINDS}")
