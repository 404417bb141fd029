"""Compares ways to keep the zeros of N:M weights while they are trained: seconds, memory, and what each works with.

python benchmarks/keep_variants.py FOLDER --output benchmarks/results/keep-variants-cpu.json

FOLDER holds an N:M model. Each variant trains it in a process of its own, in float32 with autocast to bfloat16. What it
works with is tried on a tiny model: optimizers whose step is not zero where the gradient is, ``torch.compile``, FSDP2
(one rank), the merge of a LoRA adapter, and whether the names in the state dict stay as they are.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from permtriton.util.machine import device_name, versions

Weights = list[tuple[nn.Module, Tensor]]  # each linear that is N:M, and where its weight is zero
Attach = Callable[[Weights, torch.optim.Optimizer], None]


class Masked(nn.Module):
    """Parametrization: the weight is what is trained, with zeros."""

    def __init__(self, pruned: Tensor) -> None:
        super().__init__()
        self.register_buffer("pruned", pruned, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight.masked_fill(self.pruned, 0)


def local(tensor: Any) -> Tensor:
    """Returns this rank's part of a tensor that FSDP2 divided, and other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parametrized(weights: Weights, _optimizer: torch.optim.Optimizer) -> None:
    for linear, pruned in weights:
        parametrize.register_parametrization(linear, "weight", Masked(pruned))


def gradient_masks(weights: Weights, _optimizer: torch.optim.Optimizer) -> None:
    for linear, pruned in weights:

        def mask(weight: Tensor, pruned: Tensor = pruned) -> None:
            local(weight.grad).masked_fill_(pruned, 0)

        linear.weight.register_post_accumulate_grad_hook(mask)  # type: ignore[operator,union-attr]


def after_step(weights: Weights, optimizer: torch.optim.Optimizer) -> None:
    @torch.no_grad()
    def restore(*_: Any) -> None:
        for linear, pruned in weights:
            local(linear.weight).masked_fill_(pruned, 0)

    optimizer.register_step_post_hook(restore)


VARIANTS: dict[str, Attach] = {
    "nothing": lambda weights, optimizer: None,
    "parametrization": parametrized,
    "gradient masks": gradient_masks,
    "after the step": after_step,
    "gradient masks, and after the step": lambda *both: (gradient_masks(*both), after_step(*both))[0],
}


def linears(model: nn.Module) -> Weights:
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    pairs = [(linear, linear.weight.detach() == 0) for linear in found]
    return [(linear, pruned) for linear, pruned in pairs if 0.4 < float(pruned.float().mean()) < 0.6]


def measured(folder: str, variant: str, tokens: int, steps: int) -> dict[str, Any]:
    """Returns the seconds of a step, the peak memory, and how much of the gradient falls on pruned weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, weight_decay=0.1)
    weights = linears(model)
    VARIANTS[variant](weights, optimizer)
    generator, seconds, cpu = torch.Generator().manual_seed(0), [], []
    for _ in range(steps + 1):
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
        started, started_cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if variant == "nothing":
            total = torch.stack([linear.weight.grad.norm() for linear, _ in weights]).norm()
            kept = torch.stack([linear.weight.grad.masked_fill(p, 0).norm() for linear, p in weights]).norm()
            share = float(kept / total)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "variant": variant,
        "seconds": round(statistics.median(seconds[1:]), 3),
        "cpu_seconds": round(statistics.median(cpu[1:]), 3),
        "peak_bytes": peak,
        "zeros": sum(int((linear.weight == 0).sum()) for linear, _ in weights),
        **({"norm_of_kept_gradients": round(share, 4)} if variant == "nothing" else {}),
    }


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                groups = module.weight.view(-1, 4)
                groups.scatter_(1, torch.rand(groups.shape).topk(2, 1).indices, 0)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 40, (2, 8), generator=generator)
        model(input_ids=ids).logits.logsumexp(-1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tried(variant: str) -> dict[str, bool]:
    """Returns what a variant works with."""
    return {name: works(try_it, VARIANTS[variant]) for name, try_it in TRIALS.items()}


def works(trial: Callable[[Attach], bool], attach: Attach) -> bool:
    try:
        return trial(attach)
    except Exception as error:
        print(f"  {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False


def still_zero(linear_weights: Weights) -> bool:
    values = [(local(linear.weight), pruned) for linear, pruned in linear_weights]
    return all(bool((value[pruned] == 0).all()) and bool((value != 0).any()) for value, pruned in values)


def optimized(make: Callable[..., torch.optim.Optimizer], *, only_matrices: bool = False) -> Callable[[Attach], bool]:
    def trial(attach: Attach) -> bool:
        model = tiny()
        weights = linears(model)
        parameters = [linear.weight for linear, _ in weights] if only_matrices else list(model.parameters())
        optimizer = make(parameters)
        attach(weights, optimizer)
        train(model, optimizer)
        return still_zero(weights)

    return trial


def with_earlier_state(attach: Attach) -> bool:
    """AdamW goes on with the moments of training without masks."""
    model = tiny()
    earlier = copy.deepcopy(model)
    before = torch.optim.AdamW(earlier.parameters(), 1e-3)
    train(earlier, before)
    weights, optimizer = linears(model), torch.optim.AdamW(model.parameters(), 1e-3)
    attach(weights, optimizer)
    optimizer.load_state_dict(before.state_dict())
    train(model, optimizer)
    return still_zero(weights)


def compiled(attach: Attach) -> bool:
    model = tiny()
    weights, optimizer = linears(model), torch.optim.AdamW(model.parameters(), 1e-3)
    attach(weights, optimizer)
    train(torch.compile(model, fullgraph=True, backend="aot_eager"), optimizer)
    return still_zero(weights)


def sharded(attach: Attach) -> bool:
    from torch.distributed.fsdp import fully_shard

    model = tiny()
    weights = linears(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    attach(weights, optimizer)
    train(model, optimizer)
    return still_zero(weights)


def merged(attach: Attach) -> bool:
    """A LoRA adapter is merged into the masked weights; what it changes at kept weights stays."""
    from peft import LoraConfig, get_peft_model

    model = tiny()
    weights, optimizer = linears(model), torch.optim.SGD(model.parameters(), 0.0)
    attach(weights, optimizer)
    before = [linear.weight.detach().clone() for linear, _ in weights]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.merge_and_unload()
    optimizer.step()
    changed = any(bool((linear.weight != old).any()) for (linear, _), old in zip(weights, before, strict=True))
    return changed and still_zero(weights)


def same_names(attach: Attach) -> bool:
    model = tiny()
    names = set(model.state_dict())
    attach(linears(model), torch.optim.SGD(model.parameters(), 0.1))
    return set(model.state_dict()) == names


TRIALS: dict[str, Callable[[Attach], bool]] = {
    "SGD with momentum and weight decay": optimized(lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)),
    "AdamW": optimized(lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1)),
    "Adafactor": optimized(lambda p: torch.optim.Adafactor(p, 1e-3)),
    "Muon": optimized(lambda p: torch.optim.Muon(p, 1e-3), only_matrices=True),
    "AdamW with the state of other training": with_earlier_state,
    "torch.compile(fullgraph=True)": compiled,
    "FSDP2": sharded,
    "LoRA merged": merged,
    "names in the state dict": same_names,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.variant:
        print(json.dumps(measured(options.folder, options.variant, options.tokens, options.steps)))
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29513", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    rows = []
    for variant in VARIANTS:
        command = [sys.executable, __file__, options.folder, "--tokens", str(options.tokens)]
        command += ["--steps", str(options.steps), "--variant", variant]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append({**json.loads(found.splitlines()[-1]), "works_with": tried(variant)})
        print(json.dumps(rows[-1], indent=2))
    dist.destroy_process_group()
    if options.output:
        command = f"python benchmarks/keep_variants.py FOLDER --tokens {options.tokens} --steps {options.steps}"
        where = {"hardware": device_name(torch.device("cpu")), "versions": versions()}
        report = {"command": command, **where, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
