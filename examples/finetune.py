"""Fine-tunes a pruned model with its zeros kept, so that its predictions come back to those of the dense model.

    python examples/finetune.py my-model-2of4 --dense my-model --text train.txt --held-out test.txt --output tuned

Each step reads one sequence and lowers the KL divergence from the dense model's next-token distribution, mixed with
the usual cross entropy if ``--cross-entropy`` says so. Weights are trained in float32; forward and backward passes run
in bfloat16. With ``--lora`` an adapter is trained and then merged, and the zeros are set to zero again. Perplexity and
KL on held-out text are measured before and after. ``permtriton export tuned`` packs the result.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import permtriton
from permtriton.model.load import load_model
from permtriton.model.source import Source
from permtriton.util.machine import device_name, peak_memory, versions

console = Console()


def windows(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int, most: int | None = None) -> Tensor:
    """Returns a text file as token ids of windows that do not overlap, int64 ``[windows, tokens]``."""
    ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    return ids[: ids.numel() // tokens * tokens].view(-1, tokens)[:most]


def loss_of(model: PreTrainedModel, dense: PreTrainedModel, ids: Tensor, share: float) -> Tensor:
    """Returns the mean over tokens of the KL divergence from the dense model, and ``share`` of the cross entropy."""
    with torch.no_grad():
        expected = log_softmax(dense(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
    found = log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
    kl = kl_div(found, expected, reduction="batchmean", log_target=True)
    return (1 - share) * kl + share * cross_entropy(found, ids[0, 1:]) if share else kl


def learning_rate(step: int, steps: int) -> float:
    """Returns the share of the peak: it rises during a tenth of the steps, then falls along a cosine."""
    return min((step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(model: PreTrainedModel, dense: PreTrainedModel, ids: Tensor, options: argparse.Namespace) -> list[float]:
    """Trains a step per sequence; returns the loss of each step."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], options.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(options.seed))
    losses: list[float] = []
    bars = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*bars, console=console) as progress:
        task = progress.add_task("train", total=options.steps, loss="")
        for step in range(options.steps):
            row = ids[order[step % len(ids)]].unsqueeze(0).to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = loss_of(model, dense, row, options.cross_entropy)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            recent = losses[-options.every :]
            progress.update(task, advance=1, loss=f"{sum(recent) / len(recent):.4f}")
            if (step + 1) % options.every == 0:
                console.print(f"step {step + 1:>4}  loss {sum(recent) / len(recent):.4f}")
    return losses


def adapter(model: PreTrainedModel, rank: int) -> Any:
    """Returns the model with a LoRA adapter at every linear but the head (``pip install peft``)."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def measured(what: str, model: str | PreTrainedModel, ids: Tensor, dense: str) -> dict[str, float | None]:
    """Returns the perplexity of a folder or a model, that of the dense model, and the KL between them."""
    found = permtriton.evaluate(model, ids, against=dense, dtype="bfloat16")
    console.print(f"{what}: perplexity {found.perplexity:.4g}, dense {found.dense_perplexity:.4g}, KL {found.kl:.4g}")
    return {"perplexity": found.perplexity, "dense_perplexity": found.dense_perplexity, "kl": found.kl}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder that permtriton compile wrote")
    parser.add_argument(
        "--dense",
        required=True,
        help="the model that it was compiled from: a folder, a .gguf file, a name on the hub, or demo",
    )
    parser.add_argument("--text", required=True, help="text file to train on")
    parser.add_argument("--held-out", required=True, help="text file to measure on")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--cross-entropy", type=float, default=0.0, help="share of it in the loss, from 0 to 1")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train a LoRA adapter of this rank instead")
    parser.add_argument("--held-out-windows", type=int, default=16)
    parser.add_argument("--every", type=int, default=20, help="steps per line of the loss curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="JSON file to write the numbers to")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    held_out = windows(tokenizer, options.held_out, options.tokens, options.held_out_windows)
    result: dict[str, Any] = {"before": measured("before", options.folder, held_out, options.dense)}

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = load_model(Source(options.dense, dtype="bfloat16", device=device))
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).to(device).train()
    kept = permtriton.keep_pattern(model)
    trained = adapter(model, options.lora) if options.lora else model
    started, cpu_started = time.perf_counter(), time.process_time()
    losses = train(trained, dense, windows(tokenizer, options.text, options.tokens), options)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if options.lora:
        result["before_merging"] = measured("before merging", model.eval(), held_out, options.dense)
        result["lost"] = kept.merge_and_unload(trained)
        console.print(f"{result['lost']:.0%} of the adapter's change fell on zeros")
    model.to(getattr(torch, kept.record["dtype"]))  # that of the folder
    kept.save_pretrained(options.output, tokenizer, overwrite=True)
    result["after"] = measured("after", options.output, held_out, options.dense)
    result |= {
        "command": f"python examples/finetune.py FOLDER --dense DENSE --text {Path(options.text).name} "
        f"--held-out {Path(options.held_out).name} --held-out-windows {options.held_out_windows} --output OUTPUT "
        f"--steps {options.steps} --tokens {options.tokens} --learning-rate {options.learning_rate:g} "
        f"--cross-entropy {options.cross_entropy:g}" + (f" --lora {options.lora}" if options.lora else ""),
        "compiled_by": kept.record["command"],
        "hardware": device_name(torch.device(device)),
        "versions": versions(),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_bytes": peak_memory(torch.device(device)),
        "held_out_tokens": held_out.numel(),
        "losses": [round(loss, 4) for loss in losses],
    }
    if options.result:
        options.result.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
