"""Generates text with vLLM from a folder that permtriton wrote, packed or not. vLLM finds permtriton by itself.

    pip install ".[vllm]"    # in the checkout; on a CPU see docs/serving.md
    permtriton compile demo --recipe fast && permtriton export demo-2of4 --format packed
    python examples/serve_vllm.py demo-2of4-packed --dtype float32

The same as a server: vllm serve ./demo-2of4-packed
"""

import argparse

from vllm import LLM, SamplingParams


def main(words: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder that compile or export wrote")
    parser.add_argument("--prompt", action="append", help="repeat it for several")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens for each prompt")
    parser.add_argument("--dtype", default="auto", help="packed weights stay packed on a GPU in bfloat16 and float16")
    arguments = parser.parse_args(words)

    prompts = arguments.prompt or ["def main():", "import "]
    model = LLM(arguments.folder, dtype=arguments.dtype, enforce_eager=True, max_model_len=256)
    answers = model.generate(prompts, SamplingParams(temperature=0, max_tokens=arguments.tokens))
    texts = [answer.outputs[0].text for answer in answers]
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    return texts


if __name__ == "__main__":
    main()
