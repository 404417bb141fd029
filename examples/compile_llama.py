"""Compiles a LLaMA-like model end to end: prune, measure, generate, export packed, load again.

python examples/compile_llama.py                                          # the embedded demo model, a few minutes
python examples/compile_llama.py Qwen/Qwen3-0.6B --recipe default         # with texts of the hub
python examples/compile_llama.py ./my-model --data my-text.txt --eval-data my-heldout.txt --samples 16
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import permtriton


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, a name on the hub, a .gguf file, or demo")
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--data", help="calibration text; by default what suits the model")
    parser.add_argument("--eval-data", help="held-out text")
    parser.add_argument("--samples", type=int, help="calibration sequences")
    parser.add_argument("--sequence-length", type=int, help="tokens of each")
    parser.add_argument("--output", default="pruned-2of4")
    arguments = vars(parser.parse_args(words))
    model, output, held_out = (arguments.pop(name) for name in ("model", "output", "eval_data"))
    options = {name: value for name, value in arguments.items() if value is not None}

    for name, value in permtriton.dry_run(model, **options).forecast.rows(None):  # memory, time, disk
        print(f"{name}: {value}")

    compiled = permtriton.compile(model, sparsity="2:4", output=output, overwrite=True, progress=True, **options)
    print(compiled.evaluate(held_out))  # perplexity, and KL to the dense model

    pruned = AutoModelForCausalLM.from_pretrained(output)  # transformers alone
    tokenizer = AutoTokenizer.from_pretrained(output)
    prompt = tokenizer("def main():", return_tensors="pt")
    words = pruned.generate(**prompt, max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(words[0]))

    packed = f"{output}-packed"
    permtriton.export(output, packed, format="packed", overwrite=True)
    again = AutoModelForCausalLM.from_pretrained(packed)  # needs import permtriton
    with torch.no_grad():
        difference = (again(**prompt).logits - pruned(**prompt).logits).abs().max()
    print(f"logits of {packed} differ by at most {difference:.1g}")  # on a GPU, other kernels round otherwise


if __name__ == "__main__":
    main()
