"""The quantization_config of a checkpoint: it survives JSON, and is refused unless every entry is right."""

import json

import pytest

from permtriton.checkpoint.quantization_config import PermTritonQuantizationConfig
from permtriton.errors import ModelError

from .folders import LAST_UP, NORM, PACKED, QUANTIZATION


def test_a_config_survives_json():
    config = PermTritonQuantizationConfig(**QUANTIZATION)
    assert json.loads(json.dumps(config.to_dict())) == QUANTIZATION
    assert PermTritonQuantizationConfig.from_dict(config.to_dict()).to_dict() == QUANTIZATION


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["version is 2", "reads version 1", "upgrade"]),
        ({"version": True}, ["version is True"]),
        ({"version": None}, ["version is None"]),
        ({"quant_method": "gptq"}, ["'gptq'"]),
        ({"format": "sparse"}, ["'sparse'", "packed", "dense"]),
        ({"format": "dense"}, ["format dense with 1 packed"]),
        ({"packed": {}}, ["format packed with 0 packed"]),
        ({"packed": [LAST_UP]}, ["packed", "dictionary"]),
        ({"sparsity": "4:2"}, ["'4:2'", "2:4"]),
        ({"sparsity": " 2:4"}, ["' 2:4'"]),
        ({"sparsity": 0.5}, ["0.5", "string"]),
        ({"color": "red"}, ["color is unknown"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [112, 66]}}}, ["66", LAST_UP, "multiple of 4"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [112, -64]}}}, ["-64"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [112, 64.0]}}}, ["64.0"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [2**40, 64]}}}, [str(2**40)]),
        ({"packed": {LAST_UP: {**PACKED, "shape": "112"}}}, ["'112'"]),
        ({"packed": {LAST_UP: {**PACKED, "dim": 2}}}, ["'dim': 2"]),
        ({"packed": {LAST_UP: {**PACKED, "dim": -1}}}, ["dim is -1"]),
        ({"packed": {LAST_UP: {"shape": [112, 64]}}}, [LAST_UP]),
        ({"packed": {"": PACKED}}, ["''"]),
        ({"gathers": {"a": 0}}, ["gathers.a is 0"]),
        ({"gathers": {"a": True}}, ["gathers.a is True"]),
        ({"gathers": 7}, ["gathers is 7"]),
        ({"norms": {"a": {**NORM, "kind": "batch"}}}, ["batch"]),
        ({"norms": {"a": {**NORM, "kind": ["rms"]}}}, ["['rms']"]),
        ({"norms": {"a": {**NORM, "offset": 0.5}}}, ["0.5"]),
        ({"norms": {"a": {**NORM, "eps": "1e-6"}}}, ["'1e-6'"]),
        ({"norms": {"a": {**NORM, "eps": float("nan")}}}, ["nan"]),
        ({"norms": {"a": {"more": 1, **NORM}}}, ["more"]),
        ({"sha256": {"f": "xyz"}}, ["'xyz'", "{64}"]),
    ],
)
def test_a_config_is_taken_strictly(change, words):
    with pytest.raises(ModelError) as caught:
        PermTritonQuantizationConfig(**{**QUANTIZATION, **change})
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["version", "format", "sparsity"])
def test_a_config_needs_its_entries(key):
    with pytest.raises(ModelError, match=key):
        PermTritonQuantizationConfig(**{k: v for k, v in QUANTIZATION.items() if k != key})
