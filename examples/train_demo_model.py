"""Train the demo model that ships inside permtriton, from scratch, on a CPU.

The text is the Python standard library of the interpreter that runs this script (sources, docstrings and the language
reference in ``pydoc_data``; PSF licence). Whole files are held out by a hash of their path, so no held-out line is ever
trained on. The result is a LLaMA-architecture causal LM with grouped-query attention, a byte-level BPE tokenizer, a
calibration text (from training files) and a held-out text.

    python examples/train_demo_model.py --output permtriton/demo
"""

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "__pycache__"}
HELD_OUT_ONE_IN = 16
CALIBRATION_CHARACTERS = 600_000
HELD_OUT_CHARACTERS = 240_000
END_OF_TEXT = "<|endoftext|>"


def standard_library_files() -> list[tuple[str, str]]:
    """Returns (relative path, text) of the standard library's own modules, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 500:
                files.append((str(relative), text))
    return files


def is_held_out(relative_path: str) -> bool:
    """Whether a file is held out: decided by a hash of its path, so that the split is the same on every machine."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def take(files: list[tuple[str, str]], characters: int) -> str:
    """Joins whole files, in an order given by a hash of their path, until ``characters`` are reached."""
    ordered = sorted(files, key=lambda item: hashlib.sha256(b"order" + item[0].encode()).hexdigest())
    parts, total = [], 0
    for _, text in ordered:
        if total >= characters:
            break
        if len(text) <= 60_000:  # one huge module must not be the whole sample
            parts.append(text)
            total += len(text)
    return "\n\n".join(parts)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, which needs no unknown token: every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Returns one long int64 stream ``[tokens]``, each document followed by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(ids)


def batches(stream: torch.Tensor, batch: int, length: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields ``[batch, length]`` windows at random offsets."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        offsets = torch.randint(0, stream.numel() - length, (batch,), generator=generator)
        yield torch.stack([stream[o : o + length] for o in offsets])


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: torch.Tensor, length: int) -> float:
    """Returns exp of the mean next-token loss over consecutive windows of ``length`` tokens."""
    windows = stream[: stream.numel() // length * length].view(-1, length)
    losses = [model(input_ids=w, labels=w).loss.item() for w in windows.split(1)]
    return math.exp(sum(losses) / len(losses))


def train(model: LlamaForCausalLM, stream: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> None:
    """Trains with AdamW, linear warm-up, cosine decay to a twentieth of the learning rate, and bfloat16 autocast."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
    )
    warmup = max(args.steps // 20, 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warmup) / max(args.steps - warmup, 1)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    started = time.time()
    model.train()
    for step, ids in enumerate(batches(stream, args.batch_size, args.length, args.steps, args.seed), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == args.steps:
            model.eval()
            held = perplexity(model, held_out[: args.length * 24], args.length)
            model.train()
            print(
                f"step {step}/{args.steps}  {step * ids.numel() / 1e6:.1f} M tokens  train loss {loss.item():.3f}  "
                f"held-out perplexity {held:.2f}  {time.time() - started:.0f} s",
                flush=True,
            )
    model.eval()


def save_model(model: LlamaForCausalLM, output: Path) -> None:
    """Writes the weights in float16, which halves the package, and a config that says to run in float32."""
    output.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(output)
    config_file = output / "config.json"
    stored = json.loads(config_file.read_text())
    stored["dtype"] = "float32"
    config_file.write_text(json.dumps(stored, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("permtriton/demo"))
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    files = standard_library_files()
    training = [f for f in files if not is_held_out(f[0])]
    held_out = [f for f in files if is_held_out(f[0])]
    tokenizer = train_tokenizer([text for _, text in training], args.vocab_size)
    stream = encode(tokenizer, [text for _, text in training])
    held_out_text = take(held_out, HELD_OUT_CHARACTERS)
    held_out_stream = encode(tokenizer, [held_out_text])
    print(f"{len(training)} files, {stream.numel():,} tokens to train on; {held_out_stream.numel():,} tokens held out")

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    started = time.time()
    train(model, stream, held_out_stream, args)
    seconds = time.time() - started

    save_model(model, args.output)
    tokenizer.save_pretrained(args.output)
    (args.output / "calibration.txt").write_text(take(training, CALIBRATION_CHARACTERS), encoding="utf-8")
    (args.output / "heldout.txt").write_text(held_out_text, encoding="utf-8")
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens_seen": args.steps * args.batch_size * args.length,
        "training_tokens_unique": stream.numel(),
        "held_out_tokens": held_out_stream.numel(),
        "held_out_perplexity": round(perplexity(model.float(), held_out_stream, args.length), 3),
        "characters_per_token": round(len(held_out_text) / held_out_stream.numel(), 3),
        "seconds": round(seconds),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "arguments": {k: v for k, v in vars(args).items() if k != "output"},
    }
    (args.output / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
