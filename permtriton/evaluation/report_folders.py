"""The compiled folders that a report is made of, and the masks that it draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.formats import PACKED
from permtriton.checkpoint.masks import masks_of
from permtriton.evaluation.report_plots import colour
from permtriton.kernels.packing import packed_share
from permtriton.model.name import layer_number, shown_name
from permtriton.util.output_files import real_path


class Compiled(Folder):
    """A folder that ``permtriton compile`` or ``export`` wrote, and how the report marks it.

    Args:
        label: name of the folder, preceded by its parent's name if two folders of the report have the same name.
        colour: CSS colour of everything about the folder.
    """

    def __init__(self, path: Path, label: str, colour: str) -> None:
        super().__init__(path)
        self.label, self.colour = label, colour

    @property
    def model(self) -> str:
        """Name of the dense model, without a path."""
        return shown_name(self.record["model"], self.record.get("on_hub"))

    @property
    def evaluation(self) -> dict[str, Any]:
        """The held-out measure of the dense and the compiled model; empty where nothing was measured."""
        evaluation = self.record["evaluation"]
        return evaluation if "dense" in evaluation else {}

    @property
    def seconds(self) -> float:
        """Seconds of the compilation without the evaluation."""
        return sum(value for stage, value in self.record["seconds"].items() if stage != "evaluate")

    @property
    def is_packed(self) -> bool:
        return "export" in self.record and self.record["export"]["format"] in PACKED

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of dense and packed weights; packed bytes are computed for the record's dtype unless stored packed."""
        dense = stored = sum(file.stat().st_size for file in self.files)
        if "export" in self.record:
            dense += self.record["export"]["dense_bytes"] - self.record["export"]["stored_bytes"]
        if self.is_packed:
            return {"dense": dense, "packed": stored}
        element, packed = getattr(torch, self.record["dtype"]).itemsize, float(dense)
        for name, weight in self.pruned.items():
            share = packed_share(weight.pattern.kept, weight.pattern.group, element)
            packed -= math.prod(self.shape(name)) * element * (1 - share)
        return {"dense": dense, "packed": round(packed)}


def read_folders(folders: Sequence[Path]) -> list[Compiled]:
    paths = [real_path(folder) for folder in folders]
    names = [path.name for path in paths]
    labels = [path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in paths]
    named = zip(folders, labels, strict=True)
    return [Compiled(folder, label, colour(number)) for number, (folder, label) in enumerate(named)]


@dataclass(frozen=True)
class MaskCorner:
    """The first rows and columns of a linear's mask, in the dense model's order."""

    label: str  # label of the folder
    linear: str  # name of the linear
    kept: Tensor  # which weights are kept, bool ``[rows, columns]``


def mask_corners(folders: Sequence[Compiled], linear: str | None, size: int = 128) -> list[MaskCorner]:
    """Reads the corner of one linear's mask from each folder.

    Args:
        linear: name of the linear; None for the last one of the first layer that all folders prune, such as its
            ``down_proj``.
    """
    masks = {folder.label: masks_of(folder) for folder in folders}
    if linear is None:
        first, *others = (dict.fromkeys(of_folder.linears) for of_folder in masks.values())
        names = [name for name in first if all(name in linears for linears in others)]
        linear = next((name for name in reversed(names) if layer_number(name) == layer_number(names[0])), "")
    if not linear:
        return []
    return [MaskCorner(label, linear, of_folder.mask(linear)[:size, :size]) for label, of_folder in masks.items()]
