"""Keeps the zeros of N:M weights during training.

After every step of an optimizer, in any training loop, torch calls a hook, which sets those of the optimizer's weights
that were zero to zero again. The model itself is not changed, so that it compiles and is saved as before
(``benchmarks/keep_variants.py`` measures the alternatives, parametrizations and masks on gradients).
"""

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback

from permtriton.checkpoint.nm_weights import BASE_LAYER, fullest_group, recorded_in, regular_weights
from permtriton.checkpoint.read_record import PRUNED_ELSEWHERE, Record, find_record
from permtriton.checkpoint.save import save
from permtriton.data.media import Processor
from permtriton.errors import ConfigError, ModelError, reading
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE
from permtriton.model.modules import is_permuted
from permtriton.model.prunable import check_loaded
from permtriton.model.source import source_of_loaded
from permtriton.util import ranks
from permtriton.util.output_files import real_path
from permtriton.util.permutation import moved
from permtriton.util.sparsity import PrunedWeight


def keep_pattern(model: nn.Module) -> "KeptPattern":
    """Keeps the zeros of every N:M weight of a model while it is trained: each step of an optimizer restores them.

    Call it once the weights are loaded. The model may be wrapped before or afterwards (``torch.compile``, DDP,
    accelerate, PEFT). The weights are those that ``permtriton.json`` lists in the folder that the model was loaded
    from; without that file, every linear and every stack of experts whose groups keep N of M values. The zeros of a
    weight take a byte for each of its values. The result saves the model, merges an adapter, or stops keeping zeros.

    Raises:
        ConfigError: ``model`` is no loaded model.
        ModelError: no weight is N:M; a listed weight is not, or is missing, as it is in a packed model; a weight is
            divided among ranks; an adapter was trained on the dense model; or Liger's norms replace those that permute.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: expected a loaded model")
    inner: Any = _unwrapped(model)
    source = source_of_loaded(inner)
    record = find_record(source) if source else None
    check_loaded(inner)
    for name, module in inner.named_modules():
        forward = getattr(vars(module).get("forward"), "__module__", "")
        if is_permuted(module) and forward.startswith("liger_kernel"):  # Trainer replaces it before its callbacks
            raise ModelError(
                f"{name} permutes channels, and Liger's norm, which runs in its place, does not: give Trainer "
                "`liger_kernel_config={'rms_norm': False}`, or train a model of the layout portable"
            )
    _refuse_dense_adapters(model, record)
    if not (weights := _weights(inner, record)):
        raise ModelError(
            f"no weight of this {type(inner).__name__} is N:M: load a folder that permtriton compile wrote"
        )
    return KeptPattern(inner, weights, record)


class _Weight:
    """An N:M weight: where it is, and where it is zero."""

    def __init__(self, model: nn.Module, name: str, pruned: PrunedWeight) -> None:
        owner, _, self.key = name.rpartition(".")
        self.owner, self.pruned = model.get_submodule(owner), pruned
        if self.parameter.element_size() == 1:
            raise ModelError(f"{name}: weights in 8 bits cannot be trained: load the folder that was quantized")
        self.zeros = self.parameter.detach() == 0

    @property
    def parameter(self) -> Tensor:
        """The parameter, which is looked up at each use, because moving a model to a GPU may replace it."""
        parameter = self.owner._parameters.get(self.key)
        if parameter is None or isinstance(parameter, DTensor) or parameter.ndim < 2:  # FSDP1 leaves flat parts
            raise ModelError(
                f"the {self.key} of a {type(self.owner).__name__} is no whole parameter any more, so that its N:M "
                "pattern cannot be kept: parametrize nothing, and use DDP in place of FSDP or tensor parallelism"
            )
        return parameter

    @torch.no_grad()
    def restore(self) -> None:
        self.zeros = self.zeros.to(self.parameter.device)
        self.parameter.masked_fill_(self.zeros, 0)


class KeptPattern:
    """The N:M weights of a model in training, as `permtriton.keep_pattern` returns them.

    Attributes:
        patterns: name of each weight -> its pattern.
        record: content of the loaded model's ``permtriton.json``; None without this file.
    """

    def __init__(self, model: nn.Module, weights: dict[str, _Weight], record: Record | None) -> None:
        self._weights, self.record = weights, record
        self.patterns = {name: weight.pruned.pattern for name, weight in weights.items()}
        self._model = weakref.ref(model)  # weak, because the hook would keep the model in memory
        self._hook = register_optimizer_step_post_hook(self._after_step)
        weakref.finalize(model, self.remove).atexit = False

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Only this optimizer's weights: the backward pass of another model may still need other weights unchanged.
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for weight in self._weights.values():
            if id(weight.parameter) in stepped:
                weight.restore()

    def restore(self) -> None:
        """Sets the weights that were zero to zero again, such as after a change that no optimizer made."""
        for weight in self._weights.values():
            weight.restore()

    def remove(self) -> None:
        """Stops keeping the zeros: later optimizer steps change all weights."""
        self._hook.remove()

    def merge_and_unload(self, model: Any, **options: Any) -> float:
        """Merges PEFT's adapters into the weights, and sets the weights that were zero to zero again.

        While it merges, a second copy of the N:M weights is in memory. ``model`` is the ``PeftModel`` of the kept
        model, which has no adapters afterwards; the options are those of PEFT's ``merge_and_unload``.

        Returns:
            The share of the squared norm of all changes to N:M weights that fell on zeros and is lost.

        Raises:
            ModelError: ``model`` is no ``PeftModel`` of the kept model, or has an adapter that cannot be merged, such
                as one trained on the dense model, in ``modules_to_save``, or on a linear that gathers its input.
        """
        if _unwrapped(model) is not self._model():
            raise ModelError(f"this {type(model).__name__} is not the model that is kept: give its PeftModel")
        _refuse_dense_adapters(model, self.record)
        owners = {weight.owner for weight in self._weights.values()}
        for name, module in model.named_modules():
            if ".original_module" in name and module in owners:
                raise ModelError(f"{name}: the zeros of its copy in modules_to_save are not kept: use target_modules")
            if name.endswith(BASE_LAYER) and is_permuted(module):
                what = "permutes its input, which its adapter does not: keep the adapter beside the model"
                raise ModelError(f"{name.removesuffix(BASE_LAYER)} {what}")
        before = {name: weight.parameter.detach().clone() for name, weight in self._weights.items()}
        size = lost = 0.0
        try:
            with reading("the adapters cannot be merged", ModelError):
                model.merge_and_unload(**options)
            for name, weight in self._weights.items():
                change = (weight.parameter.detach() - before.pop(name)).float().square()
                size, lost = size + float(change.sum()), lost + float(change[weight.zeros].sum())
        finally:
            self.restore()
        return lost / (size or 1.0)

    def save_pretrained(
        self, folder: str | Path, tokenizer: Processor | None = None, *, overwrite: bool = False
    ) -> Path:
        """Writes the trained model with ``permtriton.json``, and verifies it before it is renamed into place.

        All ranks must call it: the first one writes, and all return the folder's absolute path or raise its error.
        The tokenizer or processor is saved, too; ``overwrite`` permits replacing an earlier output of permtriton.

        Raises:
            ModelError: the model is gone, was not loaded from permtriton's output, has adapters, or cannot be saved.
            OutputError: the folder exists and may not be replaced, or cannot be written.
            VerificationError: the written checkpoint fails a check; nothing is left behind.
        """
        model, record = self._model(), self.record
        if model is None:
            raise ModelError("the model does not exist any more: keep a reference to it until it is saved")
        if record is None:
            advice = f"use save_pretrained of what permtriton.compile returned, or the model's own. {PRUNED_ELSEWHERE}"
            raise ModelError(f"the model was loaded without permtriton.json, which has to be saved, too: {advice}")
        if any(name.endswith(BASE_LAYER) for name, _ in model.named_modules()):
            raise ModelError("the model has adapters: merge them first, with merge_and_unload of keep_pattern's result")
        with torch.no_grad():
            for weight in self._weights.values():
                weight.parameter.add_(0.0)  # turns -0.0 into 0.0: float16 rounds small negative weights to -0.0
        pruned, path = {name: weight.pruned for name, weight in self._weights.items()}, real_path(Path(folder))
        ranks.on_first(lambda: save(model, tokenizer, record, pruned, path, overwrite=overwrite))
        return path


class KeepPattern(TrainerCallback):
    """Calls `permtriton.keep_pattern` when training begins: a callback of ``transformers.Trainer``.

    Attributes:
        kept: what `permtriton.keep_pattern` returned; None before training.
    """

    kept: KeptPattern | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.kept = keep_pattern(named["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        assert self.kept is not None
        self.kept.remove()

    def save_pretrained(self, *arguments: Any, **options: Any) -> Path:
        """Calls `KeptPattern.save_pretrained` with the same arguments."""
        if self.kept is None:
            raise ModelError("nothing was trained with this KeepPattern: give it to a Trainer, and train")
        return self.kept.save_pretrained(*arguments, **options)


def _unwrapped(model: Any) -> nn.Module:
    """Returns the model inside what torch.compile, DDP and PEFT wrap around it."""
    if hasattr(model, "_orig_mod"):
        return _unwrapped(model._orig_mod)
    if isinstance(model, DistributedDataParallel):
        return _unwrapped(model.module)
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return _unwrapped(model.get_base_model()) if is_peft else model


def _refuse_dense_adapters(model: Any, record: Record | None) -> None:
    """Refuses adapters that were trained on the dense model, if the kept model's channels have another order."""
    if record is None or not any(moved(torch.tensor(site["index"])) for site in record["sites"]):
        return
    for config in getattr(model, "peft_config", {}).values():
        base = config.base_model_name_or_path or ""
        unpruned = base and Path(base, CONFIG_FILE).is_file() and not Path(base, REPORT_FILE).is_file()
        if unpruned or base == record["model"]:
            order = "whose channels have another order: train it on the compiled folder"
            raise ModelError(f"the adapter was trained on {base}, the dense model, {order}")


def _weights(model: Any, record: Record | None) -> dict[str, _Weight]:
    """Returns the N:M weights of a model, by their names without the parts that PEFT adds."""
    if record is None:
        return {name.replace(BASE_LAYER, ""): _Weight(model, name, pruned) for name, pruned in regular_weights(model)}
    weights = dict[str, _Weight]()
    for stored, name, pruned in recorded_in(model, record):
        if name is None:
            raise ModelError(
                f"this {type(model).__name__} does not have the N:M weight {stored} of {model.name_or_path}: load it "
                "with the class of its config.json, and packed weights as permtriton export --format dense writes them"
            )
        weight = weights[name.replace(BASE_LAYER, "")] = _Weight(model, name, pruned)
        if fullest_group(weight.parameter, pruned) > pruned.pattern.kept:
            raise ModelError(f"{stored} is not {pruned.pattern} any more: call keep_pattern before any training")
    return weights
