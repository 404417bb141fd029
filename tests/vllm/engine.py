"""vLLM's engine in this process, for a folder, and what transformers computes with the same folder."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from permtriton import demo

TOKENS = 16  # that are generated for each prompt


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """Starts vLLM with a folder, and stops it, even where a failed test keeps it."""
    small = {"max_model_len": 64, "max_num_seqs": 32, "dtype": "float32", "seed": 0, "disable_log_stats": True}
    try:
        llm = LLM(str(folder), **{"enforce_eager": True, **small, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(folder: Path) -> list[list[int]]:
    """Returns the token ids of 32 prompts of 5 to 36 tokens from the demo's held-out text."""
    text = (demo.FOLDER / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return [ids[i * 97 : i * 97 + 5 + i] for i in range(32)]


def greedy(llm: LLM, inputs: list[list[int]]) -> list[list[int]]:
    """Returns the tokens that vLLM generates."""
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in inputs], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def expected_greedy(folder: Path, inputs: list[list[int]]) -> list[list[int]]:
    """Returns the tokens that transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in inputs]


def log_probabilities(llm: LLM, inputs: Tensor, vocabulary: int) -> Tensor:
    """Returns ``[prompts, vocabulary]``: the distribution of the next token."""
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=vocabulary)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in inputs.tolist()], sampling, use_tqdm=False)
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return torch.tensor([[table[token].logprob for token in range(vocabulary)] for table in found])
