"""Makes the plan of a model: traces the model, follows its channels through the graph and finds the sites."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import fx
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.errors import ConfigError
from permtriton.kernels.packing import packed_share
from permtriton.methods.recipe_config import CompileConfig
from permtriton.methods.sizes import FLOAT32, ModelSizes
from permtriton.model.core import has_head
from permtriton.model.experts import stacked_name, unstacked_experts
from permtriton.passes.fused_layout import fused_plan
from permtriton.passes.plan import Plan, Site, layer_modules, linear_module
from permtriton.passes.provenance import propagate
from permtriton.passes.select_linears import NOT_NAMED
from permtriton.passes.sites import find_sites
from permtriton.passes.trace import trace
from permtriton.running.resume import Workspace
from permtriton.util.sparsity import NMPattern


@dataclass
class Planned:
    """A dense model with its calibration samples and its plan, from which a forecast and a run are made."""

    model: PreTrainedModel  # the model, which the steps of a run change in place
    config: CompileConfig  # every option
    samples: Samples  # calibration samples on the CPU
    plan: Plan  # sites and channel spaces
    graph: fx.GraphModule  # graph with the model's own parameters, from which the plan was made
    held_out: Samples | None = None  # held-out samples; None if there are none
    workspace: Workspace = field(default_factory=Workspace)  # times of stages, and saved states of interrupted steps

    @cached_property
    def layer_bytes(self) -> list[int]:
        modules = layer_modules(self.model, self.plan)
        return [sum(p.numel() for p in layer.parameters()) * self.sizes.element for layer in modules]

    @cached_property
    def sizes(self) -> ModelSizes:
        """The sizes from which memory and time of all steps are estimated."""
        model, plan, config, samples = self.model, self.plan, self.config, self.samples
        text_config = model.config.get_text_config()
        weight_counts = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
        out_features = {name: weight_counts[name] // site.channels for site, name in plan.linears()}
        stacked = {name for name in weight_counts if stacked_name(model, name)}
        pruned, width = sum(weight_counts.values()), max(site.channels for site in plan.sites)
        hidden = int(getattr(text_config, "hidden_size", None) or width)
        width = max(width, hidden)

        def channels(layer: list[Site]) -> int:
            sites = [site for site in layer if not site.is_routed]
            single_sites = [site for site in sites if site.linears[0] not in stacked]
            stacked_channels = [site.channels for site in sites if site.linears[0] in stacked]
            channels_read = sum(site.channels + (hidden if site.residual else 0) for site in single_sites)
            rows = sum(out_features[name] for site in single_sites for name in site.linears if name not in stacked)
            return max(channels_read + max(stacked_channels, default=0), rows)

        return ModelSizes(
            model=sum(p.numel() * p.element_size() for p in model.parameters()),
            element=next(model.parameters()).element_size(),
            pruned=pruned,
            largest_weight=max(weight_counts.values()),
            layers=len(plan.layers()),
            hidden=hidden,
            width=width,
            layer_channels=max(map(channels, plan.layers())),
            vocabulary=int(getattr(text_config, "vocab_size", 0)) if has_head(model) else 0,
            hessians=max(sum(site.channels**2 for site in layer) for layer in plan.layers()) * 4 * FLOAT32,
            spaces=tuple(space.units for space in plan.spaces if not space.frozen),
            kept=sum(size * (1 - plan.patterns[name].sparsity) for name, size in weight_counts.items()) / pruned,
            rows=sum(out_features[name] for site, name in plan.linears() if not site.is_routed and name not in stacked),
            sequences=len(samples),
            calibration=len(samples),
            generated=config.generated,
            surplus=0 if samples.surplus is None else len(samples.surplus),
            longest=samples.longest,
            positions=samples.positions,
            micro_batch_size=config.micro_batch_size,
            checkpointing=config.activation_checkpointing,
        )


def plan_model(
    model: PreTrainedModel, config: CommonConfig, samples: Samples | None = None
) -> tuple[Plan, fx.GraphModule]:
    """Traces a model and finds its sites; weights are not needed, so the model may be on the meta device.

    The first of the samples is traced for its shapes; for text or None, a few tokens are traced.
    """
    with unstacked_experts(model) as stacked:
        graph_module, outputs = trace(model, None if samples is None or samples.is_text else samples[:1])
        provenance = propagate(graph_module, outputs)
        plan = find_sites(provenance, model, config)
        if config.layout == "fused":
            plan = fused_plan(plan, provenance.linears, model, o_proj=config.o_proj)
        _check_stacks(model, plan, config)
    plan.skipped.update(stacked)
    return plan, graph_module


def sizes(model: PreTrainedModel, plan: Plan) -> dict[str, int]:
    """Returns the number of all parameters and of those in pruned linears, and the model's bytes, dense and packed."""
    with unstacked_experts(model):
        weight_counts = {name: linear_module(model, name).get_parameter("weight").numel() for _, name in plan.linears()}
        total = sum(parameter.numel() for parameter in model.parameters())
    element = model.dtype.itemsize
    packed_size = sum(
        count * packed_share(plan.patterns[name].kept, plan.patterns[name].group, element)
        for name, count in weight_counts.items()
    )
    pruned = sum(weight_counts.values())
    return {
        "parameters": total,
        "pruned_parameters": pruned,
        "dense_bytes": element * total,
        "packed_bytes": round(element * (total - pruned + packed_size)),
    }


def _check_stacks(model: PreTrainedModel, plan: Plan, config: CommonConfig) -> None:
    """Refuses options that would prune only some of the experts stored in one parameter, or prune them differently."""
    if not config.targets and not config.ignore and not config.pattern:
        return
    patterns: dict[str, NMPattern] = {}
    for _, name in plan.linears():
        stack = stacked_name(model, name)
        if stack and patterns.setdefault(stack, plan.patterns[name]) != plan.patterns[name]:
            raise ConfigError(
                f"`pattern=` prunes {name} to {plan.patterns[name]}, and other experts that {stack} holds to "
                f"{patterns[stack]}: give all of its experts one pattern"
            )
    for name in plan.skipped:
        stack = stacked_name(model, name)
        if stack and stack in patterns:
            option = "targets" if plan.skipped[name] == NOT_NAMED else "ignore"
            raise ConfigError(
                f"`{option}=` leaves {name} dense, but not all the other experts that {stack} holds: prune all of "
                f"them, or none, for example with `ignore={stack.rpartition('.')[0]}`"
            )
