"""How does training keep the zeros of N:M weights?

After every step of an optimizer, those of its weights that were zero are set to zero again: torch calls hooks for that,
whoever wrote the loop. The model itself is not changed, so that it compiles, is divided among GPUs and is saved as
before. Two other ways were measured (``benchmarks/keep_variants.py``): a parametrization changes the names of the
weights and loses what PEFT merges; masks on gradients fail with an optimizer whose step is not zero where the gradient
is.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import TrainerCallback

from permtriton.checkpoint.names import loaded_names
from permtriton.checkpoint.patterns import kept_in_groups, linear_weights, pattern_of
from permtriton.checkpoint.record import PRUNED_ELSEWHERE, Record, find_record, recorded_weights
from permtriton.checkpoint.replace_modules import resolve_name
from permtriton.checkpoint.save import save_trained
from permtriton.data.media import Processor
from permtriton.errors import ConfigError, ModelError, listed, reading
from permtriton.model.beside import fetch_beside
from permtriton.model.expert_linears import input_dim
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE
from permtriton.model.modules import is_packed, is_permuted
from permtriton.model.name import is_hub_name
from permtriton.model.source import Source
from permtriton.passes.plan import LINEAR_MODULES
from permtriton.running import ranks
from permtriton.util.sparsity import NMPattern, PrunedWeight

BASE_LAYER = ".base_layer"  # where PEFT puts the linear that it wraps
ORIGINAL = ".original_module"  # and the module of which it trains a copy


def keep_pattern(model: nn.Module) -> "KeptPattern":
    """Keeps the zeros of every N:M weight of a model while it is trained, whatever the optimizer and the loop.

    After every step of an optimizer of torch, those of its weights that were zero are zero again. Call it once the
    weights are loaded; the model may be wrapped before or afterwards (``torch.compile``, ``fully_shard``, accelerate,
    PEFT), but a copy (``copy.deepcopy``) is another model, which needs a call of its own, unless what this returns is
    copied or pickled together with it. The weights are those that ``permtriton.json`` lists in the folder that the
    model was loaded from; without that file, every linear and every stack of experts whose groups keep N of M values. A
    mask takes a byte per weight. A kept weight may pass through zero, but one that is zero at this call stays zero.

    Args:
        model: model whose weights are N:M, in the layout ``portable`` or ``fused``.

    Returns:
        What saves the trained model, merges an adapter, or ends it.

    Raises:
        ModelError: no weight is N:M, a listed one is not, the weights are packed, empty, flattened by FSDP1 or, in the
            layout ``fused``, divided among ranks, or the hub refuses to be asked for what is beside the weights: of a
            private model, ``HF_TOKEN`` has to be set.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("my-model-2of4")
        >>> kept = permtriton.keep_pattern(model)
        >>> kept.patterns["model.layers.0.mlp.up_proj.weight"]
        NMPattern(kept=2, group=4)
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: expected a loaded model")
    inner = _unwrapped(model)
    _refuse_unsupported(inner)
    source = Source(str(getattr(inner, "name_or_path", ""))).at_commit(getattr(inner, "config", None))
    asked = source.revision or not is_hub_name(source.name)  # else it may be a folder that is gone
    record = find_record(source.name, source.hub) if asked else None
    if record is not None:
        fetch_beside(source)  # now, and not when the trained model is saved
    weights = _recorded(inner, record) if record else _recognized(inner)
    if not weights:
        count = sum(isinstance(module, LINEAR_MODULES) for module in inner.modules())
        raise ModelError(
            f"no weight of this {type(inner).__name__} is N:M, of {count} linears: expected a model that was pruned, "
            "with its zeros in groups. Load a folder that permtriton compile wrote"
        )
    _refuse_dense_adapters(model, inner, record)
    for weight in weights.values():
        weight.clear_signs()
    return KeptPattern(inner, weights, record)


class _Weight:
    """An N:M weight: where it is, and where it is zero."""

    def __init__(self, owner: nn.Module, key: str, dim: int, pattern: NMPattern) -> None:
        self.owner, self.key, self.dim, self.pattern = owner, key, dim, pattern
        self.find_zeros()

    @property
    def parameter(self) -> Tensor:
        """The present parameter; FSDP2 replaces it."""
        parameter = self.owner._parameters.get(self.key)
        if parameter is None:
            raise ModelError(
                f"the {self.key} of a {type(self.owner).__name__} is no parameter any more, so that its N:M pattern "
                "cannot be kept: use FSDP2 (fully_shard) in place of FSDP1, and no parametrization"
            )
        return parameter

    def find_zeros(self) -> None:
        self.zeros = _local(self.parameter).detach() == 0

    def here(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the values, and where it was zero."""
        parameter = self.parameter
        value = _local(parameter)
        if isinstance(parameter, DTensor) and self.zeros.shape != value.shape:  # FSDP2 has divided it since
            place = parameter.device_mesh, parameter.placements
            self.zeros = distribute_tensor(self.zeros, *place, src_data_rank=None).to_local()
        if self.zeros.device != value.device:
            self.zeros = self.zeros.to(value.device)
        return value, self.zeros

    @torch.no_grad()
    def restore(self) -> None:
        value, zeros = self.here()
        value.masked_fill_(zeros, 0)

    @torch.no_grad()
    def clear_signs(self) -> None:
        """Makes each -0.0 an ordinary zero: small weights are rounded to it in float16."""
        value = _local(self.parameter)
        negative = value.signbit() & (value == 0)
        if bool(negative.any()):  # else the weight may stay mapped from its file
            value.masked_fill_(negative, 0)

    def before_merging(self) -> Tensor:
        """Returns a copy of the values, with NaN for what is not zero where the weight was zero."""
        values, (here, zeros) = self.parameter.detach().clone(), self.here()
        _local(values).masked_fill_(zeros & (here != 0), torch.nan)
        return values

    def changes(self, before: Tensor) -> tuple[float, float]:
        """Returns the squared norm of the changes since then, and that of those which fell on zeros, of all ranks."""
        changes = (self.parameter.detach() - before).float().square()
        size = float(_whole(changes.sum()))
        _local(changes).masked_fill_(~self.here()[1], 0)
        return size, float(_whole(changes.sum()))

    @torch.no_grad()
    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Sets what an optimizer keeps for each pruned weight to zero."""
        for value in map(_local, state.values()):
            if isinstance(value, Tensor) and value.shape == self.zeros.shape:
                value.masked_fill_(self.zeros.to(value.device), 0)


@dataclass(frozen=True)
class MergedAdapter:
    """What `KeptPattern.merge_and_unload` returns.

    Attributes:
        model: the model without adapters, whose weights are N:M.
        lost: share of the adapter's changes to N:M weights, by their squared norm, that fell on zeros and is lost. NaN
            where it is not known, because the zeros were filled before: by PEFT's ``merge_adapter``, or by a way to
            begin, such as ``pissa``, that changes the weights themselves.
        lost_by_weight: the same of each weight that the adapter changed.
    """

    model: nn.Module
    lost: float
    lost_by_weight: dict[str, float]


class KeptPattern:
    """The N:M weights of a model in training; `permtriton.keep_pattern` makes it.

    Attributes:
        patterns: name of each weight -> its pattern.
        record: content of ``permtriton.json`` where the model was loaded from; None without one.
    """

    def __init__(self, model: nn.Module, weights: dict[str, _Weight], record: Record | None) -> None:
        self._weights, self.record = weights, record
        self.patterns = {name: weight.pattern for name, weight in weights.items()}
        self._keep(model)

    def _keep(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # the hooks below would keep it in memory
        self._began = False
        found = {name: weight.owner._parameters.get(weight.key) for name, weight in self._weights.items()}
        self._known = weakref.WeakValueDictionary[str, Tensor](
            {name: each for name, each in found.items() if each is not None}
        )
        self._graded: dict[int, set[int]] = {}  # optimizer that steps -> places of its weights with a gradient
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        weakref.finalize(model, self.remove).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled and copied: with the model, so that what is made of both belongs together."""
        state = {name: self.__dict__[name] for name in ("_weights", "record", "patterns")}
        return {**state, "model": self._model(), "ended": not self._hooks}

    def __copy__(self) -> "KeptPattern":
        """A second one of the same model would keep its zeros after the first was removed."""
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        model, ended = state.pop("model"), state.pop("ended")
        self.__dict__.update(state)
        self._keep(nn.Module() if model is None else model)
        if ended:
            self.remove()

    @torch.compiler.disable
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass, which may still need them whole
            _divide_again(model)
        if not self._began and model is not None:
            _refuse_changed(model)  # Trainer puts Liger's norms in only when training begins
        self._began = True
        self._graded[id(optimizer)] = _places(optimizer, graded=True)
        places = _places(optimizer)
        for name, weight in self._weights.items():
            parameter = weight.owner._parameters.get(weight.key)
            trained = self._is_of(optimizer) if parameter is None else _place(parameter) in places
            if parameter is not self._known.get(name) and trained:  # FSDP2 has divided it since
                _check_pattern(name, weight)
                weight.find_zeros()
                self._known[name] = weight.parameter

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restores the weights that had a gradient, of this optimizer alone: a backward pass may still need the others
        as they are. A step without any gradient may have changed every weight of its optimizer.
        """
        changed = self._graded.pop(id(optimizer), set()) | _places(optimizer, graded=True) or _places(optimizer)
        for weight in self._weights.values():
            parameter = weight.owner._parameters.get(weight.key)
            if parameter is not None and _place(parameter) in changed:
                weight.restore()
                if callable(getattr(optimizer, "eval", None)):  # schedule-free: it mixes weights with others of its own
                    weight.restore_state(optimizer.state.get(parameter, {}))

    def _is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer trains this model."""
        model = self._model()
        return model is not None and not _places(optimizer).isdisjoint(map(_place, model.parameters()))

    def restore(self) -> None:
        """Sets the weights that were zero to zero now, such as after a change that no optimizer made."""
        _divide_again(self._model())
        for weight in self._weights.values():
            weight.restore()

    def remove(self) -> None:
        """Ends it: later steps change all weights."""
        while self._hooks:
            self._hooks.pop().remove()

    def merge_and_unload(self, model: Any, **options: Any) -> MergedAdapter:
        """Merges the adapters of PEFT into the weights, and sets those that were zero to zero again.

        An adapter changes all weights, so merging loses what it does to zeros: measure the model before and after.
        While it merges, a second copy of the N:M weights is in memory.

        Args:
            model: the ``PeftModel``.
            options: further arguments of its ``merge_and_unload``.

        Raises:
            ModelError: the model is no ``PeftModel`` whose adapters can be merged, is another one, trains copies of N:M
                weights, or has an adapter on a linear that gathers its input.
        """
        _refuse_dense_adapters(model, self._model(), self.record)
        if not hasattr(model, "merge_and_unload"):
            kinds = {str(each.peft_type).rpartition(".")[2] for each in getattr(model, "peft_config", {}).values()}
            if hasattr(model, "get_base_model"):
                raise ModelError(
                    f"an adapter of the kind {', '.join(sorted(kinds))} changes no weights, so that it cannot be "
                    "merged: keep it beside the model"
                )
            raise ModelError(
                f"a {type(model).__name__} is no PeftModel: give the one that holds the adapters. Those of the model's "
                "own add_adapter are merged in a second model: save them with save_pretrained, load the folder of the "
                "model again, and call keep_pattern and PeftModel.from_pretrained on it"
            )
        places = {module: name for name, module in model.named_modules()}
        for name, weight in self._weights.items():
            if weight.owner not in places:
                raise ModelError(f"the adapters are of another model: this one does not hold the {name} that is kept")
            _refuse_copied(name, places[weight.owner])
        for module, name in places.items():
            if name.endswith(BASE_LAYER) and is_permuted(module):
                raise ModelError(
                    f"{name.removesuffix(BASE_LAYER)} brings its input into another order, which its adapter does not "
                    "read: keep the adapter beside the model, or train one of the layout portable"
                )
        _divide_again(model)
        before = {name: weight.before_merging() for name, weight in self._weights.items()}
        try:
            with reading("the adapters cannot be merged", ModelError):
                merged = model.merge_and_unload(**options)
            sums = {name: weight.changes(before.pop(name)) for name, weight in self._weights.items()}
        finally:
            self.restore()
        shares = {name: lost / size for name, (size, lost) in sums.items() if size}
        size, lost = map(sum, zip(*sums.values(), strict=True))
        return MergedAdapter(merged, lost / (size or 1.0), shares)

    def save_pretrained(
        self, folder: str | Path, tokenizer: Processor | None = None, *, overwrite: bool = False
    ) -> Path:
        """Writes the trained model with ``permtriton.json``, so that ``permtriton export`` packs it.

        Every tensor is read back and compared with the model, and every N:M weight is checked, before the folder is
        renamed into place. Of several ranks, all call it, the first one writes, and all end as it does.

        Args:
            folder: folder to write.
            tokenizer: tokenizer or processor, which is saved, too.
            overwrite: whether an earlier output of permtriton may be replaced.

        Returns:
            The absolute path of the folder.

        Raises:
            ModelError: the model was not loaded from a folder that permtriton wrote, or its adapters are not merged.
            OutputError: the folder exists and may not be replaced, or cannot be written.
            VerificationError: the written folder fails a check; nothing is left behind.
        """
        model: Any = self._model()
        record = self.record
        if model is None:
            raise ModelError("the model does not exist any more: keep a reference to it until it is saved")
        if record is None:
            name = getattr(model, "name_or_path", "") or f"this {type(model).__name__}"
            raise ModelError(
                f"{name} holds no permtriton.json, which would have to be saved, too: use save_pretrained of what "
                "permtriton.compile returned, load the model from a folder that permtriton compile wrote, or save it "
                f"with its own save_pretrained. {PRUNED_ELSEWHERE}"
            )
        if any(name.endswith(BASE_LAYER) for name, _ in model.named_modules()):
            raise ModelError("the model has adapters: merge them first, with merge_and_unload of keep_pattern's result")
        _divide_again(model)
        _refuse_changed(model)
        for weight in self._weights.values():
            weight.clear_signs()
        state: dict[str, Any] | None = None
        if _is_divided(model):
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        pruned = {name: PrunedWeight(weight.dim, weight.pattern) for name, weight in self._weights.items()}
        return ranks.on_first(
            lambda: save_trained(model, tokenizer, record, pruned, Path(folder), state=state, overwrite=overwrite)
        )


class KeepPattern(TrainerCallback):
    """Does what `permtriton.keep_pattern` does, as a callback of ``transformers.Trainer``.

    Attributes:
        kept: what `permtriton.keep_pattern` returned; None before training.

    Example:
        >>> from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
        >>> model = AutoModelForCausalLM.from_pretrained("my-model-2of4")
        >>> keep = permtriton.KeepPattern()
        >>> arguments = TrainingArguments("training", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True)
        >>> sample = {"input_ids": list(range(16)), "labels": list(range(16))}
        >>> trained = Trainer(model, arguments, train_dataset=[sample] * 16, callbacks=[keep]).train()
        {...
        >>> keep.save_pretrained("my-model-trained").name
        'my-model-trained'
    """

    kept: KeptPattern | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Keeps the pattern of the Trainer's model from now on."""
        if self.kept is not None:
            self.kept.remove()
        self.kept = keep_pattern(named["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ends it; the weights are N:M."""
        assert self.kept is not None
        self.kept.remove()

    def save_pretrained(
        self, folder: str | Path, tokenizer: Processor | None = None, *, overwrite: bool = False
    ) -> Path:
        """Saves the trained model as `KeptPattern.save_pretrained` does."""
        if self.kept is None:
            raise ModelError("nothing was trained with this KeepPattern: give it to a Trainer, and train")
        return self.kept.save_pretrained(folder, tokenizer, overwrite=overwrite)


def _unwrapped(model: Any) -> nn.Module:
    """Returns the model inside what torch.compile, DataParallel and PEFT wrap around it."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _divide_again(model: nn.Module | None) -> None:
    """Has FSDP2 take back the whole weights that a forward pass without a backward one leaves in the modules."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_divided(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refuse_unsupported(model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ModelError("FSDP1 flattens weights, so that their N:M pattern is lost: use FSDP2 (fully_shard)")
    if packed := [name for name, module in model.named_modules() if is_packed(module)]:
        raise ModelError(
            f"{listed(packed)}: packed weights cannot be trained: write the folder with permtriton export --format "
            "dense, and load that"
        )
    _refuse_changed(model)
    if (getattr(model, "_tp_size", None) or 1) > 1 and not _is_divided(model):
        raise ModelError(
            "this version of transformers divided the model by tensor parallelism into plain tensors, which the first "
            "rank alone could not save: use a newer one, or load the model whole and call fully_shard"
        )
    if any(hasattr(module, "quantization_scheme") for module in model.modules()):
        raise ModelError(
            "weights in 8 bits cannot be trained: train the folder that they were made of, then write that one with "
            "permtriton export --format fp8"
        )
    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ModelError(f"{empty[0]} has no values, so where it is zero is not known: load the weights first")


def _refuse_changed(model: nn.Module) -> None:
    """Refuses modules in whose place others were put that hide what permutes, or give weights other names.

    Refused, too, are modules that permute while weights are divided among ranks: their folder could not be written.
    """
    divided = _is_divided(model)
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise ModelError(
                f"{name} is another module now, torch.compile's, which changes the names of its weights: put its "
                "_orig_mod back, and compile that in place, with its method compile()"
            )
        if divided and is_permuted(module):
            raise ModelError(
                f"{name} permutes channels (layout fused), and such a model cannot be saved while its weights are "
                "divided among ranks: train it undivided, or one of the layout portable"
            )
        runs = getattr(vars(module).get("forward"), "__module__", "")
        if is_permuted(module) and runs.startswith("liger_kernel"):
            raise ModelError(
                f"{name} permutes channels, and Liger's norm, which runs in its place, does not: give Trainer "
                "`liger_kernel_config={'rms_norm': False}`, or train a model of the layout portable"
            )


def _refuse_dense_adapters(model: Any, inner: Any, record: Record | None) -> None:
    """Refuses adapters that were trained on the dense model, whose channels have another order."""
    if record is None or not any(site["moved"] for site in record["sites"]):
        return
    for config in getattr(model, "peft_config", {}).values():
        base = config.base_model_name_or_path or inner.name_or_path
        unpruned = Path(base, CONFIG_FILE).is_file() and not Path(base, REPORT_FILE).is_file()
        if base != inner.name_or_path and (base == record["model"] or unpruned):
            raise ModelError(
                f"the adapter was trained on {base}, whose channels have another order than those of "
                f"{inner.name_or_path}: write it in this order with permtriton adapt ADAPTER --to FOLDER. If it was "
                "trained in this order, say so by base_model_name_or_path in its adapter_config.json"
            )


def _refuse_copied(name: str, place: str) -> None:
    """Refuses an N:M weight in a module of which PEFT trains a copy."""
    if ORIGINAL in place:
        raise ModelError(
            f"{_plain(name)}: the adapter trains a dense copy of it (modules_to_save): name it in target_modules "
            "instead"
        )


def _recorded(model: Any, record: Record) -> dict[str, _Weight]:
    """Returns the weights that ``permtriton.json`` lists, by their names in the model."""
    weights, pruned = dict[str, _Weight](), recorded_weights(record)
    known = {_plain(name): name for name, _ in model.named_parameters()}
    names = loaded_names(model, pruned, known)
    for stored, kept in pruned.items():
        plain = resolve_name(names[stored], known, getattr(model, "base_model_prefix", ""))
        if plain is None:
            raise ModelError(
                f"permtriton.json of {model.name_or_path} lists the N:M weight {stored}, which this "
                f"{type(model).__name__} does not have: load it with the class of its config.json"
            )
        name, dim = known[plain], kept.dim
        weight = _weight(model, name, dim, kept.pattern)
        shape = weight.parameter.shape
        if not 0 <= dim < len(shape) or shape[dim] % weight.pattern.group:
            raise ModelError(
                f"permtriton.json of {model.name_or_path} has {stored} at {weight.pattern} along dimension {dim}, "
                f"which its shape {list(shape)} does not fit: the file is damaged"
            )
        _check_pattern(name, weight)
        weights[plain] = weight
    return weights


def _check_pattern(name: str, weight: _Weight) -> None:
    fullest = int(kept_in_groups(_whole(weight.parameter), weight.dim, weight.pattern.group).max())
    if fullest > weight.pattern.kept:
        raise ModelError(
            f"{name} is not {weight.pattern} any more: a group holds {fullest} nonzero weights. It was changed since "
            "it was loaded: call keep_pattern before any training, and load no dense weights after it"
        )


def _recognized(model: nn.Module) -> dict[str, _Weight]:
    """Returns the weights of linears and stacked experts whose groups all keep N of M values."""
    weights = {}
    for name, parameter in linear_weights(model):
        dim = input_dim(model, name)
        if pattern := pattern_of(_whole(parameter).detach(), dim):
            weights[_plain(name)] = _weight(model, name, dim, pattern)
    return weights


def _weight(model: nn.Module, name: str, dim: int, pattern: NMPattern) -> _Weight:
    owner, _, key = name.rpartition(".")
    _refuse_copied(name, owner)
    return _Weight(model.get_submodule(owner), key, dim, pattern)


def _plain(name: str) -> str:
    """Returns the name that a parameter has without adapters."""
    return name.replace(BASE_LAYER, "").replace(ORIGINAL, "")


def _local(tensor: Any) -> Tensor:
    """Returns this rank's part of a tensor that is divided among ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _places(optimizer: torch.optim.Optimizer, *, graded: bool = False) -> set[int]:
    """Returns where the values of an optimizer's weights are, or of those that have a gradient."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return {_place(each) for each in parameters if not graded or each.grad is not None}


def _place(tensor: Any) -> int:
    """Returns what tells where the values of a tensor are: views share it with their weight."""
    try:
        return _local(tensor).untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:  # sparse, or of a class that wraps other tensors
        return id(tensor)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
