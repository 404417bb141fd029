"""Samples from texts, token ids and tensors that a caller holds in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from permtriton.data.columns import documents_in
from permtriton.data.documents import Documents
from permtriton.data.media import tensor_samples
from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, ConfigError, reading, shown

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

# What ``data=`` takes: a name or a file (`is_named`), or what is in memory.
Data = Union[
    str, Path, Sequence[str], Sequence[int], Sequence[Sequence[int]], Tensor, np.ndarray, Mapping[str, Tensor],
    Samples, DataLoader, "Dataset", "DatasetDict",
]  # fmt: skip
KINDS = (
    "a name (c4, wikitext2, pile, demo), a file, a list of texts, a datasets.Dataset, token ids in a list or tensor, a "
    "DataLoader, or a dict of the tensors that the model's forward takes"
)


def is_named(data: object) -> TypeGuard[str | Path]:
    """Whether data are the name of a text, or a file or folder."""
    return isinstance(data, str | Path)


def name_of(data: object) -> str:
    return str(data) if is_named(data) else f"{type(data).__name__} in memory"


def selected(data: Any, column: str | None = None, split: str | None = None) -> Any:
    """Returns the documents of a dataset, or of one of a dictionary of datasets; any other data as they are.

    Token ids are without their padding.

    Args:
        column: column of the dataset; None for the first of `permtriton.data.columns.COLUMNS` that it has.
        split: name of the dataset in the dictionary.
    """
    if isinstance(data, Mapping) and data and all(hasattr(table, "column_names") for table in data.values()):
        if split not in data:
            got = f"split is {shown(split)}" if split is not None else "no split is named"
            raise CalibrationError(
                f"{got}, but the dictionary of datasets has {', '.join(data)}: give one of them alone, or, of "
                "calibration data, its name as `split=`"
            )
        data, split = data[split], None
    if split is not None:
        raise ConfigError("split has an effect on a dictionary of datasets (DatasetDict) only: leave it out")
    if not hasattr(data, "column_names"):
        if column is not None:
            raise ConfigError("text_column has an effect on a datasets.Dataset only: leave it out")
        return data
    if not hasattr(data, "__len__"):
        raise CalibrationError("a streamed dataset has no length: give a list of its first texts")
    return documents_in(data.column_names, data.__getitem__, "the Dataset", column or "")


def documents_of(data: Any) -> Documents | None:
    """Returns the texts, or the lists of token ids, that are cut into sequences.

    Returns:
        None where data are tensors, whose rows are samples already.
    """
    if isinstance(data, Tensor | np.ndarray | Mapping | Samples | DataLoader):
        return None
    if isinstance(data, Sequence) and len(data):
        if isinstance(data[0], int):
            return [data]
        if isinstance(data[0], str | Sequence | Tensor | np.ndarray):
            return data
    raise CalibrationError(f"data is {shown(data)}, a {type(data).__name__}: expected {KINDS}")


def tensors_of(data: Any, model: PreTrainedModel, most: int | None = None, default: int | None = None) -> Samples:
    """Returns samples that are made of tensors: one row of each tensor per sample.

    Args:
        data: tensor of the model's main input (token ids, int64 ``[samples, tokens]``), tensors by the names of
            arguments of the model's ``forward``, or a loader of batches of either.
        most: number of samples to take, the first ones; None for all.
        default: number of samples to take of a loader where ``most`` is None; None for all.
    """
    if isinstance(data, Samples):
        samples = data
    elif isinstance(data, DataLoader):
        samples = _of_loader(data, model, most or default)
    else:
        samples = _samples(data, model)
    if most is not None and len(samples) < most:
        raise CalibrationError(f"data holds {len(samples)} samples, but {most} are needed: lower samples, or give more")
    return samples[:most]


def _samples(data: Any, model: PreTrainedModel) -> Samples:
    values_by_name = data if isinstance(data, Mapping) else {model.main_input_name: data}
    with reading("data cannot be made into tensors", CalibrationError):
        tensors = {name: torch.as_tensor(values) for name, values in values_by_name.items()}
    return tensor_samples(model, tensors)


def _of_loader(loader: DataLoader, model: PreTrainedModel, rows: int | None) -> Samples:
    """Returns the first ``rows`` samples of a loader; of batches that are tuples or lists, labels follow the inputs."""
    batches = list[Samples]()
    for batch in loader:
        batches.append(_samples(batch[0] if isinstance(batch, list | tuple) else batch, model))
        if rows is not None and sum(map(len, batches)) >= rows:
            break
    if not batches:
        raise CalibrationError("the DataLoader gave no batch: give one that has data")
    advice = "give samples of one length, without padding"
    with reading(f"the batches of the DataLoader cannot be joined ({advice})", CalibrationError):
        return batches[0].joined(*batches[1:])[:rows]
