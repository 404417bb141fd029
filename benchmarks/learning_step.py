"""What one step of learning costs against its floor: a dense forward and backward with weight gradients.

Both sides run the same LLaMA-shaped layers on the same tokens, with the same activation checkpointing, interleaved, and
the medians are compared. One JSON line is printed.

    python benchmarks/learning_step.py --hidden 2048 --intermediate 5632 --layers 1 --tokens 1024
"""

import argparse
import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from permtriton import NMPattern, find_plan, memory
from permtriton.config import LearnConfig
from permtriton.forward import hidden_states, last_hidden_state
from permtriton.importance import importance_of
from permtriton.learn import Trainer, checkpointed, learned_spaces, masked_model
from permtriton.plan import layer_modules, linear_module, weight_in_out
from permtriton.relaxation import Relaxation
from permtriton.report import device_name, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="in the one sequence of a step")
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
    plan = find_plan(model, NMPattern(2, 4))
    ids = torch.randint(0, args.vocabulary, (1, args.tokens))
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

    importances = {
        name: importance_of("wanda", weight_in_out(linear_module(model, name)), torch.rand(site.channels) + 0.5)
        for site, name in plan.linears()
    }
    importances = {
        name: dataclasses.replace(found, scale=found.scale.to(args.device)) for name, found in importances.items()
    }
    learn_config = LearnConfig(batch_size=1, micro_batch_size=1, epochs=1000)
    relaxation = Relaxation(learned_spaces(plan, learn_config), learn_config, 0, model.device)
    optimizer = torch.optim.AdamW(relaxation.parameters(), lr=learn_config.learning_rate)
    times: dict[str, list[float]] = {"dense": [], "learn": []}
    for repeat in range(args.repeats + 1):  # the first of each warms up
        times["dense"].append(_timed(dense, args.device))
        with masked_model(model, plan, importances, NMPattern(2, 4), relaxation, learn_config) as masks:
            trainer = Trainer(model, masks, relaxation, optimizer, ids, target, learn_config, 0)
            times["learn"].append(_timed(lambda: trainer.step(torch.tensor([0]), repeat), args.device))  # noqa: B023
        if repeat == 0:
            times = {"dense": [], "learn": []}
    dense_s, learn_s = statistics.median(times["dense"]), statistics.median(times["learn"])
    result = {
        "dense_s": round(dense_s, 4),
        "learn_s": round(learn_s, 4),
        "ratio": round(learn_s / dense_s, 3),
        "dense_samples_s": [round(t, 4) for t in times["dense"]],
        "learn_samples_s": [round(t, 4) for t in times["learn"]],
        "peak_memory_bytes": memory.peak(model.device),
        "shape": {k: v for k, v in vars(args).items() if k not in ("repeats", "device")},
        "device": device_name(model.device),
        "system": platform.platform(),
        "versions": versions(),
    }
    print(json.dumps(result))


def _timed(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
