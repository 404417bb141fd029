"""The entries ``quantization_config`` in the ``config.json`` of a permtriton checkpoint; version 1.

The structure of a checkpoint does not show a flipped bit in a value, so ``permtriton export`` stores a hash per file,
which covers every byte and is what ``sha256sum`` prints. Each file is checked before it is used, at one to two GB/s. To
load without this check, remove the hashes from the config:

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config.pop("sha256")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from transformers.utils.quantization_config import QuantizationConfigMixin
from typing_extensions import TypedDict

from permtriton.checkpoint.formats import Format
from permtriton.checkpoint.read_record import Pattern, Sha256
from permtriton.checkpoint.registration import METHOD
from permtriton.errors import ModelError, shown
from permtriton.kernels.norm_permute import KINDS
from permtriton.util.sparsity import NMPattern, PrunedWeight
from permtriton.util.validation import checked

VERSION = 1
WHERE = "config.json, quantization_config"
Name = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(gt=0, le=2**31)]


class Packed(TypedDict):
    """A parameter P that is stored as ``P_values`` and ``P_positions``; see `permtriton.kernels.packing`."""

    shape: Annotated[list[Size], Field(min_length=2, max_length=4)]
    dim: Annotated[int, Field(ge=0)]  # input dimension
    sparsity: NotRequired[Pattern]  # if it is not the one of the config
    values: NotRequired[Literal["float8_e4m3fn"]]  # with ``P_scale`` (see `permtriton.kernels.sparse_linear_fp8`)


class NormEntry(TypedDict):
    """A norm that writes its output in another order; see `permtriton.kernels.norm_permute.NormVariant`."""

    channels: Size
    eps: Annotated[float, Field(ge=0, lt=1)]
    kind: Literal[KINDS]  # type: ignore[valid-type]
    offset: Annotated[float, Field(ge=0, le=1, multiple_of=1)]


class Entries(TypedDict):
    """All entries. Parameters and modules have their names in the checkpoint."""

    quant_method: NotRequired[Literal["permtriton"]]
    version: int
    format: Literal["packed", "packed-fp8", "dense"]  # packed-fp8 if any parameter is in FP8, dense if none is packed
    sparsity: Pattern
    packed: NotRequired[dict[Name, Packed]]
    gathers: NotRequired[dict[Name, Size]]  # linear that gathers its input -> number of its input channels
    norms: NotRequired[dict[Name, NormEntry]]
    sha256: NotRequired[dict[str, Sha256]]  # file of weights -> the SHA-256 of its bytes


class PermTritonQuantizationConfig(QuantizationConfigMixin):
    """`Entries` as attributes, checked when they are made; a missing entry becomes an empty mapping."""

    format: str
    sparsity: str
    packed: dict[str, Packed]
    gathers: dict[str, int]
    norms: dict[str, NormEntry]
    sha256: dict[str, str]

    def __init__(self, **entries: Any) -> None:
        version = entries.get("version")
        if type(version) is not int or version != VERSION:
            raise ModelError(
                f"{WHERE}: version is {shown(version)}, but this permtriton reads version {VERSION}: upgrade "
                "permtriton, or export the model again"
            )
        fields = {"quant_method": METHOD, **checked(Entries, entries, _damaged)}
        self.__dict__.update({name: fields.get(name, {}) for name in Entries.__annotations__})
        for name, entry in self.packed.items():
            shape, dim = entry["shape"], entry["dim"]
            group = self.pattern_of(name).group
            if dim >= len(shape) or shape[dim] % group:
                raise _damaged(f"{name} is {entry}, expected a dimension of the shape that is a multiple of {group}")

    def pattern_of(self, name: str) -> NMPattern:
        return NMPattern.parse(self.packed[name].get("sparsity", self.sparsity))

    @property
    def permuted(self) -> list[str]:
        """Names of the modules that permute at run time."""
        return [*self.norms, *self.gathers]

    @property
    def indices(self) -> list[str]:
        """Names of the stored indices of these modules."""
        return [*(f"{name}.index" for name in self.norms), *(f"{name}.gather.index" for name in self.gathers)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries as JSON types, without ``sha256`` if it is empty."""
        entries = super().to_dict()
        if not self.sha256:
            del entries["sha256"]
        return entries


def packed_entry(shape: Sequence[int], pruned: PrunedWeight, sparsity: str, *, in_fp8: bool = False) -> Packed:
    """Returns the entry of a parameter in a config whose pattern is ``sparsity``."""
    entry: Packed = {"shape": list(shape), "dim": pruned.dim}
    if str(pruned.pattern) != sparsity:
        entry["sparsity"] = str(pruned.pattern)
    if in_fp8:
        entry["values"] = "float8_e4m3fn"
    return entry


def config_entries(
    sparsity: str,
    packed: dict[str, Packed],
    gathers: dict[str, int],
    norms: dict[str, NormEntry],
    hashes: Mapping[str, str] | None = None,
) -> PermTritonQuantizationConfig:
    """Returns the entries of a folder's config; the format follows from the packed parameters."""
    in_fp8 = any("values" in entry for entry in packed.values())
    return PermTritonQuantizationConfig(
        version=VERSION,
        format=Format.PACKED_FP8 if in_fp8 else Format.PACKED if packed else Format.DENSE,
        sparsity=sparsity,
        packed=packed,
        gathers=gathers,
        norms=norms,
        sha256=dict(hashes or {}),
    )


def _damaged(problem: str) -> ModelError:
    return ModelError(f"{WHERE}: {problem}: the file is damaged")
