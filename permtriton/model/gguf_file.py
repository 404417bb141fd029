"""Reads the headers of GGUF files, and corrects the configs and tokenizers that transformers reads from them."""

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from permtriton.errors import ModelError, reading
from permtriton.model.headers import StoredTensor
from permtriton.util.extras import require
from permtriton.util.progress import Progress

SUFFIX = ".gguf"
FACTORS = ("rope_freqs", "rope_factors_")  # prefixes of rotary factors' names (LLaMA 3.1, Phi-3 128k)
# A model need not use these: `_check_rotation` reads the factors, and T5's cross-attention has no relative positions.
MAY_BE_UNUSED = (*FACTORS, "dec.blk.0.cross_attn_rel_b")
LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
# Values of tokenizer.ggml.pre, which says how a text is split before byte-level BPE, grouped as in llama.cpp: some
# split as LLaMA 3 does, where a piece in the vocabulary needs no merges; others make each digit a piece.
SPLIT_AS_LLAMA_3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"
)  # fmt: skip
SPLIT_DIGITS = ("smollm", "refact", "minerva-7b")  # also "starcoder", but its class loses the split when reloaded
GEMMA_2_27B = 46  # number of layers
ANOTHER = "which makes it another model: give the model in safetensors"


@dataclass(frozen=True)
class GgufFile:
    """What is read of a GGUF file: its header, its rotary factors, and which biases are not 0."""

    path: Path  # the file
    stored: dict[str, StoredTensor]  # tensor name -> description; its dtype is GGUF's, such as ``Q4_1``
    # field, such as ``llama.rope.freq_base`` -> value; of all fields but the tokenizer's lists
    header: Mapping[str, Any]
    # tensor of divisors of the rotary frequencies -> its values; only tensors that are not all 1
    factors: Mapping[str, Sequence[float]]
    biases: frozenset[str]  # names of the biases that are not 0

    @property
    def types(self) -> dict[str, int]:
        """Dtype -> number of tensors of that dtype, the most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.stored.values()).most_common())


def in_words(types: Mapping[str, int]) -> str:
    """Returns `GgufFile.types` for people, such as ``210 tensors of Q4_1, 61 of F32``."""
    (first, count), *others = types.items()
    return ", ".join([f"{count} tensors of {first}", *(f"{number} of {name}" for name, number in others)])


def read_gguf(path: Path) -> GgufFile:
    require(path.name, "gguf", "accelerate")
    with reading(f"{path} is not a complete GGUF file, it is damaged or truncated", ModelError):
        file = _reader()(path)
        stored = {
            str(tensor.name): StoredTensor(path, tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape))))
            for tensor in file.tensors
        }
        if "split.count" in file.fields and (parts := file.fields["split.count"].contents()) > 1:
            raise ModelError(f"{path} is one of {parts} parts: merge them with llama-gguf-split --merge")
        if not stored:
            raise ModelError(f"{path} holds no tensors: give a GGUF file with weights")
        header = {
            name: field.contents()
            for name, field in file.fields.items()
            if not (name.startswith("tokenizer.") and len(field.types) > 1)
        }
        factors = {
            str(e.name): e.data.tolist() for e in file.tensors if e.name.startswith(FACTORS) and (e.data != 1).any()
        }
        biases = frozenset(str(info.name) for info in file.tensors if info.name.endswith(".bias") and info.data.any())
    return GgufFile(path, stored, header, factors, biases)


def check_config(file: GgufFile, config: Any) -> None:
    """Completes the config that transformers read from a file, and refuses a file that transformers misreads.

    GGUF has no field for T5's activation or Gemma 2's query scale. As llama.cpp does, this takes GELU for a gated
    feed-forward, and recognizes Gemma 2 27B by its number of layers. transformers does not read Phi-3's sliding window;
    it is set here, unless the config turns it off.
    """
    if config.model_type == "t5" and config.is_gated_act:
        config.feed_forward_proj, config.dense_act_fn = "gated-gelu", "gelu_new"
    if config.model_type == "gemma2" and config.num_hidden_layers == GEMMA_2_27B:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    prefix = file.header["general.architecture"]
    read: dict[str, list[int]] = {"ssm.dt_b_c_rms": [False]}  # True for FalconMamba, which transformers reads as Mamba
    window = file.header.get(f"{prefix}.attention.sliding_window", 0)
    if 0 < window < file.header.get(f"{prefix}.context_length", math.inf):
        if not hasattr(config, "sliding_window"):
            read["attention.sliding_window"] = [0]
        elif getattr(config, "use_sliding_window", True):
            config.sliding_window = window
    _refuse_others(file, read)
    _check_rotation(file, config)


def complete_tokenizer(file: GgufFile, tokenizer: Any, progress: Progress) -> None:
    """Adds to the tokenizer that transformers read from a file what transformers does not read.

    LLaMA 3's merges and the split into digits are as in llama.cpp. Qwen's NFC normalization is as in the original
    tokenizers; llama.cpp does not normalize.
    """
    backend, says = tokenizer.backend_tokenizer, file.header.get
    kind, split = says("tokenizer.ggml.model"), says("tokenizer.ggml.pre")
    prefix = says("tokenizer.ggml.add_space_prefix", True)
    if kind == "llama" and not prefix and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]  # they keep a leading space
        backend.decoder = decoders.Sequence(parts)
    if kind != "gpt2":
        return
    if split in SPLIT_AS_LLAMA_3:
        backend.model.ignore_merges = True
        if tokenizer.bos_token is not None:
            tokenizer.add_bos_token = says("tokenizer.ggml.add_bos_token", True)
    elif split in SPLIT_DIGITS:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    elif split in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    if split not in (*_known_splits(), *SPLIT_DIGITS, "gpt-2") and says("general.architecture") != "gpt2":
        progress.say(
            f"{file.path}: transformers does not know how its tokenizer splits texts (tokenizer.ggml.pre is "
            f"{split or 'missing'}): ids may differ from the original's; give ids in place of text, or the model in "
            "safetensors"
        )


def _known_splits() -> Collection[str]:
    """Returns the values of ``tokenizer.ggml.pre`` that transformers knows; none in older versions."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return ()
    return GGUF_PRE_TOKENIZER_SPLITS.keys()


def _refuse_others(file: GgufFile, read: Mapping[str, Sequence[Any]]) -> None:
    """Refuses a file with a field whose value differs from the one that transformers uses.

    Args:
        read: name of a field, without the architecture -> the value that transformers uses, then equivalent values.
    """
    for name, value in file.header.items():
        known = read.get(name.partition(".")[2], [value])
        if value not in known:
            raise ModelError(f"{file.path}: {name} is {value}, but transformers reads it as {known[0]}, {ANOTHER}")


def _check_rotation(file: GgufFile, config: Any) -> None:
    """Refuses a file whose rotary embedding differs from that of the config that transformers read from it.

    For some architectures, transformers reads only some of the fields, and takes its defaults for the others. It does
    not read the factors of LLaMA 3.1 and later: this sets the parameters of the config from which they follow.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    by_layer = "rope_type" not in rope
    kinds = list(rope.values()) if by_layer else [rope]
    types = [kind["rope_type"] for kind in kinds]
    if file.factors and set(types) == {"default"} and not _takes_factors(config, file.factors):
        raise ModelError(f"{file.path}: transformers does not use {min(file.factors)}, {ANOTHER}")
    known = {
        "freq_base": [kind["rope_theta"] for kind in kinds],
        "scaling.type": [*types, "none"],
        "scaling.factor": [*(kind["factor"] for kind in kinds if "factor" in kind), 1, 0],
    }
    known["scale_linear"] = known["scaling.factor"]  # an older name of scaling.factor
    if "sliding_attention" in rope:
        known["freq_base_swa"] = [rope["sliding_attention"]["rope_theta"]]
    if not by_layer:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        known["dimension_count"] = [round(size * rope.get("partial_rotary_factor", 1))]
    _refuse_others(file, {f"rope.{name}": values for name, values in known.items()})


def _takes_factors(config: Any, factors: Mapping[str, Sequence[float]]) -> bool:
    """Gives a config the rotary parameters of LLaMA 3.1 if ``factors`` follow from them; returns whether they do.

    Published models differ only in the largest factor, which is read from ``factors``.
    """
    values, rope = torch.tensor(factors.get("rope_freqs.weight", [])), config.rope_parameters
    if not len(values):
        return False
    frequencies = rope["rope_theta"] ** (-torch.arange(len(values)) / len(values))
    config.rope_parameters = {**rope, **LLAMA3, "factor": float(values.max())}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if scaled.shape == values.shape and torch.allclose(frequencies / scaled, values, rtol=1e-4):
        return True
    config.rope_parameters = rope
    return False


@contextmanager
def read_quickly(file: GgufFile | None) -> Iterator[None]:
    """Makes transformers read GGUF files by `_reader` inside the ``with`` block, unless ``file`` is None."""
    if file is None:
        yield
        return
    import gguf

    with mock.patch.object(gguf, "GGUFReader", _reader()):
        yield


@cache
def _reader() -> Any:
    """Returns gguf's reader class, changed so that it refuses truncated files and reads lists fast.

    gguf's own reader reads element by element, which takes half a minute for the 262,144 words of Gemma 3.
    """
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:  # else gguf would read nothing as often as a damaged length says
                raise ValueError(f"it ends before the {count} values at byte {offset}")
            return values

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            (kind,), (length,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            kind, length, start = GGUFValueType(kind), int(length), orig_offs + 12
            if (number := self.gguf_scalar_to_np.get(kind)) is not None:
                values = np.asarray(self._get(start, number, length))
                parts, end = list(values.reshape(-1, 1)), start + values.nbytes
            elif kind == GGUFValueType.STRING:
                data: Any = np.asarray(self.data)
                buffer, parts, end = memoryview(data), [], start
                for _ in range(length):  # beyond the end of the file, this or the next read fails
                    begin = end + 8
                    end = begin + struct.unpack_from("=Q", buffer, end)[0]
                    parts.append(data[begin:end])
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [GGUFValueType.ARRAY, *([kind] if length else [])]
            return end - orig_offs, parts, list(range(length)), types

    return Reader
