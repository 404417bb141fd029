"""The limits on sizes in a config refuse no model that transformers has."""

import logging
import re

import pytest
from transformers import CONFIG_MAPPING

from permtriton.errors import ModelError
from permtriton.model.sizes import LARGEST_DIMENSION, check_numbers


@pytest.mark.slow
def test_no_config_of_transformers_is_refused(caplog):
    """Not even beside a checkpoint of two layers: other entries that name layers or depths are no counts of them."""
    caplog.set_level(logging.CRITICAL)
    checked = 0
    for config_class in CONFIG_MAPPING.values():
        try:
            config = config_class().to_dict()
        except Exception:  # needs arguments, or a package that is not installed
            continue
        checked += 1
        layers = [value for key, value in config.items() if key in ("num_hidden_layers", "n_layer", "num_layers")]
        deepest = max((value for value in layers if isinstance(value, int)), default=2)
        check_numbers(config, [f"model.layers.{deepest - 1}.weight"])
        check_numbers(config, None)
    assert checked > 300


@pytest.mark.parametrize(
    "entry",
    [
        {"layer_rope_theta": [10000.0, 500000.0]},
        {"depthwise_separable_out_channel": 1024},
        {"num_depth_bins": 256},
        {"label2id": {"stacked layers": 485, "depth": 10**6}},
        {"vocab_size_per_layer_input": 262144},
        {"vision_feature_layer": -2, "pad_token_id": -1, "time_step_limit": [0.0, float("inf")]},
    ],
)
def test_other_numbers_are_no_counts(entry):
    check_numbers(entry, ["model.layers.1.weight"])


@pytest.mark.parametrize(
    "entry",
    [
        {"rope_theta": -1.0},
        {"partial_rotary_factor": float("nan")},
        {"rope_parameters": {"full_attention": {"factor": -2}}},
        {"vision_config": {"layer_norm_eps": "1e-5"}},
        {"layer_norm_epsilon": float("inf")},
        {"n_embd": -768},
        {"num_experts_per_tok": -1},
        {"head_dim": "auto"},
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(entry):
    (key,) = re.findall(r"'(\w+)': [^{]", str(entry))
    with pytest.raises(ModelError, match=f"config.json: {key} is .*: expected a .*number"):
        check_numbers(entry, None)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "encoder_layers", "depths", "num_layers"])
def test_absurd_counts_are_refused_wherever_they_stand(key):
    with pytest.raises(ModelError, match=f"{key} is 1000000"):
        check_numbers({"text_config": {key: [10**6] if key == "depths" else 10**6}}, ["model.layers.1.weight"])


def test_the_largest_embedding_of_transformers_fits():
    assert LARGEST_DIMENSION > 3_000_012, "BLT's"
