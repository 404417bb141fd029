"""Folders like those of a compilation, but pruned by magnitude, without calibration or learning."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.export import export
from permtriton.checkpoint.quantizer import attach
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.model.headers import REPORT_FILE
from permtriton.model.modules import SparseLinear, from_norm, replace_module
from permtriton.model.norms import match_norm
from permtriton.util.sparsity import NMPattern

from . import zoo
from .kernel_inputs import TWO_FOUR

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAST_UP = "model.layers.1.mlp.up_proj.weight"
PACKED = {"shape": [112, 64], "dim": 1}
NORM = {"kind": "rms", "offset": 0.0, "eps": 1e-6, "channels": 64}
QUANTIZATION = {  # a valid quantization_config
    "quant_method": "permtriton",
    "version": 1,
    "format": "packed",
    "sparsity": "2:4",
    "packed": {LAST_UP: PACKED},
    "gathers": {"model.layers.0.self_attn.o_proj": 64},
    "norms": {"model.norm": NORM},
    "sha256": {"model.safetensors": "0" * 64},
}


def pruned_weights(model: PreTrainedModel) -> dict[str, int]:
    """Maps the weight of every linear of the layers, and every stack of experts, to its input dimension."""
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
def prune_weight(parameter: Tensor, dim: int = -1, pattern: NMPattern = TWO_FOUR) -> None:
    """Keeps the largest values of each group along ``dim``, in place."""
    weight = parameter.movedim(dim, -1)
    mask = top_n_mask(weight.abs().flatten(0, -2).float().T, pattern).T.reshape(weight.shape)
    parameter.copy_((weight * mask).movedim(-1, dim)).add_(0.0)  # turns -0.0 into 0.0


def prune(model: PreTrainedModel, kept: int = 2, group: int = 4) -> dict[str, int]:
    """Prunes a model in place; returns its `pruned_weights`."""
    found = pruned_weights(model)
    for name, dim in found.items():
        prune_weight(model.get_parameter(name), dim, NMPattern(kept, group))
    return found


def fuse(model: PreTrainedModel, norms: list[str], gathers: list[str]) -> None:
    """Replaces norms and linears by permuted modules with random permutations."""
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
    model = zoo.build(name, **changes)
    for parameter in model.parameters():  # not the buffers: those of rotary embeddings stay float32
        parameter.data = parameter.data.to(dtype)
    prune(model)
    if fused:
        fuse(model, FUSED_NORMS[name], FUSED_GATHERS[name])
    return model


def record(sparsity: str = "2:4", **entries: object) -> dict[str, object]:
    """Returns the content of ``permtriton.json`` of a compilation that recorded as little as it can."""
    return {
        "model": "zoo", "command": "permtriton compile zoo", "versions": {}, "device": "cpu", "determinism": {},
        "dtype": "float32", "calibration": {"sha256": "0", "shape": [4, 16]}, "generated": None,
        "parameters": 2, "pruned_parameters": 1,
        "config": {"sparsity": sparsity, "importance": "magnitude", "recipe": "mask", "layout": "portable",
                   "calibration": "demo", "seed": 0},
        "sparsity_by_layer": {}, "permutations": [], "skipped": {}, "barriers": [], "sites": [], "rows": [],
        "hidden_states": {"permuted": False}, "steps": [], "retained_importance": {},
        "evaluation": {},
        "proof": {"fold_difference": 0.0, "lowered_graph": ""},
        "seconds": {}, "memory": {"peak": 1, "estimate": {}}, "files": {}, "card": None,
        "verification": {"tensors": 1, "pruned_weights": 1, "reloaded": "same outputs"}, **entries,
    }  # fmt: skip


def save(model: PreTrainedModel, folder: Path, sparsity: str = "2:4", shard: str = "5GB") -> Path:
    """Saves a model as a compilation does."""
    attach(model, sparsity)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=False)
    (folder / REPORT_FILE).write_text(json.dumps(record(sparsity=sparsity, pruned_weights=pruned_weights(model))))
    (folder / "beside.json").write_text("{}")
    return folder


def load(folder: Path, kind: type = AutoModelForCausalLM, **options: object) -> PreTrainedModel:
    """Loads a folder through transformers."""
    return kind.from_pretrained(folder, **options)


def files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file, by its path within the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state(model: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of every tensor."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, in which 0.0 and -0.0 differ."""
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
    """Rewrites a JSON file after ``change`` has edited its content in place."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def places(root: Path) -> Callable[..., Path]:
    """Returns a function that gives the folder of a name, format and dtype. Each is made once: do not write into it."""
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


def configure(folder: Path, **changes: object) -> None:
    """Changes fields of ``config.json``; None removes one."""
    stored = {**json.loads((folder / CONFIG).read_text()), **changes}
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))


def edit_tensors(folder: Path, change, file: str = WEIGHTS) -> None:
    """Rewrites a file of tensors after ``change`` has edited their dictionary in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def change_tensor(name: str, change: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    """Returns a function that replaces a tensor of a folder by ``change`` of it; None removes the tensor."""

    def apply(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor).contiguous()

    return lambda folder: edit_tensors(folder, apply)


def rewrite(folder: Path, change) -> None:
    """Changes tensors and removes the hashes, so that other checks must find the damage."""
    edit_tensors(folder, change)
    edit_json(folder / CONFIG, lambda config: config["quantization_config"].pop("sha256", None))


def after_saving(monkeypatch, compiled, do: Callable[[Path], object]) -> None:
    """Calls ``do`` on the temporary folder after the model is written and before it is verified."""
    save = compiled.model.save_pretrained

    def save_pretrained(folder, **options):
        save(folder, **options)
        do(Path(folder))

    monkeypatch.setattr(compiled.model, "save_pretrained", save_pretrained)
