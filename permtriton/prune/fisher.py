"""How much the loss feels each weight: the diagonal Fisher information, as two vectors per linear.

For a linear ``y = W x``, the information of ``W[o, j]`` is the sum over tokens of ``(dL/dy_o)^2 x_j^2``, where the
labels of the loss are drawn from the dense model's own prediction. It is kept as ``row_o * column_j``: the sum of
squares of the gradients at output o times the mean square of input j, as if the two were independent.

The rows alone are weights for the heuristic order (``--row-weights fisher``): an N:M mask compares the weights of one
row, so a factor per row changes no mask, but the order sums scores over rows, and rows matter unequally.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedModel

from permtriton.config import CompileConfig, ObjectiveKind
from permtriton.errors import CalibrationError
from permtriton.micro_batch import MicroBatch
from permtriton.model.forward import last_hidden_state, without_cache
from permtriton.model.plan import Plan, layer_modules, linear_module, weight_in_out
from permtriton.progress import Progress
from permtriton.prune.masked_model import checkpointed, frozen


@dataclass
class Fisher:
    """The diagonal Fisher information of one linear's weights, ``row_O * column_C / tokens``.

    Attributes:
        row: Sum over tokens of the squared gradient at each output, float32 ``[out_features]``.
        column: Sum over tokens of the square of each input, float32 ``[in_features]``.
        tokens: Number of tokens that the linear has seen; fewer than there are for an expert.
    """

    row: Tensor
    column: Tensor
    tokens: int = 0

    def clear(self) -> None:
        """Forgets what was added."""
        self.row.zero_()
        self.column.zero_()
        self.tokens = 0

    def curvature(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns factors ``(row, column)`` of the second derivative of the mean loss, halved.

        The loss rises to second order by ``row_o * column_j * w^2`` when a weight ``w`` is removed.

        Args:
            tokens: Number of tokens that the mean is over.
        """
        return self.row / (2 * tokens), self.column / max(self.tokens, 1)


@torch.enable_grad()
def fisher_information(
    model: PreTrainedModel, plan: Plan, kind: ObjectiveKind, ids: Tensor, config: CompileConfig, progress: Progress
) -> dict[str, Fisher]:
    """Returns linear name -> Fisher information of its weights, from one backward pass over all sequences.

    For ``kl``, the loss is the cross-entropy of a label drawn from the model's own prediction, summed over tokens. For
    ``cosine``, it is the normalised last hidden state along a random direction per token, drawn from the normal
    distribution: the expected square of its gradient is the second derivative of ``1 - cos``.

    Args:
        model: Dense model; unchanged on return.
        plan: The model's plan.
        kind: Objective whose second derivative is wanted.
        ids: Calibration sequences, int64 ``[sequences, tokens]``.
        config: Options: the seed, ``micro_batch_size`` and ``activation_checkpointing``.
        progress: Progress reporter, one step per sequence.

    Raises:
        CalibrationError: A gradient is NaN or infinite.
    """
    found: dict[str, Fisher] = {}
    for _, name in plan.linears():
        channels, rows = weight_in_out(linear_module(model, name)).shape
        found[name] = Fisher(torch.zeros(rows, device=model.device), torch.zeros(channels, device=model.device))
    layers = layer_modules(model, plan) if config.activation_checkpointing else []

    def backward(size: int) -> None:
        for each in found.values():
            each.clear()
        generator = torch.Generator().manual_seed(config.seed)
        with progress.stage("row weights", ids.shape[0]) as advance:
            for rows_of_ids in ids.split(size):
                with checkpointed(layers):
                    _loss(model, kind, rows_of_ids, generator).backward()
                advance(rows_of_ids.shape[0])

    with frozen(model), _watched(model, found):
        MicroBatch(config.micro_batch_size).run(backward)
    for name, each in found.items():
        if not bool(each.row.isfinite().all() & each.column.isfinite().all()):
            raise CalibrationError(
                f"{name}: its inputs or the gradients of its outputs are not finite on the calibration text: try "
                "--dtype float32, or --row-weights none"
            )
    return found


@contextmanager
def _watched(model: PreTrainedModel, found: Mapping[str, Fisher]) -> Iterator[None]:
    """Inside the context, every forward and backward pass adds to the information of each linear."""
    handles = [linear_module(model, name).register_forward_hook(_adding(each)) for name, each in found.items()]
    embedding = model.get_input_embeddings()
    handles.append(embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding(fisher: Fisher):  # type: ignore[no-untyped-def]
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        flat = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        squares, tokens = flat.float().square().sum(0), flat.shape[0]  # of an input that need not stay in memory

        def add(grad: Tensor) -> None:
            fisher.row += grad.reshape(-1, grad.shape[-1]).float().square().sum(0)
            fisher.column += squares
            fisher.tokens += tokens

        output.register_hook(add)  # a layer that is recomputed runs twice, but only one output has a gradient

    return hook


def _loss(model: PreTrainedModel, kind: ObjectiveKind, ids: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "cosine":
        hidden = normalize(last_hidden_state(model, ids).float(), dim=-1)
        drawn = [torch.randn(hidden.shape[1:], generator=generator) for _ in ids]  # randn fills whole tensors
        direction = torch.stack(drawn)
        return (hidden * direction.to(hidden.device)).sum()
    with without_cache(model):
        logits = model(input_ids=ids.to(model.device)).logits.float()
    noise = torch.rand(logits.shape, generator=generator).to(logits.device)
    labels = (logits.detach() - (-noise.log()).log()).argmax(-1)  # the Gumbel-max draw from softmax(logits)
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
