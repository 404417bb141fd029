"""Does an exported folder load as the model that the folder it was made from loads as?"""

from pathlib import Path

import torch

from permtriton.errors import PermTritonError, VerificationError, first_line
from permtriton.model.checks import model_hash
from permtriton.model.load import load_model
from permtriton.model.name import location_of
from permtriton.model.source import Source
from permtriton.running.micro_batch import is_out_of_memory
from permtriton.util.machine import available_memory, release_memory


def check_reloads(folder: Path, written: Path, model_bytes: int) -> str:
    """Loads two folders one after the other on the CPU, and compares all parameters and buffers bit by bit.

    Args:
        written: what was made of it.
        model_bytes: size of the dense model.

    Returns:
        "same model", or "not run: " and why: too little memory, or a folder that does not load before the export
        either, such as one of a model with code of its own.

    Raises:
        VerificationError: ``written`` does not load, or as another model.
    """
    if model_bytes * 1.2 > available_memory(torch.device("cpu")):
        return "not run: the model does not fit into memory; every tensor was compared bit by bit instead"
    try:
        expected = _hash(folder)
    except PermTritonError as error:
        return f"not run: the folder that was exported cannot be loaded here: {first_line(error)}"
    try:
        actual = _hash(written)
    except PermTritonError as error:
        if is_out_of_memory(error.__cause__ or error):
            return "not run: memory ran out; every tensor was compared bit by bit instead"
        raise VerificationError(f"what was written cannot be loaded again: {first_line(error)}") from error
    if actual != expected:
        raise VerificationError("what was written loads as another model than what was read")
    return "same model"


def _hash(folder: Path) -> str:
    try:
        return model_hash(load_model(Source(location_of(folder), device="cpu")))
    finally:
        release_memory()
