"""Training of small pruned models, whose zeros `permtriton.keep_pattern` keeps."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from transformers import PreTrainedModel

from . import folders, zoo

ROOT = Path(__file__).parent.parent
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def no_hooks_stay():
    """Collects what the test left; searching what all earlier tests left, too, would take a second each time."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    for hooks in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks):
        hooks.clear()


def pruned_llama(**sizes: int) -> PreTrainedModel:
    model = zoo.tiny_llama(**sizes)
    folders.prune(model)
    return model


def zeros_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() == 0 for name, parameter in model.named_parameters() if parameter.ndim > 1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        ids = zoo.tiny_ids(2, 8, seed=step)
        model(input_ids=ids).logits.logsumexp(-1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def check_kept(model: nn.Module, before: dict[str, torch.Tensor], names: list[str]) -> None:
    """Every weight that was zero is +0.0, and almost all others are not zero."""
    for name in names:
        weight, zeros = model.get_parameter(name).detach(), before[name]
        assert not weight[zeros].any(), name
        assert not weight[zeros].signbit().any(), name
        assert weight[~zeros].count_nonzero() > 0.99 * (~zeros).sum(), name


def adapted(model: PreTrainedModel, begin: bool | str = False):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=begin)
    return peft.get_peft_model(model, config)
