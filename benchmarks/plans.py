"""Writes what models of LLaMA 3's shapes need on GPUs, as ``compile --dry-run --devices`` estimates it.

    python -m benchmarks.plans

Nothing is measured: folders of a config and the demo's tokenizer are enough.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, LlamaConfig

from permtriton import demo
from permtriton.util.machine import versions

RESULT = Path(__file__).resolve().parent / "results" / "plans.json"
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
DEVICES = ("1x80",)


def plan(folder: Path, name: str, devices: str) -> dict[str, Any]:
    words = ["permtriton", "compile", name, "--dry-run", "--devices", devices, "--json"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    kept = {key: report[key] for key in ("memory", "disk")}
    return {"model": name, "devices": devices, "command": " ".join(words), **kept}


def main() -> None:
    rows = []
    with TemporaryDirectory() as place:
        folder = Path(place)
        for name, shape in SHAPES.items():
            config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)
            config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
            config.save_pretrained(folder / name)
            AutoTokenizer.from_pretrained(demo.FOLDER).save_pretrained(folder / name)
            rows += [plan(folder, name, devices) for devices in DEVICES]
    RESULT.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
