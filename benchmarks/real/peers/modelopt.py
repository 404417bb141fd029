"""Prunes a model to 2:4 by NVIDIA ModelOpt, in an environment of its own.

    python modelopt.py sparsegpt|sparse_magnitude MODEL IDS.safetensors OUTPUT

IDS holds ``input_ids``, int64 ``[samples, tokens]``. Prints the seconds of the method, without loading and saving.
"""

import sys
import time

del sys.path[0]  # this folder, in which this file has the name of the package

import modelopt.torch.sparsity as mts  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def main() -> None:
    method, source, ids, output = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    rows = load_file(ids)["input_ids"]
    options = {"data_loader": rows.split(1), "collect_func": lambda row: row}
    if method == "sparsegpt":
        options |= {"device": "cpu", "calib_size": len(rows)}
    started = time.perf_counter()
    with torch.no_grad():
        model = mts.export(mts.sparsify(model, method, options))
    print(f"method_seconds {time.perf_counter() - started:.1f}")
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main()
