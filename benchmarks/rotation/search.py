"""How is a rotation found that leaves little for 2:4 masks to lose?"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from permtriton import NMPattern
from permtriton.methods.order.heuristic import MAX_ROWS, heuristic_index
from permtriton.passes.plan import ChannelSpace

PATTERN = NMPattern(2, 4)  # which `lost` has in its code
ENTROPY_RATE, LOSS_RATE = 0.01, 0.003


@dataclass(frozen=True)
class Variant:
    """What is turned, and how the rotation is found.

    Attributes:
        stream: where the search of the stream's rotation starts: ``identity``, ``random`` or ``eigenvectors`` (of the
            mean Hessian); empty for no rotation.
        heads: whether the values of each key-value head are turned, before the stream is.
        entropy: whether the entropy is minimised.
        loss: whether the share that masks lose is minimised, after the entropy.
        fisher: whether rows count by the Fisher information of the outputs, not alike.
        fixed: whether what masks lose is compared with all scores before the rotation, not after it.
        folded: whether gains are folded.
    """

    stream: str = ""
    heads: bool = False
    entropy: bool = True
    loss: bool = True
    fisher: bool = False
    fixed: bool = False
    folded: bool = True


@dataclass(frozen=True)
class Part:
    """Weights that read or write what is turned: one linear or several of one input, for one or more rotations.

    Attributes:
        weight: float32 ``[rotations, outputs, inputs]``.
        inverse: inverse Hessian of the inputs ``[rotations, inputs, inputs]`` where they are turned, else its diagonal
            ``[rotations, 1, inputs]``.
        reads: whether the inputs are turned, not the outputs.
        rows: how much each output counts, ``[outputs]``, or a scalar.
        scale: what the lost scores are compared with; 0 for all scores as they are now, see `totals`.
    """

    weight: Tensor
    inverse: Tensor
    reads: bool
    rows: Tensor
    scale: float = 0.0

    def drawn(self, most: int, generator: torch.Generator) -> "Part":
        """Returns the part with at most so many of its rows, or of its groups of inputs where these are not turned."""
        if self.reads:
            chosen = torch.randperm(self.weight.shape[1], generator=generator)[:most]
            return replace(self, weight=self.weight[:, chosen], rows=self.rows[chosen] if self.rows.ndim else self.rows)
        groups = torch.randperm(self.weight.shape[2] // PATTERN.group, generator=generator)[: most // PATTERN.group]
        chosen = (groups.unsqueeze(1) * PATTERN.group + torch.arange(PATTERN.group)).flatten()
        share = len(chosen) / self.weight.shape[2]
        return replace(
            self, weight=self.weight[:, :, chosen], inverse=self.inverse[:, :, chosen], scale=self.scale * share
        )

    def scores(self, rotation: Tensor) -> Tensor:
        """Returns the OBS scores of the weights once turned, ``[rotations, outputs, inputs]``."""
        if self.reads:
            diagonal = (rotation * (self.inverse @ rotation)).sum(1, keepdim=True)
            return (self.weight @ rotation).square() / diagonal
        return (rotation.mT @ self.weight).square() / self.inverse

    def totals(self, rotation: Tensor) -> Tensor:
        """Returns the mean over the rows of their scores' sum, weighted by ``rows``."""
        return (self.scores(rotation).sum(-1) * self.rows).mean()


def lost(scores: Tensor) -> Tensor:
    """Returns what 2:4 masks lose in each row: all but the two largest of every four scores."""
    a, b, c, d = scores.unflatten(-1, (-1, PATTERN.group)).unbind(-1)
    first, second = torch.maximum(a, b), torch.maximum(c, d)
    rest = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    kept = torch.maximum(first, second) + torch.maximum(torch.minimum(first, second), rest)
    return scores.sum(-1) - kept.sum(-1)


def entropy(parts: Sequence[Part], rotation: Tensor) -> Tensor:
    """Returns the mean entropy of the rows' normalised scores, over the parts."""
    means = []
    for part in parts:
        scores = part.scores(rotation) + 1e-30
        share = scores / scores.sum(-1, keepdim=True)
        means.append((-(share * share.log()).sum(-1) * part.rows).mean() / part.rows.mean())
    return torch.stack(means).mean()


def share_lost(parts: Sequence[Part], rotation: Tensor, together: bool = False) -> Tensor:
    """Returns the share of the scores that masks lose, as the mean over the parts or of all parts together."""
    gone, total = [], []
    for part in parts:
        scores = part.scores(rotation)
        gone.append((lost(scores) * part.rows).mean())
        total.append(torch.tensor(part.scale) if part.scale else (scores.sum(-1) * part.rows).mean())
    losses, totals = torch.stack(gone), torch.stack(total)
    return losses.sum() / totals.sum() if together else (losses / totals).mean()


def orthogonal(free: Tensor) -> Tensor:
    """Returns the orthogonal factor of the QR decomposition whose other factor has a positive diagonal."""
    rotation, triangle = torch.linalg.qr(free)
    return rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def search(parts: Sequence[Part], start: Tensor, variant: Variant, args: argparse.Namespace, seed: int) -> Tensor:
    """Returns the rotations found from ``start``, ``[rotations, size, size]``, with their columns in order."""
    generator = torch.Generator().manual_seed(seed)
    found = start
    if variant.entropy:
        found = descend(parts, found, entropy, args.entropy_steps, ENTROPY_RATE, args, generator)
    found = ordered(parts, found)
    if variant.loss:
        measure = partial(share_lost, together=variant.fisher)
        found = descend(parts, found, measure, args.loss_steps, LOSS_RATE, args, generator)
    return found


def descend(
    parts: Sequence[Part],
    start: Tensor,
    measure: Callable[[Sequence[Part], Tensor], Tensor],
    steps: int,
    rate: float,
    args: argparse.Namespace,
    generator: torch.Generator,
) -> Tensor:
    """Minimises a measure of the rotations by Adam; each step draws some parts, and some rows of each."""
    free = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=rate)
    for _ in range(steps):
        chosen = torch.randperm(len(parts), generator=generator)[: args.parts].tolist()
        loss = measure([parts[number].drawn(args.rows, generator) for number in chosen], orthogonal(free))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return orthogonal(free.detach())


def ordered(parts: Sequence[Part], rotation: Tensor) -> Tensor:
    """Returns the rotations with their columns in the heuristic order of the weights that read them."""
    readers = [part for part in parts if part.reads]
    quota, columns = max(MAX_ROWS // len(readers), 1), []
    for part in readers:
        rows = torch.linspace(0, part.weight.shape[1] - 1, min(quota, part.weight.shape[1])).long()
        scores = replace(part, weight=part.weight[:, rows]).scores(rotation)
        columns.append((scores / scores.mean((1, 2), keepdim=True)).mT)
    size = rotation.shape[-1]
    space = ChannelSpace("rotation", (size,), ())
    found = [heuristic_index(space, each, PATTERN, lambda: None) for each in torch.cat(columns, 2)]
    return torch.stack([each[:, index] for each, index in zip(rotation, found, strict=True)])


def start_of(kind: str, parts: Sequence[Part], seed: int) -> Tensor:
    """Returns the rotations that a search starts from, ``[rotations, size, size]``."""
    readers = [part for part in parts if part.reads]
    count, _, size = readers[0].weight.shape
    if kind == "random":
        return orthogonal(torch.randn(count, size, size, generator=torch.Generator().manual_seed(seed)))
    if kind == "eigenvectors":
        found = [torch.linalg.inv(part.inverse) for part in readers]
        return torch.linalg.eigh(sum(each / each.diagonal(dim1=1, dim2=2).mean() for each in found))[1]
    return torch.eye(size).repeat(count, 1, 1)
