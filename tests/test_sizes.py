"""The limits on counts in a config refuse no model that transformers has."""

import logging

import pytest
from transformers import CONFIG_MAPPING

from permtriton.errors import ModelError
from permtriton.model.empty_model import check_counts


@pytest.mark.slow
def test_no_config_of_transformers_is_refused(caplog):
    caplog.set_level(logging.CRITICAL)
    checked = 0
    for config_class in CONFIG_MAPPING.values():
        try:
            config = config_class().to_dict()
        except Exception:  # needs arguments, or a package that is not installed
            continue
        checked += 1
        check_counts(config, "config.json")
    assert checked > 300


@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "n_layer", "encoder_layers", "depths", "num_layers", "num_labels", "num_experts",
     "nomic-bert.block_count"],
)  # fmt: skip
def test_absurd_counts_are_refused_wherever_they_stand(key):
    with pytest.raises(ModelError, match=f"config.json: {key} is 1000000: expected at most 100000"):
        check_counts({"text_config": {key: [10**6] if key == "depths" else 10**6}}, "config.json")


def test_other_numbers_are_no_counts():
    check_counts({"vocab_size_per_layer_input": 262144, "vocab_size": 10**6}, "config.json")
