"""What permutations that cannot be folded cost at run time: a forward pass, compared with the unpermuted model.

Three LLaMA-shaped models compute the same: the dense one; one whose norms gather for q/k/v and gate/up; and one with a
gather kernel before ``o_proj`` as well. First their outputs are compared. Then they run the same tokens in turn, in one
process and in an order that changes every round, and the medians are compared. A table goes to stderr, one JSON line to
stdout.

    python benchmarks/runtime_overhead.py --hidden 2048 --intermediate 5632 --layers 2 --tokens 512
"""

import argparse
import copy
import json
import platform
import statistics
import sys
from functools import partial

import torch
from shared import llama, timed
from torch import Tensor, nn

from permtriton.machine import device_name, versions
from permtriton.model.modules import GatheredLinear, from_norm, replace_module
from permtriton.model.norms import match_norm

NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest output; sums run in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="tokens in the one sequence of a pass")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()

    torch.manual_seed(0)
    models = variants(args)
    ids = torch.randint(0, args.vocabulary, (1, args.tokens), device=args.device)
    errors = differences(models, ids)
    if max(errors.values()) > TOLERANCE[args.dtype]:
        raise SystemExit(f"the models differ, so their times mean nothing: {errors}")
    samples = measure(models, ids, args.repeats)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    # The median of the ratios of each round, in which drift of the machine cancels, unlike in the ratio of medians.
    paired = {
        name: statistics.median(t / d for t, d in zip(times, samples["dense"], strict=True))
        for name, times in samples.items()
    }
    print(f"{'model':<18}{'median s':>10}{'ratio':>8}{'paired':>8}{'difference':>12}", file=sys.stderr)
    for name, median in medians.items():
        ratio = median / medians["dense"]
        print(f"{name:<18}{median:>10.4f}{ratio:>8.3f}{paired[name]:>8.3f}{errors[name]:>12.1e}", file=sys.stderr)
    result = {
        "seconds": {name: round(median, 5) for name, median in medians.items()},
        "ratio": {name: round(median / medians["dense"], 4) for name, median in medians.items()},
        "paired_ratio": {name: round(ratio, 4) for name, ratio in paired.items()},
        "samples_s": {name: [round(t, 5) for t in times] for name, times in samples.items()},
        "largest_difference": errors,
        "shape": {k: v for k, v in vars(args).items() if k not in ("repeats", "device")},
        "threads": torch.get_num_threads(),
        "device": device_name(torch.device(args.device)),
        "system": platform.platform(),
        "versions": versions(),
    }
    print(json.dumps(result))


def variants(args: argparse.Namespace) -> dict[str, nn.Module]:
    """Returns the dense model, the one with permuted norms, and the one with gathers before o_proj as well."""
    dense = llama(args)
    norms = copy.deepcopy(dense)
    for layer in norms.model.layers:
        for norm_name, linears in NORMS.items():
            index = torch.randperm(args.hidden, device=args.device)
            norm = layer.get_submodule(norm_name)
            variant = match_norm(norm, args.hidden)
            assert variant is not None
            replace_module(layer, norm_name, from_norm(norm, variant, index))
            for name in linears:
                permute_columns(layer.get_submodule(name), index)
    gathers = copy.deepcopy(norms)
    for layer in gathers.model.layers:
        linear = layer.self_attn.o_proj
        index = torch.randperm(linear.in_features, device=args.device)
        permute_columns(linear, index)
        layer.self_attn.o_proj = GatheredLinear.from_linear(linear, index)
    return {"dense": dense, "norms": norms, "norms and o_proj": gathers}


@torch.no_grad()
def permute_columns(linear: nn.Module, index: Tensor) -> None:
    """Puts the input columns of a linear's weight in the order of ``index``, in place."""
    linear.weight.copy_(linear.weight[:, index])  # type: ignore[operator, index]


@torch.no_grad()
def differences(models: dict[str, nn.Module], ids: Tensor) -> dict[str, float]:
    """Returns the largest difference of each model's logits from the first one's, relative to the largest logit."""
    logits = [model(input_ids=ids, use_cache=False).logits.float() for model in models.values()]
    top = logits[0].abs().max()
    return {name: float((out - logits[0]).abs().max() / top) for name, out in zip(models, logits, strict=True)}


@torch.no_grad()
def measure(models: dict[str, nn.Module], ids: Tensor, repeats: int) -> dict[str, list[float]]:
    """Returns model name -> seconds of each forward pass; the first round warms up and is left out."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for repeat in range(repeats + 1):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds = timed(partial(models[name], input_ids=ids, use_cache=False), ids.device)
            if repeat:
                samples[name].append(seconds)
    return samples


if __name__ == "__main__":
    main()
