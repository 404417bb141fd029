"""What a learning step, a search round, layout fused and an evaluation cost, on a random LLaMA. Prints a line of JSON.

    python -m benchmarks.costs step --hidden 2048 --intermediate 5632 --layers 1 --tokens 1024
    python -m benchmarks.costs round --hidden 2048 --intermediate 5632 --layers 1 --tokens 1024 --samples 128
    python -m benchmarks.costs fused --hidden 2048 --intermediate 5632 --layers 2 --tokens 512 --repeats 21

step    one step of learning, compared with its floor: a dense forward and backward pass with weight gradients of the
        same layers and tokens, with the same activation checkpointing and micro-batches, in turn.
round   the gains of a round of the search, compared with its forward and backward passes. Those are measured on one
        sequence and multiplied by the number of sequences, because their time is proportional to it.
fused   a forward pass of the dense model; of one whose norms gather for q/k/v and gate/up; and of one with a gather
        before ``o_proj`` as well. Their outputs must be the same. They run in turn, in an order that changes.
evaluation
        the perplexity on as many sequences as --sequences says, and a plain loop of transformers over the same ones, in
        turn. Both must find the same.
"""

import argparse
import copy
import json
import math
import platform
import statistics
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.known_run import Known
from benchmarks.shared import PATTERN, find_plan, llama, random_importances, step_seconds, timed
from permtriton.data.samples import Samples
from permtriton.evaluation.evaluate import measure_model
from permtriton.methods.measure.fisher import curvatures
from permtriton.methods.measure.losses import dense_objective
from permtriton.methods.order.hard_masks import hard_masked
from permtriton.methods.order.searched import Searcher
from permtriton.methods.recipe_config import CompileConfig
from permtriton.model.forward import hidden_states
from permtriton.model.modules import GatheredLinear, from_norm, replace_module
from permtriton.model.norms import match_norm
from permtriton.util.machine import device_name, peak_memory, versions
from permtriton.util.permutation import identity

NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest output; sums run in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(MEASURES))
    sizes = {"hidden": 2048, "intermediate": 5632, "layers": 1, "heads": 16, "tokens": 1024, "vocabulary": 1024}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="of a sequence" if name == "tokens" else None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=1, help="of a step, or of an evaluation")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences per forward and backward pass of a step")
    parser.add_argument("--gradient", default="placement", choices=["placement", "published"], help="of a step")
    parser.add_argument("--discard-masks", action="store_true", help="a step computes masks for each micro-batch")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences of a round")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    found = MEASURES[args.what](args)
    print(json.dumps({
        **found, "peak_memory_bytes": peak_memory(device), "shape": vars(args), "device": device_name(device),
        "system": platform.platform(), "versions": versions(),
    }))  # fmt: skip


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a dense step and of a learning step."""
    model = llama(args)
    plan, ids = find_plan(model, PATTERN), torch.randint(0, args.vocabulary, (args.sequences, args.tokens))
    target = hidden_states(model, Samples.of(ids), 1)
    pairs = step_seconds(model, plan, ids, target, args.micro_batch, not args.discard_masks, args.gradient)
    dense, learn = zip(*islice(pairs, 1, args.repeats + 1), strict=True)  # the first pair warms up
    dense_s, learn_s = statistics.median(dense), statistics.median(learn)
    return {"dense_s": dense_s, "learn_s": learn_s, "ratio": learn_s / dense_s, "dense_samples_s": dense,
            "learn_samples_s": learn}  # fmt: skip


def search_round(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of the passes over all sequences, and those of all gains."""
    model = llama(args)
    plan, ids = find_plan(model, PATTERN, layout="fused"), torch.randint(0, args.vocabulary, (1, args.tokens))
    config = CompileConfig(layout="fused", micro_batch_size=1, activation_checkpointing=True)
    objective = dense_objective(model, "kl", Samples.of(ids), 1)
    run = Known(model, plan, Samples.of(ids), config, importances=random_importances(model, plan))
    spaces = [space for space in plan.spaces if not space.frozen]
    indices = {space.name: identity(space.units) for space in spaces}
    passes, gains, found = [], [], []
    with hard_masked(run, model, objective, curvatures(run, "kl")) as masks:
        searcher = Searcher(masks, spaces)
        masks.set(indices)
        for _ in range(args.repeats + 1):
            passes.append(timed(masks.take_gradients, model.device))
            gains.append(timed(lambda: found.append(searcher.swaps(indices, 1.0)), model.device))
    passes_s, gains_s = statistics.median(passes[1:]) * args.samples, statistics.median(gains[1:])
    swaps = sum(gain.numel() for *_, gain in found[-1].values())
    return {"forward_backward_s": passes_s, "gains_s": gains_s, "ratio": gains_s / passes_s, "swaps": swaps,
            "one_sequence_samples_s": passes[1:], "gains_samples_s": gains[1:]}  # fmt: skip


@torch.no_grad()
def fused(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a forward pass of each variant."""
    models = variants(args)
    ids, samples = torch.randint(0, args.vocabulary, (1, args.tokens), device=args.device), {}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(model, input_ids=ids, use_cache=False) for name, model in models.items()
    }
    logits = {name: call().logits.float() for name, call in calls.items()}
    errors = {name: float((out - logits["dense"]).abs().max() / logits["dense"].abs().max())
              for name, out in logits.items()}  # fmt: skip
    if max(errors.values()) > TOLERANCE[args.dtype]:
        raise SystemExit(f"the models differ, so their times mean nothing: {errors}")
    samples = {name: [] for name in models}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name in [*models, *models][repeat % len(models) :][: len(models)]:
            samples[name].append(timed(calls[name], ids.device))
    samples = {name: found[1:] for name, found in samples.items()}
    medians = {name: statistics.median(found) for name, found in samples.items()}
    # The median of the ratios of each round, in which drift of the machine cancels, unlike in the ratio of medians.
    paired = {name: statistics.median(t / d for t, d in zip(found, samples["dense"], strict=True))
              for name, found in samples.items()}  # fmt: skip
    return {"seconds": medians, "ratio": {name: median / medians["dense"] for name, median in medians.items()},
            "paired_ratio": paired, "samples_s": samples, "largest_difference": errors}  # fmt: skip


@torch.no_grad()
def variants(args: argparse.Namespace) -> dict[str, nn.Module]:
    """Returns the dense model, the one with permuted norms, and the one with gathers before o_proj as well."""
    dense = llama(args)
    norms = copy.deepcopy(dense)
    for layer in norms.model.layers:
        for norm_name, linears in NORMS.items():
            index, norm = torch.randperm(args.hidden, device=args.device), layer.get_submodule(norm_name)
            variant = match_norm(norm, args.hidden)
            assert variant is not None
            replace_module(layer, norm_name, from_norm(norm, variant, index))
            for name in linears:
                _permute_columns(layer.get_submodule(name), index)
    gathers = copy.deepcopy(norms)
    for layer in gathers.model.layers:
        linear = layer.self_attn.o_proj
        index = torch.randperm(linear.in_features, device=args.device)
        _permute_columns(linear, index)
        layer.self_attn.o_proj = GatheredLinear.from_linear(linear, index)
    return {"dense": dense, "norms": norms, "norms and o_proj": gathers}


def _permute_columns(linear: nn.Module, index: Tensor) -> None:
    linear.weight.copy_(linear.weight[:, index])  # type: ignore[operator, index]


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of an evaluation and of the plain loop, and the median of their ratios."""
    model, ids = llama(args), torch.randint(0, args.vocabulary, (args.sequences, args.tokens))
    found: dict[str, float] = {}
    device = torch.device(args.device)

    @torch.no_grad()
    def plain() -> None:
        losses = [float(model(input_ids=each.to(device), labels=each.to(device)).loss) for each in ids.split(1)]
        found["plain"] = math.exp(statistics.fmean(losses))

    def ours() -> None:
        found["ours"] = float(measure_model(model, held_out=ids).perplexity or 0)

    rounds = [(timed(ours, device), timed(plain, device)) for _ in range(args.repeats + 1)][1:]  # the first warms up
    if abs(found["ours"] / found["plain"] - 1) > TOLERANCE[args.dtype]:
        raise SystemExit(f"the perplexities differ, so their times mean nothing: {found}")
    ratio = statistics.median(one / other for one, other in rounds)
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    return {"seconds": {"ours": medians[0], "plain": medians[1]}, "ratio": ratio, "samples_s": rounds}


MEASURES = {"step": step, "round": search_round, "fused": fused, "evaluation": evaluation}

if __name__ == "__main__":
    main()
