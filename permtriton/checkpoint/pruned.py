"""The pruned model at the end of a compilation."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from permtriton.checkpoint.read_record import Record
from permtriton.config import CommonConfig
from permtriton.data.media import Processor
from permtriton.data.samples import Samples
from permtriton.model.experts import input_dim, stacked_name
from permtriton.model.source import Source
from permtriton.passes.plan import Plan
from permtriton.util.sparsity import NMPattern, PrunedWeight


@dataclass
class Pruned:
    """A pruned model, and what is saved with it."""

    # transformers model with N:M weights; in layout ``fused`` some of its norms and linears permute channels
    model: PreTrainedModel
    tokenizer: Processor | None  # tokenizer or processor of the model; None if there is none
    config: CommonConfig  # every option
    plan: Plan  # sites and channel spaces
    report: Record  # content of ``permtriton.json``; the entries of saving are added when the model is saved
    reference: Samples  # samples on which a reloaded checkpoint must give the outputs of ``model``
    # where the dense model can be read again; None for a model that was made in memory
    source: Source | None = field(default=None, kw_only=True)
    # device of the compilation, to which layers may have been moved one by one; None for the device of ``model``
    device: torch.device | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._versions = self._present_versions()

    @property
    def is_trained(self) -> bool:
        """Whether weights were changed in place after the compilation; a change through ``.data`` is not noticed."""
        return self._present_versions() != self._versions

    def _present_versions(self) -> list[int]:
        """Returns how often each parameter was changed in place."""
        # Tensors of inference mode, which cannot be trained, have no version.
        return [0 if parameter.is_inference() else parameter._version for parameter in self.model.parameters()]


def pruned_parameters(model: nn.Module, plan: Plan) -> dict[str, PrunedWeight]:
    """Returns each pruned parameter with its input dimension and pattern; a stack of experts is one parameter."""
    patterns: dict[str, NMPattern] = {}
    for _, name in plan.linears():
        patterns[stacked_name(model, name) or f"{name}.weight"] = plan.patterns[name]
    return {name: PrunedWeight(input_dim(model, name), pattern) for name, pattern in patterns.items()}
