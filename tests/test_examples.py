"""The programs in examples/: each runs as it is, on a tiny model."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import permtriton

from . import zoo
from .sentences import SENTENCE, trained_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = ("--recipe", "mask", "--data", "text.txt", "--samples", "4", "--sequence-length", "16")


def run(name: str, *words: str) -> None:
    runpy.run_path(str(EXAMPLES / name))["main"](list(words))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a tiny model and a text."""
    tokenizer = trained_tokenizer()
    zoo.tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_model_end_to_end(here, capsys):
    run("compile_llama.py", "model", "--eval-data", "text.txt", *QUICK)
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "KL" in printed
    assert float(printed.split("logits of pruned-2of4-packed differ by at most ")[1].split()[0]) < 1e-4
    packed = AutoModelForCausalLM.from_pretrained(here / "pruned-2of4-packed")
    assert all(
        (w.view(-1, 4) != 0).sum(1).max() == 2 for n, w in packed.named_parameters() if n.endswith("proj.weight")
    )


@pytest.mark.slow
def test_reading_masks(here, capsys):
    for importance in ("wanda", "magnitude"):
        permtriton.compile("model", data="text.txt", recipe="mask", importance=importance, samples=4,
                           sequence_length=16, output=importance)  # fmt: skip
    run("read_masks.py", "wanda", "magnitude", "--linear", "model.layers.0.mlp.down_proj")
    printed = capsys.readouterr().out
    assert "0 of 24 input channels moved" in printed
    assert re.search(r"^wanda and magnitude share \d+% of the kept weights$", printed, re.M)


def test_vllm(here, monkeypatch, capsys):
    pytest.importorskip("vllm")
    run("compile_llama.py", "model", "--eval-data", "text.txt", *QUICK)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    run("serve_vllm.py", "pruned-2of4-packed", "--dtype", "float32", "--prompt", "the quick", "--tokens", "4")
    assert "'the quick' -> " in capsys.readouterr().out
