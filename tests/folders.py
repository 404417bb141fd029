"""Folders as a compilation writes them, made by hand: pruned by magnitude, without calibration and learning."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint import REPORT_FILE
from permtriton.export import export
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.match_norm import match_norm
from permtriton.modules import SparseLinear, from_norm, replace_module
from permtriton.quantizer import attach

from . import zoo

CONFIG = "config.json"


def pruned_weights(model: PreTrainedModel) -> dict[str, int]:
    """Every linear of the layers, and every stack of experts -> its input dimension."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "embed" in name or name.split(".")[-2] in ("lm_head", "decoder", "wte", "wpe", "gate"):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Conv1D):
            found[name] = 0
        elif isinstance(owner, nn.Linear) or parameter.ndim == 3:
            found[name] = parameter.ndim - 1
    return found


@torch.no_grad()
def prune(model: PreTrainedModel, kept: int = 2, group: int = 4) -> dict[str, int]:
    """Prunes a model in place; returns what `pruned_weights` does."""
    found = pruned_weights(model)
    for name, dim in found.items():
        parameter = model.get_parameter(name)
        weight = parameter.movedim(dim, -1)
        mask = top_n_mask(weight.abs().flatten(0, -2).float().T, kept, group).T.reshape(weight.shape)
        parameter.copy_((weight * mask).movedim(-1, dim)).add_(0.0)
    return found


def fuse(model: PreTrainedModel, norms: list[str], gathers: list[str]) -> None:
    """Puts permuted modules with random permutations in the place of norms and linears."""
    generator = torch.Generator().manual_seed(3)
    for name in norms:
        norm = model.get_submodule(name)
        channels = norm.weight.numel()
        variant = match_norm(norm, channels)
        assert variant is not None
        replace_module(model, name, from_norm(norm, variant, torch.randperm(channels, generator=generator)))
    for name in gathers:
        linear = model.get_submodule(name)
        index = torch.randperm(linear.in_features, generator=generator)
        replace_module(model, name, SparseLinear.from_linear(linear, index))


FUSED_NORMS = {
    "llama": ["model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"],
    "gemma2": ["model.layers.0.input_layernorm", "model.layers.1.pre_feedforward_layernorm"],
    "opt": ["model.decoder.layers.1.self_attn_layer_norm"],
}
FUSED_GATHERS = {
    "llama": ["model.layers.0.self_attn.o_proj"],
    "gemma2": ["model.layers.1.mlp.down_proj"],
    "opt": ["model.decoder.layers.0.fc2"],
}


def model_of(
    name: str, *, fused: bool = False, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """Returns a pruned zoo model."""
    model = (zoo.build_mixture if name in zoo.MIXTURES else zoo.build)(name, **changes)
    for parameter in model.parameters():  # not the buffers: those of rotary embeddings stay float32
        parameter.data = parameter.data.to(dtype)
    prune(model)
    if fused:
        fuse(model, FUSED_NORMS[name], FUSED_GATHERS[name])
    return model


def save(model: PreTrainedModel, folder: Path, sparsity: str = "2:4", shard: str = "5GB") -> Path:
    """Writes what a compilation would."""
    attach(model, sparsity)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=False)
    report = {
        "model": "zoo",
        "config": {"sparsity": sparsity},
        "pruned_weights": pruned_weights(model),
    }
    (folder / REPORT_FILE).write_text(json.dumps(report))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def state(model: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of every tensor."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes: 0.0 and -0.0 differ."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are not equal bit for bit."""
    return [
        name
        for name in {**first, **second}
        if name not in first
        or name not in second
        or (first[name].dtype, first[name].shape) != (second[name].dtype, second[name].shape)
        or not torch.equal(bits(first[name]), bits(second[name]))
    ]


def edit_json(path: Path, change) -> None:
    """Rewrites a JSON file after ``change`` did something to what it holds."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def places(root: Path) -> Callable[..., Path]:
    """Returns a function from name, format and dtype to a folder, made once; do not write into it."""
    made: dict[str, Path] = {}

    def find(name: str, format: str, *, fused: bool = False, dtype: torch.dtype = torch.bfloat16) -> Path:
        key = f"{name}-{fused}-{str(dtype).removeprefix('torch.')}"
        if key not in made:
            made[key] = save(model_of(name, fused=fused, dtype=dtype), root / key)
        output = root / f"{key}-{format}"
        if format != "saved" and not output.exists():
            export(made[key], output, format)
        return made[key] if format == "saved" else output

    return find


def rewrite(folder: Path, change) -> None:
    """Changes tensors, and takes the hashes away, so that what remains must be found by other checks."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / CONFIG, lambda config: config["quantization_config"].pop("sha256", None))
