"""What vLLM cannot compute, or what is damaged, is refused with one sentence, before an engine starts."""

import json
import shutil

import pytest
import torch
from torch import nn
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from permtriton.checkpoint.export import export
from permtriton.errors import ModelError
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.serving.linear import PermTritonLinearMethod, Stored
from permtriton.serving.order import Order
from permtriton.serving.servable import check_folder
from permtriton.util.sparsity import NMPattern

from .. import folders, zoo
from .engine import engine

LLAMA = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 224, "head_dim": 32,
         "max_position_embeddings": 96}  # fmt: skip


def configure(folder) -> None:
    """Does what vLLM does before it starts an engine."""
    load_general_plugins()
    EngineArgs(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True).create_engine_config()


def packed(model, root):
    folders.save(model, root / "saved")
    export(root / "saved", root / "packed", "packed")
    return root / "packed"


def flip(folder) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(**changes):
    return lambda folder: folders.edit_json(
        folder / folders.CONFIG, lambda config: config["quantization_config"].update(changes)
    )


DAMAGE = {
    "a flipped bit": (flip, "its SHA-256 is not the one that was written"),
    "an unknown entry": (edit(surprise=1), "surprise is unknown: the file is damaged"),
    "another version": (edit(version=2), "version is 2"),
    "another pattern": (edit(sparsity="4:8"), "for .* at 4:8: the checkpoint is damaged"),
    "a file more": (
        lambda folder: shutil.copy(folder / folders.WEIGHTS, folder / "more.safetensors"),
        "more.safetensors does not belong to the checkpoint",
    ),
    "no weights": (lambda folder: (folder / folders.WEIGHTS).unlink(), "neither model.safetensors nor"),
    "a tensor less": (
        lambda folder: folders.rewrite(folder, lambda tensors: tensors.pop("model.norm.weight")),
        "holds no weights for model.norm.weight",
    ),
    "another index": (
        lambda folder: folders.rewrite(folder, lambda tensors: tensors.pop("model.layers.0.input_layernorm.index")),
        "holds no weights for model.layers.0.input_layernorm.index",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_before_the_engine_starts(damage, copy_of):
    folder = copy_of("fused-packed")
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(ModelError, match=message):
        configure(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2", "Gemma2ForCausalLM with packed weights is not served by vLLM"),
        ("gpt2", "serves packed linears only"),
        ("mixtral", "serves packed linears only"),
    ],
)
def test_other_models_are_refused_before_the_engine_starts(name, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        configure(packed(folders.model_of(name, dtype=torch.float32), tmp_path))


def test_norms_that_vllm_cannot_permute_are_refused(tmp_path):
    with pytest.raises(ModelError, match="compile the model with --layout portable"):
        configure(packed(folders.model_of("gemma2", fused=True), tmp_path))


def test_a_name_of_the_hub_is_refused():
    with pytest.raises(ModelError, match="download it first"):
        check_folder("someone/model-2of4")


def no_permutation(tensors) -> None:
    tensors["model.layers.0.input_layernorm.index"][0] = tensors["model.layers.0.input_layernorm.index"][1]


def test_content_is_checked_while_it_is_loaded(copy_of):
    folder = copy_of("fused-packed")
    folders.rewrite(folder, no_permutation)
    with pytest.raises(ModelError, match="not a permutation"), engine(folder):
        pass


def partly_packed(root):
    """A folder in which k is dense, while q and v, which vLLM joins it to, are packed."""
    model = zoo.build("llama", **LLAMA)
    folders.prune(model)
    model.model.layers[1].self_attn.k_proj.weight.data.normal_()
    folders.save(model, root / "saved")
    report = json.loads((root / "saved" / "permtriton.json").read_text())
    del report["pruned_weights"]["model.layers.1.self_attn.k_proj.weight"]
    (root / "saved" / "permtriton.json").write_text(json.dumps(report))
    export(root / "saved", root / "packed", "packed")
    return root / "packed"


def with_two_patterns(root):
    """A folder in which k is 4:8, while q and v, which vLLM joins it to, are 2:4."""
    model, name = zoo.build("llama", **LLAMA), "model.layers.1.self_attn.k_proj.weight"
    folders.prune(model)
    folders.prune_weight(model.get_parameter(name).data.normal_(), pattern=NMPattern(4, 8))
    folders.save(model, root / "saved")
    folders.edit_json(root / "saved" / "permtriton.json", lambda record: record.update(patterns={name: "4:8"}))
    export(root / "saved", root / "packed", "packed")
    return root / "packed"


def gathering(seeds):
    """Returns a function that makes a folder in which q, k and v gather in the orders of seeds; None: no gather."""

    def make(root):
        model = zoo.build("llama", **LLAMA)
        folders.prune(model)
        for part, seed in zip("qkv", seeds, strict=True):
            if seed is not None:
                linear = model.get_submodule(path := f"model.layers.0.self_attn.{part}_proj")
                index = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(seed))
                replace_module(model, path, SparseLinear.from_linear(linear, index))
        return packed(model, root)

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partly_packed, "only some of them are packed"),
        (with_two_patterns, "or they differ in their pattern"),
        (gathering((1, 1, None)), "only some of them gather"),
        (gathering((1, 1, 2)), "in different orders"),
    ],
    ids=["partly packed", "two patterns", "partly gathering", "different orders"],
)
def test_linears_that_cannot_be_joined_are_refused(make, message, tmp_path):
    with pytest.raises(ModelError, match=message), engine(make(tmp_path), skip_tokenizer_init=True):
        pass


def test_a_gather_across_ranks_is_refused():
    order = Order("down_proj", 8)
    order.index.weight_loader(order.index, torch.tensor([1, 0, 3, 2, 7, 6, 5, 4]))
    order.finish(4, 4)
    assert order.index.tolist() == [3, 2, 1, 0]
    order = Order("down_proj", 8)
    order.index.weight_loader(order.index, torch.tensor([1, 4, 3, 2, 7, 6, 5, 0]))
    with pytest.raises(ModelError, match="channels of other ranks"):
        order.finish(0, 4)


@pytest.mark.parametrize(("kept", "group", "columns"), [(2, 4, 36), (2, 4, 6), (4, 8, 12), (1, 4, 8)])
def test_ranks_that_would_divide_groups_or_bytes_are_refused(kept, group, columns):
    method = PermTritonLinearMethod("down_proj", Stored(torch.float32, NMPattern(kept, group)), gathers=False)
    with pytest.raises(ModelError, match="use fewer ranks"):
        method.create_weights(nn.Module(), columns, [8], 2 * columns, 8, torch.float32, weight_loader=None)
