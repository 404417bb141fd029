"""What one step of learning costs, compared with its floor: a dense forward and backward pass with weight gradients.

Both run the same LLaMA-shaped layers on the same tokens, with the same activation checkpointing, in turn; the medians
are compared. One JSON line is printed.

    python benchmarks/learning_step.py --hidden 2048 --intermediate 5632 --layers 1 --tokens 1024
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from permtriton import NMPattern, find_plan
from permtriton.config import CompileConfig, LearnConfig
from permtriton.machine import device_name, peak_memory, versions
from permtriton.model.forward import hidden_states, last_hidden_state
from permtriton.model.plan import Plan, layer_modules, linear_module, weight_in_out
from permtriton.prune.importance import importance_of
from permtriton.prune.learn import Trainer, learned_spaces
from permtriton.prune.masked_model import checkpointed, masked_model
from permtriton.prune.objective import Objective
from permtriton.prune.relaxation import Relaxation

PATTERN = NMPattern(2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in the one sequence of a step")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.tokens,
    )
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()
    plan = find_plan(model, PATTERN)
    dense, learn = measure(model, plan, torch.randint(0, args.vocabulary, (1, args.tokens)), args.repeats)
    dense_s, learn_s = statistics.median(dense), statistics.median(learn)
    result = {
        "dense_s": round(dense_s, 4),
        "learn_s": round(learn_s, 4),
        "ratio": round(learn_s / dense_s, 3),
        "dense_samples_s": [round(t, 4) for t in dense],
        "learn_samples_s": [round(t, 4) for t in learn],
        "peak_memory_bytes": peak_memory(model.device),
        "shape": {k: v for k, v in vars(args).items() if k not in ("repeats", "device")},
        "device": device_name(model.device),
        "system": platform.platform(),
        "versions": versions(),
    }
    print(json.dumps(result))


def measure(model: LlamaForCausalLM, plan: Plan, ids: Tensor, repeats: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each dense pass and of each learning step; the first of both warms up and is left out."""
    target = hidden_states(model, ids, 1)
    layers = layer_modules(model, plan)

    def dense() -> None:
        model.requires_grad_(False)
        for _, name in plan.linears():
            linear_module(model, name).weight.requires_grad_(True)
        with checkpointed(layers):
            last_hidden_state(model, ids).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)

    importances = {}
    for site, name in plan.linears():
        statistic = (torch.rand(site.channels) + 0.5).to(model.device)
        importances[name] = importance_of("wanda", weight_in_out(linear_module(model, name)), statistic)
    config = CompileConfig(sparsity=PATTERN, micro_batch_size=1, learn=LearnConfig(batch_size=1, epochs=1000))
    relaxation = Relaxation(learned_spaces(plan, config.learn), config.learn, 0, model.device)
    optimizer = torch.optim.AdamW(relaxation.parameters(), lr=config.learn.learning_rate)
    dense_s, learn_s = [], []
    for number in range(repeats + 1):
        dense_s.append(_timed(dense, model.device))
        with masked_model(model, plan, importances, relaxation, config) as masks:
            trainer = Trainer(model, masks, relaxation, optimizer, ids, Objective("cosine", target), config)
            learn_s.append(_timed(lambda: trainer.step(torch.tensor([0]), number), model.device))  # noqa: B023
    return dense_s[1:], learn_s[1:]


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
