"""Norms are recognized by what they compute."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from permtriton.kernels.norm_permute import NormVariant
from permtriton.model.modules import ChannelGather
from permtriton.model.norms import match_norm

MATCHES = {
    LlamaRMSNorm: ("rms", 0.0),
    T5LayerNorm: ("rms", 0.0),
    Olmo2RMSNorm: ("rms_float", 0.0),
    Gemma3nRMSNorm: ("rms_float", 0.0),
    nn.RMSNorm: ("rms_float", 0.0),
    GemmaRMSNorm: ("rms_float", 1.0),
    nn.LayerNorm: ("layer", 0.0),
    CohereLayerNorm: ("layer", 0.0),
    NemotronLayerNorm1P: ("layer", 1.0),
}


class Unscaled(nn.Module):
    """A norm that forgets its weight."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.01


@pytest.mark.parametrize("cls", MATCHES)
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("channels", [16])
def test_a_norm_is_known_by_what_it_computes(cls, eps, channels):
    kind, offset = MATCHES[cls]
    norm = cls(channels, eps=eps)
    before = copy.deepcopy(norm.state_dict())
    assert match_norm(norm, channels) == NormVariant(kind, eps, offset)
    assert all(torch.equal(value, norm.state_dict()[key]) for key, value in before.items()), "only a copy is tried"
    assert match_norm(norm.bfloat16(), channels) == NormVariant(kind, eps, offset)
    with torch.device("meta"):
        assert match_norm(cls(channels, eps=eps), channels) == NormVariant(kind, eps, offset)
    assert match_norm(norm, channels + 1) is None


@pytest.mark.parametrize(
    "module",
    [
        Unscaled(16, 1e-5),
        Doubled(16, 1e-5),
        nn.GroupNorm(4, 16, eps=1e-5),
        nn.BatchNorm1d(16),
        nn.PReLU(16),
        nn.LayerNorm(16, elementwise_affine=False),
        nn.Linear(16, 16),
        nn.Embedding(16, 16),
        nn.Identity(),
        nn.Sequential(nn.LayerNorm(16)),
        ChannelGather(torch.arange(16)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm_that_is_known_is_left_alone(module):
    assert match_norm(module, 16) is None


def test_a_hooked_norm_is_left_alone():
    norm = LlamaRMSNorm(16)
    norm.register_forward_hook(lambda module, inputs, output: output * 2)
    assert match_norm(norm, 16) is None
