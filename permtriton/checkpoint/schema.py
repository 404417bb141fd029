"""The entries ``quantization_config`` in the ``config.json`` of a permtriton checkpoint; version 1.

    quant_method  "permtriton"
    version       1
    format        "packed": the weights in ``packed`` are stored as ``P_values`` and ``P_positions`` (see
                  `permtriton.kernels.packing`); "dense": all weights are stored as they are
    sparsity      N:M pattern, such as "2:4"
    packed        packed parameter P -> {"shape": its shape, "dim": its input dimension}
    gathers       linear that gathers its input -> number of its input channels
    norms         norm that writes its output in another order -> {"kind", "offset", "eps", "channels"}
    sha256        file of weights -> the SHA-256 of its bytes; may be missing

The structure of a checkpoint does not show a flipped bit in a value, so ``permtriton export`` stores one hash per file.
A hash per file covers every byte, embeddings and header included, and is what ``sha256sum`` prints. It is checked
before the file is used, at one to two GB/s. To load without this check, remove the hashes from the config:

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config.pop("sha256")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from permtriton.errors import ConfigError, ModelError, shown
from permtriton.kernels.norm_permute import KINDS
from permtriton.sparsity import NMPattern

METHOD, VERSION = "permtriton", 1
LARGEST = 2**31  # largest size of a dimension
_WHERE = "config.json, quantization_config"


class PermTritonQuantizationConfig(QuantizationConfigMixin):
    """The entries above as checked attributes.

    Raises:
        ModelError: an unknown version or entry, a wrong type, or a number out of range.
    """

    def __init__(self, **entries: Any) -> None:
        remaining = copy.deepcopy(entries)  # what the next checks have not taken yet
        version = remaining.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise ModelError(
                f"{_WHERE}: version is {shown(version)}, but this permtriton reads version {VERSION}: upgrade "
                "permtriton, or export the model again"
            )
        if remaining.pop("quant_method", METHOD) != METHOD:
            raise ModelError(f"{_WHERE}: quant_method is {shown(entries['quant_method'])}, expected {METHOD!r}")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.version = VERSION
        self.format: str = _take(remaining, "format", _is_format, 'either "packed" or "dense"')
        self.sparsity: str = _take(remaining, "sparsity", _is_pattern, "a pattern such as 2:4")
        group = self.pattern.group
        self.packed: dict[str, dict[str, Any]] = _take_table(
            remaining, "packed", lambda entry: _is_packed(entry, group),
            f'{{"shape": integers, "dim": a dimension of it whose size is a multiple of {group}}}',
        )  # fmt: skip
        self.gathers: dict[str, int] = _take_table(remaining, "gathers", _is_size, "a number of channels")
        self.norms: dict[str, dict[str, Any]] = _take_table(
            remaining, "norms", _is_norm,
            f'{{"kind": one of {", ".join(KINDS)}, "offset": 0.0 or 1.0, "eps": a number from 0 to below 1, '
            '"channels": a number}',
        )  # fmt: skip
        self.sha256: dict[str, str] = _take_table(remaining, "sha256", _is_hash, "64 hexadecimal digits")
        if remaining:
            raise ModelError(
                f"{_WHERE}: {shown(sorted(map(str, remaining))[0])} is unknown in version {VERSION}: the file is "
                "damaged, or a newer permtriton wrote it; upgrade permtriton"
            )
        if bool(self.packed) != (self.format == "packed") or not (self.packed or self.permuted):
            raise ModelError(
                f"{_WHERE}: format {self.format} with {len(self.packed)} packed weights and {len(self.permuted)} "
                "permuted modules is contradictory: the file is damaged"
            )

    @property
    def pattern(self) -> NMPattern:
        """The entry ``sparsity`` as a pattern."""
        return NMPattern.parse(self.sparsity)

    @property
    def permuted(self) -> list[str]:
        """Names of the modules that permute at run time, which transformers alone cannot run."""
        return [*self.norms, *self.gathers]

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries as JSON types, without ``sha256`` if it is empty."""
        entries = super().to_dict()
        if not self.sha256:
            del entries["sha256"]
        return entries


def _take(remaining: dict[str, Any], key: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    """Removes an entry, checks it and returns it."""
    value = remaining.pop(key, None)
    if not accepts(value):
        raise ModelError(f"{_WHERE}: {key} is {shown(value)}, expected {expected}: the file is damaged")
    return value


def _take_table(remaining: dict[str, Any], key: str, accepts: Callable[[Any], bool], expected: str) -> dict[str, Any]:
    """Does the same for an object, each of whose values ``accepts`` checks; empty if the entry is missing."""
    entries = _take(remaining, key, lambda value: value is None or isinstance(value, dict), "an object") or {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not name or not accepts(entry):
            raise ModelError(
                f"{_WHERE}: {key} holds {shown(entry)} for {shown(name)}, expected {expected}: the file is damaged"
            )
    return entries


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST


def _is_format(value: Any) -> bool:
    return isinstance(value, str) and value in ("packed", "dense")


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) < 8 and str(NMPattern.parse(value)) == value
    except ConfigError:
        return False


def _is_packed(entry: Any, group: int) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"shape", "dim"}:
        return False
    shape, dim = entry["shape"], entry["dim"]
    return (
        isinstance(shape, list)
        and 2 <= len(shape) <= 4
        and all(map(_is_size, shape))
        and math.prod(shape) < 2**62
        and type(dim) is int
        and 0 <= dim < len(shape)
        and shape[dim] % group == 0
    )


def _is_norm(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"kind", "offset", "eps", "channels"}:
        return False
    offset, eps = entry["offset"], entry["eps"]
    return (
        isinstance(entry["kind"], str)
        and entry["kind"] in KINDS
        and type(offset) in (int, float)
        and offset in (0, 1)
        and type(eps) in (int, float)
        and 0 <= eps < 1
        and _is_size(entry["channels"])
    )
