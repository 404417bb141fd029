"""A tiny random model of any class in transformers' auto mappings: its config's defaults, shrunk by rules."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from benchmarks.architectures.overrides import OVERRIDES
from permtriton.model.core import takes_decoder_ids

WIDTH, INNER, HEADS, KEY_VALUE_HEADS, HEAD_DIM, VOCABULARY, POSITIONS, IMAGE, PATCH = 64, 96, 4, 2, 16, 160, 64, 64, 16
SOUND, FRAMES = 4000, 40  # length of a sample of sound, of a spectrogram
MOST_LAYERS = 4
MOST_PARAMETERS = 10_000_000
# Mapping of transformers -> kind of model. A class counts where it first appears; of `MODEL`, which holds the class
# without a head of every model type, only those whose type is in no other mapping.
MAPPINGS = {
    "FOR_CAUSAL_LM": "causal language model",
    "FOR_MASKED_LM": "masked language model",
    "FOR_TEXT_ENCODING": "text encoder",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM": "encoder-decoder",
    "FOR_SPEECH_SEQ_2_SEQ": "speech to text",
    "FOR_CTC": "audio",
    "FOR_AUDIO_CLASSIFICATION": "audio",
    "FOR_IMAGE": "image",
    "FOR_IMAGE_TEXT_TO_TEXT": "image and text",
    "": "other",
}
# Name of a size -> its largest value; the first pattern that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"codebook_size", 128),
    (r".*vocab.*size.*", VOCABULARY),
    (r"max_(source|target)_positions|.*max_.*position.*|n_positions|n_ctx|context_length", POSITIONS),
    (r"seq_len.*|max_seq.*", POSITIONS),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r".*(head_dim|dim_head|head_size|d_kv|d_head|headdim)(_.*)?", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"(.*_)?(num_)?(key_value|kv)_heads|.*num_query_groups", KEY_VALUE_HEADS),
    (r".*num_key_heads", KEY_VALUE_HEADS),
    (r"(.*_)?(num_|n_)?(attention_|self_|cross_)?(attention_)?heads?(_.*)?|n_head|.*_n_heads", HEADS),
    (r"(.*_)?(intermediate|ffn|feed_forward|feedforward|inner|d_ff|mlp|linear_units).*", INNER),
    (r"first_k_dense_replace|max_window_layers|num_dense_layers|moe_layer_start_index", 1),
    (r"(.*_)?(num_|n_)?(hidden_|encoder_|decoder_)*(layers?|depth)(_per_stack)?", 2),
    (r".*experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts", 2),
    (r"n_group|num_expert_group|n_groups|.*topk_group", 1),
    (r".*shared_expert(s)?|n_shared_experts", 1),
    (r"(.*_)?(num_|n_)?(local_|routed_)?experts|.*expert_num", 4),
    (r".*(lora_)?rank", 32),
    (r"image_size|.*img_size|pretrain_image_size", IMAGE),
    (r"patch_size", PATCH),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_size|proj.*(dim|size)|_dim|_width|width|"
     r"out_dim|hidden)(_.*)?|dim|d_.*", WIDTH),
    (r".*(state_size|d_state)", 16),
    (r".*chunk_size", 16),
    (r".*(channels|filters|units)", WIDTH),
    (r"(local_)?attention_window.*|sliding_window.*", 16),
    (r".*(index_topk)", 8),
)  # fmt: skip
# Sizes of kernels and of what goes in, which a rule's name would take for those of layers.
KEPT = {
    "num_feat_extract_layers", "num_channels", "in_channels", "audio_channels", "chunk_size_feed_forward", "mlp_ratio",
    "moe_layer_freq",
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
TOKEN = re.compile(r".*(token_id|token_index|_id|_token)s?$")


def classes() -> dict[str, str]:
    """Returns every class of the mappings -> its kind."""
    found: dict[str, str] = {}
    types: set[str] = set()
    for mapping, kind in MAPPINGS.items():
        names = getattr(modeling_auto, f"MODEL_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES")
        for model_type, entry in names.items():
            if not mapping and model_type in types:
                continue
            for name in (entry,) if isinstance(entry, str) else entry:
                found.setdefault(name, kind)
        types |= set(names)
    return found


def build(name: str) -> PreTrainedModel:
    """Returns a tiny model of the class called ``name``, the same each time, in eval mode.

    Raises:
        Exception: of any kind, where the shrunk config does not make a model.
    """
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    config = tiny_config(config_class, OVERRIDES.get(name, OVERRIDES.get(config_class.model_type, {})))
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the shrunk config still asks for {count} parameters")
    torch.manual_seed(0)
    model = model_class._from_config(config)
    randomize(model)
    return model.eval()


def tiny_config(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns a config with the defaults of its class, shrunk by the rules, and then changed."""
    return config_class(**_merged(shrunk(config_class()), changes))


def _merged(small: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(small)
    for name, value in changes.items():
        nested = small.get(name)
        merged[name] = _merged(nested, value) if isinstance(value, dict) and isinstance(nested, dict) else value
    return merged


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns what makes a config with small sizes, few layers and few token ids; nested configs as dicts.

    What a config derives from its other values is left out, so that it is derived from the small ones.
    """
    values = {name: value for name, value in config.to_dict().items() if not _derived(config, name, value)}
    layers, special, small = _layers(values), VOCABULARY, _rope(config)
    for name, value in values.items():
        nested = vars(config).get(name)
        if isinstance(nested, PreTrainedConfig):
            small[name] = {"model_type": nested.model_type, **shrunk(nested)}
        elif name in KEPT or isinstance(value, bool):
            small[name] = value
        elif name in small:
            continue
        elif TOKEN.fullmatch(name) and isinstance(value, int | list) and _any_above(value, VOCABULARY - 60):
            special -= 1
            small[name] = special if isinstance(value, int) else [special]
        elif name in LAYERS and isinstance(value, int):
            small[name] = min(value, len(layers))
        elif "key_value_heads" in name and value == values.get(name.replace("key_value", "attention")):
            small[name] = HEADS
        elif isinstance(value, int):
            small[name] = min(value, _limit(name, value))
        elif isinstance(value, list | tuple):
            small[name] = _shrunk_list(name, list(value), layers, _depth(values))
        else:
            small[name] = value
    return small


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the rotary parameters of a model whose rotations are divided into sections for text and images."""
    rope = getattr(config, "rope_parameters", None)
    if "mrope_section" not in getattr(config, "ignore_keys_at_rope_validation", ()) or rope == {}:
        return {}
    rope = rope or {}
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1)) // 2
    sections = [half // 4, half * 3 // 8, half - half // 4 - half * 3 // 8]
    return {"rope_parameters": {**rope, "rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}


def _derived(config: PreTrainedConfig, name: str, value: Any) -> bool:
    """Whether a config works a value out by itself, as far as its declaration tells."""
    if name in config.sub_configs or TOKEN.fullmatch(name):
        return False
    fields, aliases = getattr(config, "__dataclass_fields__", {}), config.attribute_map
    name = next((alias for alias, real in aliases.items() if name in (alias, real) and alias in fields), name)
    if name not in fields:
        return True
    per_layer = isinstance(value, list) and len(value) == _depth(config.to_dict())
    return fields[name].default is None and not per_layer


def _any_above(value: Any, limit: int) -> bool:
    return any(isinstance(v, int) and v >= limit for v in (value if isinstance(value, list) else [value]))


def _depth(config: Mapping[str, Any]) -> int:
    return next((config[name] for name in LAYERS if isinstance(config.get(name), int)), 2)


def _layers(config: Mapping[str, Any]) -> list[int]:
    """Returns which layers of the default config a shrunk one keeps: the first of every kind, and at least two."""
    depth, kept = _depth(config), set()
    for value in config.values():
        if isinstance(value, list) and len(value) == depth:
            kept |= {value.index(kind) for kind in value[:] if not isinstance(kind, float)}
    for layer in range(depth):
        if len(kept) < min(2, depth):
            kept.add(layer)
    return sorted(kept)[:MOST_LAYERS]


def _shrunk_list(name: str, value: list[Any], layers: Sequence[int], depth: int) -> list[Any]:
    if len(value) == depth and depth > 2:
        return [value[layer] for layer in layers]
    if name == "depths":
        return [1] * len(value)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        if name in ("image_size", "patch_size"):
            return [min(item, IMAGE if name == "image_size" else PATCH) for item in value]
        if name in ("num_heads", "num_attention_heads"):
            return [HEADS] * len(value)
        if re.fullmatch(r"hidden_sizes|embed_dim.*|encoder_hidden_sizes|stem_channels|conv_dim|.*_channels", name):
            return [WIDTH] * len(value) if value and min(value) >= 8 else value
        if name.endswith(("indexes", "indices", "layers", "idxs", "layer_ids")):
            return [item for item in value if item < len(layers)]
    return value


def _limit(name: str, value: int) -> int:
    for pattern, limit in SIZES:
        if re.fullmatch(pattern, name):
            return limit
    return value


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """Draws every parameter at random, so that norm weights and biases distinguish channels, too."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.2)
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)


# -- inputs ------------------------------------------------------------------------------------------------------------


def inputs(model: PreTrainedModel, samples: int = 8, tokens: int = 24, seed: int = 1) -> dict[str, Tensor]:
    """Returns random inputs of a model by the names of its ``forward``.

    Args:
        model: model that they are for.
        samples: size of the first dimension.
        tokens: length of a text.
        seed: seed of the random values.

    Raises:
        ValueError: the model's main input is of an unknown kind.
    """
    generator = torch.Generator().manual_seed(seed)
    config, name = model.config, model.main_input_name
    if name == "input_ids":
        values = {name: _ids(config, samples, tokens, generator)}
    else:
        values = {name: torch.randn(samples, *_shape(config, name), generator=generator)}
    if takes_decoder_ids(model):
        values["decoder_input_ids"] = _ids(config, samples, tokens // 2, generator)
    return values


def _ids(config: PreTrainedConfig, samples: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Returns token ids that stand for nothing special in the config, int64 ``[samples, tokens]``."""
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    entries = [*config.to_dict().items(), *text.to_dict().items()]
    special = {value for name, value in entries if TOKEN.fullmatch(name) and isinstance(value, int)}
    allowed = torch.tensor([token for token in range(4, max(vocabulary - 40, 8)) if token not in special])
    return allowed[torch.randint(0, allowed.numel(), (samples, tokens), generator=generator)]


def _shape(config: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of one sample of an image, a video or a sound."""
    mel = _first(config, "num_mel_bins", "feature_projection_input_dim", "feature_size", "input_feat_per_channel") or 80
    if name in ("pixel_values", "pixel_values_videos"):
        size = _first(config, "image_size") or IMAGE
        image = (_first(config, "num_channels", "in_channels") or 3, size, size)
        frames = _first(config, "frames_per_clip", "num_frames")
        return (frames or 4, *image) if frames or name == "pixel_values_videos" else image
    if name == "input_values":
        spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "max_length")
        return (config.max_length, mel) if spectrogram else (SOUND,)
    if name == "input_features":
        whisper = hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins")
        return (mel, 2 * config.max_source_positions) if whisper else (FRAMES, mel)
    raise ValueError(f"its main input is {name}")


def _first(config: Any, *names: str) -> int | None:
    """Returns the first of some values that the config, or that of its encoder, has."""
    parts = [config, *(vars(config).get(f"{part}_config") for part in ("encoder", "audio", "vision"))]
    for name in names:
        for value in (getattr(part, name, None) for part in parts if part is not None):
            value = value["height"] if isinstance(value, dict) else value
            value = value[0] if isinstance(value, list | tuple) else value
            if isinstance(value, int):
                return value
    return None
