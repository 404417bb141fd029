"""A model whose layers come to the device one by one gives the bits of one that is there as a whole."""

import gc

import pytest
import torch
from torch import nn

from permtriton import config_from
from permtriton.driver.memory import Devices, estimate
from permtriton.driver.pipeline import compile_model
from permtriton.driver.planning import find_plan
from permtriton.errors import ConfigError
from permtriton.model.forward import last_hidden_state
from permtriton.data.samples import Samples
from permtriton.passes.plan import layer_modules
from permtriton.running.onload import onloaded, resident
from permtriton.util.sparsity import NMPattern

from . import zoo

IDS = zoo.token_ids(6, 12)
CPU = torch.device("cpu")
SMALL = {"samples": 6, "sequence_length": 12, "micro_batch_size": 2, "activation_checkpointing": False}
TRAIN = {"reconstruct_epochs": 2, "reconstruct_batch_size": 2, "reconstruct_learning_rate": 0.01}


def compiled(name: str, recipe: str, **options):
    model = zoo.build(name)
    config = config_from({**SMALL, **(TRAIN if "reconstruct" in recipe else {}), **options.pop("config", {})}, recipe)
    return model, compile_model(model, config=config, ids=IDS, evaluation_windows=IDS, **options)


@pytest.mark.parametrize(
    ("name", "recipe", "config"),
    [
        ("llama_eager", "heuristic,refit", {}),
        ("llama_eager", "heuristic,sparsegpt,reconstruct", {"layout": "fused", "heuristic_row_weights": "fisher"}),
        ("bert", "heuristic,refit", {}),
        ("mixtral", "heuristic,sparsegpt", {"importance": "wanda", "sparsegpt_mask": "keep"}),
        ("t5", "heuristic,refit", {}),
    ],
)
def test_the_result_is_that_of_a_whole_model(name, recipe, config):
    before, whole = compiled(name, recipe, config=config)
    model, found = compiled(name, recipe, config=config, onload=True)
    expected = before.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert found.report["evaluation"] == whole.report["evaluation"]
    assert found.report["needs"]["onload"] if "needs" in found.report else True
