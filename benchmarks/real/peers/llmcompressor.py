"""Prunes a model to 2:4 by llm-compressor, in an environment of its own.

    python llmcompressor.py sparsegpt|wanda|"sparsegpt by oneDNN" MODEL IDS.safetensors OUTPUT

IDS holds ``input_ids``, int64 ``[samples, tokens]``. "By oneDNN" multiplies as ``cli/processor.py`` has torch do it on
a processor where MKL, torch's own choice, is slow. Prints the seconds of the method, without loading and saving.
"""

import sys
import time

del sys.path[0]  # this folder, in which this file has the name of the package

import torch  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

METHODS = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}


def main() -> None:
    (method, _, library), source, ids, output = sys.argv[1].partition(" by "), *sys.argv[2:]
    if library:
        torch.set_float32_matmul_precision("medium")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in load_file(ids)["input_ids"]]
    started = time.perf_counter()
    oneshot(
        model=model,
        tokenizer=source,
        dataset=DataLoader(rows, batch_size=1),  # type: ignore[arg-type]
        recipe=METHODS[method](sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"]),
        num_calibration_samples=len(rows),
        max_seq_length=rows[0]["input_ids"].numel(),
    )
    print(f"method_seconds {time.perf_counter() - started:.1f}")
    model.save_pretrained(output, save_compressed=False)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main()
