"""The checks that every compilation must pass. A failed check raises an error that names what failed."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.data.samples import Samples
from permtriton.errors import VerificationError
from permtriton.model.core import recorded_embeddings, recorded_states
from permtriton.model.forward import without_cache

# Largest allowed difference between two computations of the same function in different orders, relative to the largest
# output. The tolerance of float64 is loose because norms and rotary angles are computed in float32 in any model.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# In float32, random channel orders change the outputs of Zamba 2 by more than that.
OUTPUT_TOLERANCE = {**TOLERANCE, torch.float64: 1e-4, torch.float32: 1e-3}

# Names of the states that `output_and_states` returns: transformers' own, the last hidden state, the input embeddings.
STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
LAST, EMBEDDED = "last_hidden_state", "inputs_embeds"

SAMPLED = 4096  # about how many values of each parameter `sample_hash` reads
# Entries of a config that `model_hash` leaves out: they do not change what a model with the same tensors computes.
NOT_IN_HASH = ("_name_or_path", "transformers_version", "dtype", "quantization_config")


@torch.no_grad()
def model_outputs(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Returns a model's first output, such as logits ``[samples, tokens, vocabulary]``, in float32 on the CPU."""
    with without_cache(model):
        return model(**samples.to(model.device, model.dtype).inputs)[0].float().cpu()


@torch.no_grad()
def output_and_states(
    model: PreTrainedModel, arguments: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Returns a model's first output, and lists of its hidden states by name, such as ``encoder_hidden_states``.

    The last hidden state is added as `LAST`, the input embeddings as `EMBEDDED`. All tensors are float32 on the CPU.
    """
    with without_cache(model), recorded_states(model) as last, recorded_embeddings(model) as embedded:
        try:
            result = model(**arguments, output_hidden_states=True)
        except Exception:  # a class may refuse `output_hidden_states`; an error with another cause is raised again here
            result = model(**arguments)
    named = {name: result[name] or () for name in STATES if isinstance(result, Mapping) and name in result}
    named |= {LAST: last[-1:], EMBEDDED: embedded}
    return result[0].float().cpu(), {
        name: [state.float().cpu() for state in states if isinstance(state, Tensor)] for name, states in named.items()
    }


def relative_difference(expected: Tensor, got: Tensor) -> float:
    """Returns the largest absolute difference relative to the largest expected value."""
    expected, got = expected.double(), got.double()
    scale = float(expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return float((expected - got).abs().max()) / scale


def same_channels(expected: Tensor, got: Tensor, dtype: torch.dtype) -> bool:
    """Whether hidden states ``[..., C]`` have the same channels in the same order, up to rounding in ``dtype``.

    Each channel is compared by its own root mean square over all tokens. In real models a few channels are a thousand
    times as large as the others, so a difference relative to the largest value would not show errors in the others.
    """
    if expected.shape != got.shape:
        return False
    tokens = tuple(range(expected.ndim - 1))
    size_C, error_C = (values.double().square().mean(tokens).sqrt() for values in (expected, got - expected))
    rounding = TOLERANCE[dtype] * size_C.median()
    return bool((error_C <= (size_C / 2).clamp_min(rounding)).all())  # False for NaN, too


def check_same_outputs(before: Tensor, after: Tensor, dtype: torch.dtype, stage: str) -> float:
    """Checks that an exact step left the outputs the same, up to rounding in ``dtype``.

    Args:
        stage: name of the step, with which an error begins.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        VerificationError: the difference is too large.
    """
    difference, allowed = relative_difference(before, after), OUTPUT_TOLERANCE[dtype]
    if not difference <= allowed:  # NaN, too, is refused
        raise VerificationError(
            f"{stage}: outputs differ by {difference:.1e} of the largest, but at most {allowed:.0e} is allowed in "
            f"{dtype}. Nothing was saved; "
            + ("`dtype=float32` may show that only rounding differs, else " if dtype.itemsize < 4 else "")
            + "please report this with the output of `permtriton inspect`"
        )
    return difference


def all_finite(values: Tensor) -> bool:
    """Returns whether all values are finite, in one pass over them, where `Tensor.isfinite` takes five."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def check_finite_tensor(name: str, tensor: Tensor) -> None:
    if not all_finite(tensor):
        raise VerificationError(f"{name}: {int((~tensor.isfinite()).sum())} of {tensor.numel()} values are not finite")


def model_hash(model: PreTrainedModel) -> str:
    """Returns the SHA-256 of what a model computes with: its class, its config, and all parameters and buffers."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_IN_HASH}
    sha256 = hashlib.sha256(f"{type(model).__name__} {json.dumps(config, sort_keys=True, default=str)}".encode())
    hash_tensors(sha256, [*model.named_parameters(), *model.named_buffers()])
    return sha256.hexdigest()


def sample_hash(model: nn.Module) -> str:
    """Returns a hash of a sample of each parameter, which differs after each step of a run."""
    sha256 = hashlib.sha256()
    for name, parameter in model.named_parameters():
        step = parameter.numel() // SAMPLED | 1  # odd: an even stride would read only a few columns of a matrix
        hash_tensors(sha256, [(name, parameter.detach().flatten()[::step])])
    return sha256.hexdigest()


def hash_tensors(sha256: "hashlib._Hash", named: Iterable[tuple[str, Tensor]]) -> None:
    """Adds names, dtypes, shapes and bytes of tensors to a hash, one tensor at a time."""
    for name, tensor in named:
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
