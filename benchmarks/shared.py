"""What several benchmarks of whole models need."""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.known_run import Known
from permtriton import NMPattern, config_from
from permtriton.data.samples import Samples
from permtriton.kernels.importance import ImportanceFactors
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.measure.importance import importance_of
from permtriton.methods.measure.losses import Objective
from permtriton.methods.order.learned import Learned, OrderTrainer
from permtriton.methods.order.masked_model import masked_model
from permtriton.methods.planning import plan_model
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model.forward import last_hidden_state
from permtriton.passes.plan import Plan, layer_modules, linear_module, weight_in_out
from permtriton.running.backward import checkpointed

PATTERN = NMPattern(2, 4)


def find_plan(model: PreTrainedModel, sparsity: NMPattern, **options: Any) -> Plan:
    return plan_model(model, config_from({"sparsity": sparsity, **options}))[0]


def llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """Returns a LLaMA with random weights, of the sizes, dtype and device that a script's arguments name."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.tokens,
    )
    return LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()


def random_importances(model: PreTrainedModel, plan: Plan) -> dict[str, ImportanceFactors]:
    """Returns Wanda's importance of each pruned linear, for random channel norms."""
    found = {}
    for site, name in plan.linears():
        statistic = (torch.rand(site.channels) + 0.5).to(model.device)
        found[name] = importance_of("wanda", weight_in_out(linear_module(model, name)), statistic)
    return found


def random_curvatures(model: PreTrainedModel, plan: Plan) -> dict[str, RankOneCurvature]:
    """Returns a curvature of the loss for each pruned linear."""
    found = {}
    for _, name in plan.linears():
        channels, rows = weight_in_out(linear_module(model, name)).shape
        found[name] = RankOneCurvature(torch.rand(rows).to(model.device), torch.rand(channels).to(model.device))
    return found


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a call, with all that it launches on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def step_seconds(
    model: PreTrainedModel,
    plan: Plan,
    ids: Tensor,
    target: Tensor,
    micro_batch: int,
    keep: bool = True,
    gradient: Literal["placement", "published"] = "placement",
) -> Iterator[tuple[float, float]]:
    """Yields the seconds of a dense step and of a learning step on the same sequences, in turn, without end.

    The dense step is a forward and backward pass with gradients of all pruned weights. Both have activation
    checkpointing. The first pair warms up.

    Args:
        model: of which all permutations learn.
        plan: the model's plan for 2:4.
        ids: the sequences of a step, int64 ``[sequences, tokens]``.
        target: the dense model's last hidden states on them.
        micro_batch: sequences per forward and backward pass.
        keep: whether masks are computed once per step, not for each micro-batch.
        gradient: of the permutations, as the option.
    """
    rows, layers, importances = torch.arange(ids.shape[0]), layer_modules(model, plan), random_importances(model, plan)
    learn = Learned(batch_size=ids.shape[0], epochs=1000, gradient=gradient)
    config = CompileConfig(sparsity=PATTERN, micro_batch_size=micro_batch, activation_checkpointing=True)
    curvatures = None if gradient == "published" else random_curvatures(model, plan)
    relaxation = learn.relaxation(learn.spaces(plan), 0, model.device)
    objective = Objective("cosine", model, Samples.of(ids), target)
    known = {"importances": importances, "objective": objective, "low_memory": not keep}
    run = Known(model, plan, objective.samples, config, **known)

    def dense() -> None:
        model.requires_grad_(False)
        for _, name in plan.linears():
            linear_module(model, name).weight.requires_grad_(True)
        with checkpointed(layers):
            for part in rows.split(micro_batch):
                last_hidden_state(model, Samples.of(ids[part])).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)

    def learning(number: int) -> float:
        with masked_model(run, relaxation, curvatures) as masks:
            trainer = OrderTrainer(run, learn, masks, relaxation)
            trainer.step(rows, number)  # the allocator settles after the weights were transposed
            return timed(lambda: trainer.step(rows, number), model.device)

    for number in count():
        yield timed(dense, model.device), learning(number)
