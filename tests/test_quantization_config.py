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
        ({"format": "sparse"}, ["'sparse'", "packed", "dense"]),
        ({"sparsity": "4:2"}, ["'4:2'", "2:4"]),
        ({"color": "red"}, ["color is unknown"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [112, 66]}}}, ["66", LAST_UP, "multiple of 4"]),
        ({"packed": {LAST_UP: {**PACKED, "shape": [2**40, 64]}}}, [str(2**40)]),
        ({"packed": {LAST_UP: {**PACKED, "dim": 2}}}, ["'dim': 2"]),
        ({"gathers": {"a": 0}}, ["gathers.a is 0"]),
        ({"norms": {"a": {**NORM, "kind": "batch"}}}, ["batch"]),
        ({"sha256": {"f": "xyz"}}, ["'xyz'", "{64}"]),
    ],
)
def test_a_config_is_taken_strictly(change, words):
    with pytest.raises(ModelError) as caught:
        PermTritonQuantizationConfig(**{**QUANTIZATION, **change})
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
