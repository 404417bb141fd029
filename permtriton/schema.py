"""What ``config.json`` tells of a permtriton checkpoint, under ``quantization_config``; version 1.

    quant_method  "permtriton"
    version       1
    format        "packed": the weights in ``packed`` are stored as ``P_values`` and ``P_positions`` (see
                  `permtriton.kernels.packing`); "dense": all weights are stored as they are
    sparsity      such as "2:4"
    packed        parameter P -> {"shape": its shape, "dim": its input dimension}
    gathers       linear -> channels, for each that brings its input into another order first
    norms         norm -> {"kind", "offset", "eps", "channels"}, for each that writes its output in another order
    sha256        file of weights -> the SHA-256 of its bytes; may be missing

Structure alone shows no flipped bit in a value, so ``permtriton export`` stores a hash a file. A hash a file, not a
tensor, covers every byte (embeddings and header too) and is what ``sha256sum`` prints; it is checked before a byte is
used, at one to two GB/s. To load without it, take it out of the config that is passed:

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

from permtriton.errors import ConfigError, ModelError
from permtriton.kernels.norm_permute import KINDS
from permtriton.sparsity import NMPattern

METHOD, VERSION = "permtriton", 1
LARGEST = 2**31  # of a dimension
_WHERE = "config.json, quantization_config"


class PermTritonQuantizationConfig(QuantizationConfigMixin):
    """The entries above as attributes, checked.

    Raises:
        ModelError: an unknown version or entry, a wrong type, a number out of range.
    """

    def __init__(self, **entries: Any) -> None:
        found = copy.deepcopy(entries)
        version = found.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise ModelError(
                f"{_WHERE}: version is {_short(version)}, this permtriton reads version {VERSION}: upgrade permtriton, "
                "or export the model again"
            )
        if found.pop("quant_method", METHOD) != METHOD:
            raise ModelError(f"{_WHERE}: quant_method is {_short(entries['quant_method'])}, expected {METHOD!r}")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.version = VERSION
        self.format: str = _checked(found, "format", _is_format, 'either "packed" or "dense"')
        self.sparsity: str = _checked(found, "sparsity", _is_pattern, "a pattern such as 2:4")
        group = self.pattern.group
        self.packed: dict[str, dict[str, Any]] = _table(
            found, "packed", lambda entry: _is_packed(entry, group),
            f'{{"shape": whole numbers, "dim": one of its dimensions, a multiple of {group}}}',
        )  # fmt: skip
        self.gathers: dict[str, int] = _table(found, "gathers", _is_size, "a number of channels")
        self.norms: dict[str, dict[str, Any]] = _table(
            found, "norms", _is_norm,
            f'{{"kind": one of {", ".join(KINDS)}, "offset": 0.0 or 1.0, "eps": a small number, "channels": a number}}',
        )  # fmt: skip
        self.sha256: dict[str, str] = _table(found, "sha256", _is_hash, "64 hexadecimal digits")
        if found:
            raise ModelError(
                f"{_WHERE}: {_short(sorted(map(str, found))[0])} is unknown in version {VERSION}: the file is damaged, "
                "or a newer permtriton wrote it; upgrade permtriton"
            )
        if bool(self.packed) != (self.format == "packed") or not (self.packed or self.permuted):
            raise ModelError(
                f"{_WHERE}: format {self.format} with {len(self.packed)} packed weights and "
                f"{len(self.gathers) + len(self.norms)} permuted modules makes no sense: the file is damaged"
            )

    @property
    def pattern(self) -> NMPattern:
        """The sparsity as a pattern."""
        return NMPattern.parse(self.sparsity)

    @property
    def permuted(self) -> list[str]:
        """Modules that permute at run time, so that transformers alone cannot run the model."""
        return [*self.norms, *self.gathers]

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries as JSON types, without an empty ``sha256``."""
        found = super().to_dict()
        if not self.sha256:
            del found["sha256"]
        return found


def _checked(found: dict[str, Any], key: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    value = found.pop(key, None)
    if not accepts(value):
        raise ModelError(f"{_WHERE}: {key} is {_short(value)}, expected {expected}: the file is damaged")
    return value


def _table(found: dict[str, Any], key: str, accepts: Callable[[Any], bool], expected: str) -> dict[str, Any]:
    entries = _checked(found, key, lambda value: value is None or isinstance(value, dict), "an object") or {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not name or not accepts(entry):
            raise ModelError(
                f"{_WHERE}: {key} holds {_short(entry)} for {_short(name)}, expected {expected}: the file is damaged"
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
