"""Puts an adapter that was trained on the dense model into the channel order of a compiled folder, exactly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from permtriton.checkpoint.folder import Folder
from permtriton.checkpoint.names import resolve_name
from permtriton.checkpoint.output import check_apart, replacing_folder
from permtriton.checkpoint.read_record import Record
from permtriton.checkpoint.save import copy_file
from permtriton.errors import ModelError, OutputError, reading, shown
from permtriton.methods.planning import plan_model
from permtriton.model.headers import REPORT_FILE, read_json
from permtriton.model.load import ADAPTER, load_empty_model
from permtriton.model.source import Source
from permtriton.passes.edits import Fold, edits_of, moves_of
from permtriton.passes.plan import Plan
from permtriton.recipe import config_from
from permtriton.util.output_files import real_path

WEIGHTS = "adapter_model.safetensors"
OF_PLAN = ("sparsity", "pattern", "o_proj", "skip_indivisible", "targets", "ignore")  # options that change the plan
CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq")  # initializations that change the dense weights, too
# tensors with channels that PEFT adds beside a weight
FACTORS = ("lora_A", "lora_B", "lora_embedding_B", "lora_magnitude_vector")
READ_STATES = ("score", "classifier", "qa_outputs", "summary")  # heads that the class of the folder's model may lack


def adapt(adapter: Path, to: Path, output: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Writes an adapter of PEFT, trained on the dense model, for a folder ``to`` of layout ``portable``.

    The columns of A read channels, and the rows of B write channels. Both are brought into the folder's order, as the
    weights beside them were, so that the adapter has the effect that it had on the dense model.

    Returns:
        ``output``, the number of ``tensors``, and how many of them were ``reordered``.
    """
    check_apart(output, adapter)
    check_apart(output, to)
    if output.exists():
        raise OutputError(f"output {output} exists: choose another folder")
    settings, record = _settings(adapter, to), Folder(to).record
    with reading(f"{adapter / WEIGHTS} cannot be read: load the adapter with PEFT and save it again", ModelError):
        tensors = load_file(adapter / WEIGHTS)
    order = _Order.of(to, record, trust_remote_code=trust_remote_code)
    adapted = {name: order.reordered(name, tensor) for name, tensor in tensors.items()}
    with replacing_folder(output, overwrite=False) as partial:
        for path in adapter.iterdir():
            if path.is_file() and path.name not in (WEIGHTS, ADAPTER):
                copy_file(path, adapter, partial)
        save_file(adapted, partial / WEIGHTS, {"format": "pt"})
        settings["base_model_name_or_path"] = str(real_path(to))
        (partial / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    reordered = sum(not adapted[name].equal(tensor) for name, tensor in tensors.items())
    return {"output": str(output), "tensors": len(tensors), "reordered": reordered}


def _settings(adapter: Path, to: Path) -> dict[str, Any]:
    if not (adapter / ADAPTER).is_file():
        raise ModelError(f"{adapter} holds no {ADAPTER}: give a folder that PEFT's save_pretrained wrote")
    settings = read_json(adapter / ADAPTER)
    kind, begin = settings.get("peft_type"), str(settings.get("init_lora_weights", "")).lower()
    if kind != "LORA" or settings.get("target_parameters") or settings.get("trainable_token_indices"):
        what = "of experts or some tokens" if kind == "LORA" else f"of the kind {shown(kind)}"
        raise ModelError(f"{adapter} is an adapter {what}, which cannot be reordered: train it on the compiled folder")
    if begin.startswith(CHANGE_THE_MODEL):
        raise ModelError(
            f"{adapter} began by {begin}, which changes the dense weights, too: let PEFT save it as a plain LoRA "
            "(path_initial_model_for_weight_conversion), and adapt that"
        )
    base = settings.get("base_model_name_or_path")
    if base and (Path(base) / REPORT_FILE).is_file():
        raise ModelError(
            f"{adapter} was trained on {base}, by its {ADAPTER}, which permtriton compiled: only adapters of a dense "
            f"model are reordered. If {to} is the same model, the adapter has that order already: use it as it is"
        )
    return settings


@dataclass(frozen=True)
class _Order:
    folds: dict[str, list[Fold]]  # name of a parameter -> its reorderings; a tied parameter has several names
    transposed: set[str]  # linears and embeddings whose weight is ``[in, out]``
    prefix: str  # name of the base model in the model
    hidden: Tensor | None  # order of the last hidden state's channels; None where they did not move

    @classmethod
    def of(cls, folder: Path, record: Record, *, trust_remote_code: bool) -> "_Order":
        """Plans the folder's model again, and takes the orders from its record."""
        if record["config"]["layout"] != "portable":
            raise ModelError(
                f"{folder} has the layout {record['config']['layout']}, in which norms and gathers reorder channels "
                "when it runs: train the adapter on it, or compile the dense model with `layout=portable`"
            )
        model = load_empty_model(Source(str(folder), trust_remote_code=trust_remote_code), allow_compiled=True)
        config: dict[str, Any] = {**record["config"]}
        options = {name: config[name] for name in OF_PLAN if name in config}
        plan, _ = plan_model(model, config_from(options))
        pruned = {name for site in record["sites"] for name in site["linears"]}
        if dense := sorted(set(plan.patterns) - pruned):  # linears that the dense share left dense
            options["ignore"] = [*(options.get("ignore") or ()), *dense]
            plan, _ = plan_model(model, config_from(options))
        indices, shared = _indices(plan, record, folder), dict[int, list[Fold]]()
        parameters = model.named_parameters(remove_duplicate=False)
        folds = {name: shared.setdefault(id(parameter), []) for name, parameter in parameters}
        for edit in edits_of(moves_of(plan, indices)):
            if isinstance(edit, Fold) and edit.parameter in folds:  # not of an expert in a stack, which is refused
                folds[edit.parameter].append(edit)
        transposed = {name for name, module in model.named_modules() if isinstance(module, Conv1D | nn.Embedding)}
        return cls(folds, transposed, model.base_model_prefix, plan.hidden_order(indices))

    def reordered(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor of an adapter in the new order."""
        path = name.removeprefix("base_model.").removeprefix("model.").replace(".base_layer", "")
        module, _, kind = path.removesuffix(".weight").rpartition(".")
        if module.endswith((".lora_B", ".lora_magnitude_vector")):  # a name such as ``lora_B.bias``
            module, _, kind = module.rpartition(".")
        if kind == "lora_embedding_A":  # its dimensions are the rank and the tokens: no channels
            return tensor
        if kind in FACTORS:
            moves = self._of_factor(name, f"{module}.weight", kind, tensor)
        else:
            moves = self._of_parameter(name, path, tensor)
        for index, dim in moves:
            if tensor.ndim <= dim or tensor.shape[dim] != len(index):
                raise ModelError(
                    f"the adapter's {name} is {list(tensor.shape)}, expected {len(index)} channels along dimension "
                    f"{dim}: it belongs to another model"
                )
            tensor = tensor.index_select(dim, index).contiguous()
        return tensor

    def _of_factor(self, name: str, weight: str, kind: str, tensor: Tensor) -> list[tuple[Tensor, int]]:
        """Returns the reordering of a tensor beside a weight, as a list of at most one index and its dimension.

        A tensor of kind ``lora_A`` takes the order in which the weight reads channels; others, that in which it writes.
        """
        stored, reads = self._stored(name, weight), kind == "lora_A"
        dim = int(reads != (stored.removesuffix(".weight") in self.transposed))
        longest = tensor.shape.index(max(tensor.shape))
        place = 1 if reads else longest if kind == "lora_magnitude_vector" else 0
        return [(fold.index, place) for fold in self.folds[stored] if fold.dim == dim][:1]

    def _of_parameter(self, name: str, path: str, tensor: Tensor) -> list[tuple[Tensor, int]]:
        """Returns the reorderings of a parameter that was trained as a whole (``modules_to_save``)."""
        in_model = resolve_name(path, self.folds, self.prefix) is not None
        if not in_model and path.split(".")[-2:][0] in READ_STATES and tensor.ndim == 2:
            return [] if self.hidden is None else [(self.hidden, 1)]
        if tensor.ndim > 2:
            raise ModelError(
                f"the adapter's {name} is a whole stack of weights, which cannot be reordered: train it on the "
                "compiled folder"
            )
        return [(fold.index, fold.dim) for fold in self.folds[self._stored(name, path)]]

    def _stored(self, name: str, parameter: str) -> str:
        """Returns the model's name of a parameter that the adapter calls ``parameter``; an error says ``name``."""
        stored = resolve_name(parameter, self.folds, self.prefix)
        if stored is None:
            raise ModelError(f"the adapter's {name} has no place in this model: it belongs to another one")
        return stored


def _indices(plan: Plan, record: Record, folder: Path) -> dict[str, Tensor]:
    """Returns space name -> unit index, from the orders of the sites in a record."""
    recorded = {tuple(site["linears"]): torch.tensor(site["index"]) for site in record["sites"]}
    indices = {}
    for site in plan.sites:
        index = recorded.get(site.linears)
        if index is None or len(index) != site.channels:
            raise ModelError(
                f"{folder} was compiled with other sites than this version finds ({site.name}): compile it again"
            )
        if not site.space.frozen:
            indices[site.space.name] = site.units[index[site.channels_by_unit[:, 0]]]
    return indices
