"""How a command uses the CPU: how many threads, and which library for matrix products."""

import os
from contextlib import suppress

import torch

from permtriton.errors import PermTritonError
from permtriton.model.load import config_of
from permtriton.model.source import Source, resolve_device
from permtriton.util.machine import processor
from permtriton.util.progress import Progress

SMALL = 512  # hidden size up to which operators are too short to be shared among threads
SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which a user sets torch's number of threads
WIDE = 256  # hidden size from which oneDNN's preparation of a product is worth its time
UNIT = "avx512_bf16"  # instructions that AMD's CPUs have from Zen 4 on


def suit_processor(source: Source, progress: Progress) -> None:
    """Sets up torch for a model that runs on the CPU, for the rest of this process.

    A small model runs on one thread, unless the user set a number: if another process takes a core, all threads of an
    operator wait for the thread that lost it. A wide model's float32 products are given to oneDNN where that is faster.
    """
    with suppress(PermTritonError):  # loading the model reports it later
        if resolve_device(source.device).type != "cpu":
            return
        size = _hidden_size(source)
        if size <= SMALL and torch.get_num_threads() > 1 and not any(map(os.environ.get, SAID)):
            progress.say(f"one thread, because the model is small; {SAID[0]}={torch.get_num_threads()} takes more")
            torch.set_num_threads(1)
        if size >= WIDE and _mkl_is_slow():
            _multiply_by_onednn()


def _hidden_size(source: Source) -> int:
    if source.gguf is not None:
        return min(source.gguf.stored["token_embd.weight"].shape)
    size = getattr(config_of(source).get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) else SMALL + 1


def _mkl_is_slow() -> bool:
    """Whether MKL, torch's library for float32 products, leaves this CPU's AVX-512 unused, half of Zen 5's width."""
    has = processor()
    return str(has.get("cpu_name", "")).startswith("AMD") and bool(has.get(UNIT)) and not has.get("amx_tile")


def _multiply_by_onednn() -> None:
    """Makes torch compute float32 products by oneDNN, still in float32.

    Precision "medium" makes torch call oneDNN. It also allows oneDNN to multiply in bfloat16, which oneDNN does only by
    AMX. With a version that did so by AVX-512, the product tried here would be too small: the precision is set back.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    factor = torch.full((WIDE, WIDE), 1 + 2**-12)
    if (factor @ factor).min() < WIDE * (1 + 2**-12):
        torch.set_float32_matmul_precision(before)
