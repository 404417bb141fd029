"""Images, sound and tensors as samples: what the model's own processor makes of the files of a folder.

Which files count follows from what the model reads. Images are read by Pillow; sound is read from WAV files by scipy,
made mono and brought to the processor's sampling rate.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.io import wavfile
from torch import Tensor
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError, reading
from permtriton.model.core import takes_decoder_ids
from permtriton.util.extras import require

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
SOUNDS = (".wav",)
TENSORS = ".safetensors"
MAX_SECONDS = 30  # of a sound; the rest is dropped
RATES = range(1_000, 1_000_000)  # sampling rates of sound; others take a filter of any size to change
# A model's main input -> what its files hold, their suffixes, and the part of a processor that reads them.
KINDS = {
    "pixel_values": ("images", IMAGES, "image_processor"),
    "input_values": ("sound", SOUNDS, "feature_extractor"),
    "input_features": ("sound", SOUNDS, "feature_extractor"),
}

Processor = Any  # a tokenizer, processor, image processor or feature extractor of transformers
Waveform = np.ndarray  # float32 [frames], from -1 to 1


def is_media(model: PreTrainedModel, source: str) -> bool:
    """Whether samples come from this module: the model reads images or sound, or the source holds tensors."""
    return model.main_input_name in KINDS or source.endswith(TENSORS)


def media_samples(
    source: str,
    model: PreTrainedModel,
    processor: Processor | None,
    count: int | None,
    generator: torch.Generator | None = None,
) -> Samples:
    """Returns samples of images or sound, or tensors from a file.

    Args:
        source: A folder of images or WAV files, or a ``.safetensors`` file whose tensors have the names of arguments of
            the model's ``forward`` and one row per sample.
        processor: The model's processor, image processor or feature extractor; may be None for tensors.
        count: Number of samples to draw; None for all, in order.
        generator: Generator of the draw; None takes the first ones.

    Raises:
        CalibrationError: The source or one of its files cannot be read, holds too few samples, or the processor is
            missing or gives samples of different sizes.
    """
    if source.endswith(TENSORS):
        if os.path.exists(source) and not os.path.isfile(source):  # a pipe might never end
            raise CalibrationError(f"{source} is no plain file: give a {TENSORS} file")
        with reading(f"{source} cannot be read", CalibrationError):
            stored = Samples(read_by(model, load_file(source)))
        order = _drawn(len(stored), count, generator, source)
        left = order[len(stored) if count is None else count :]
        return replace(stored[order[:count]], spare=stored[left] if left.numel() and stored.is_text else None)
    kind, suffixes, part = KINDS[model.main_input_name]
    if not os.path.isdir(source):  # which, unlike Path.is_dir, takes names that are too long
        raise CalibrationError(
            f"{source} is no folder, but {type(model).__name__} reads {kind}: the option must name a "
            f"folder of {', '.join(suffixes)} files, or a {TENSORS} file with {model.main_input_name}"
        )
    if processor is None:
        raise CalibrationError(
            f"{source} holds {kind}, but the model has no processor that reads them: add its preprocessor_config.json, "
            f"or give a {TENSORS} file with {model.main_input_name}"
        )
    files = sorted(path for path in Path(source).rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not files:
        others = sorted({path.suffix.lower() for path in Path(source).rglob("*") if path.suffix and path.is_file()})
        held = f"; it has files that end in {', '.join(others[:5])}" if others else ""
        raise CalibrationError(
            f"{source} holds no {kind}: no file in it ends in {', '.join(suffixes)}{held}. Convert other formats "
            f"({'ffmpeg -i a.flac a.wav' if kind == 'sound' else 'magick a.heic a.png'})"
        )
    files = [files[number] for number in _drawn(len(files), count, generator, source)[:count].tolist()]
    read = _images if kind == "images" else _sounds
    return _stacked(files, read(files, getattr(processor, part, processor)), model.main_input_name)


def read_by(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without labels that the model does not read, and without a mask that masks nothing."""
    labels = takes_decoder_ids(model)
    return {
        name: values
        for name, values in tensors.items()
        if (labels or name != "labels") and not (name == "attention_mask" and bool((values == 1).all()))
    }


def _drawn(there: int, count: int | None, generator: torch.Generator | None, source: str) -> Tensor:
    """Returns the numbers of all samples, those to take first, int64 ``[there]``."""
    if count is not None and there < count:
        held = f"{there} sample{'' if there == 1 else 's'}"
        raise CalibrationError(f"{source} holds {held}, but {count} are needed: lower `samples=`, or add more")
    return torch.arange(there) if generator is None else torch.randperm(there, generator=generator)


def _stacked(files: list[Path], samples: list[Mapping[str, Tensor]], main: str) -> Samples:
    """Returns all samples; without what says that every position counts, which models take for granted."""
    first = samples[0]
    for path, sample in zip(files, samples, strict=True):
        shapes = [list(each[main].shape[1:]) if main in each else None for each in (first, sample)]
        if None in shapes:
            made = ", ".join(sample)
            raise CalibrationError(f"the processor makes {made} of {path}, but the model reads {main}")
        if shapes[0] != shapes[1]:
            raise CalibrationError(
                f"{path} becomes {main} of shape {shapes[1]}, but {files[0]} of shape {shapes[0]}: let the processor "
                "bring all to one size (resize and crop, or padding), or give files of one size"
            )
    joined = {name: torch.cat([sample[name] for sample in samples]) for name in first}
    return Samples({name: tensor for name, tensor in joined.items() if name == main or not bool((tensor == 1).all())})


def _images(files: list[Path], processor: Processor) -> list[Mapping[str, Tensor]]:
    require(f"{files[0]}, an image,", "PIL")
    from PIL import Image

    def read(path: Path) -> Any:
        with Image.open(path) as image:
            return image.convert("RGB")

    return [_processed(path, _read(path, read), lambda image: processor(images=image)) for path in files]


def _sounds(files: list[Path], processor: Processor) -> list[Mapping[str, Tensor]]:
    """Returns what a feature extractor makes of sounds, which are cut to the shortest one if it does not pad them."""
    rate = processor.sampling_rate

    def extract(sound: Waveform) -> Any:
        return processor(sound, sampling_rate=rate)

    sounds = [_read(path, lambda path: _waveform(path, rate)) for path in files]
    samples = [_processed(path, sound, extract) for path, sound in zip(files, sounds, strict=True)]
    if len({tuple(tensor.shape) for sample in samples for tensor in list(sample.values())[:1]}) > 1:
        shortest = min(sound.size for sound in sounds)
        samples = [_processed(path, sound[:shortest], extract) for path, sound in zip(files, sounds, strict=True)]
    return samples


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    with reading(f"{path} cannot be read", CalibrationError):
        return read(path)


def _processed(path: Path, content: Any, process: Callable[[Any], Any]) -> Mapping[str, Tensor]:
    """Returns what a processor makes of one file, each tensor with a first dimension of 1."""
    with reading(f"the model's processor refuses {path}", CalibrationError):
        return {name: torch.as_tensor(np.asarray(values)) for name, values in process(content).items()}


def _waveform(path: Path, rate: int) -> Waveform:
    """Returns a WAV file as mono sound at a sampling rate, at most `MAX_SECONDS` of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # of chunks that it does not know
        file_rate, values = wavfile.read(path)
    if file_rate not in RATES:
        raise ValueError(f"its sampling rate is {file_rate}, expected {RATES.start} to {RATES.stop - 1}")
    values = values[: MAX_SECONDS * file_rate]
    if not values.size:
        raise ValueError("it holds no sound")
    if values.dtype.kind in "iu":
        limits = np.iinfo(values.dtype)
        values = (values - (limits.max + limits.min + 1) / 2) / ((limits.max - limits.min + 1) / 2)
    mono = values.reshape(len(values), -1).mean(1)
    if file_rate != rate:
        from scipy.signal import resample_poly  # its import takes longer than most others

        common = gcd(file_rate, rate)
        mono = resample_poly(mono, rate // common, file_rate // common)
    return mono.astype(np.float32)
