"""Rotations of attention values: which directions of a head, once they are channels, leave little for masks to lose?

Between the projection that computes the values of attention and the one that reads all heads, the channels of a head
pass through sums over tokens alone. So each head's values may be turned by an orthogonal matrix R (``W_v <- R^T W_v``,
``W_o <- W_o R``) and the model computes what it did, at no cost at run time. With the Hessians ``H_o`` and ``H_v`` of
the inputs of both, the scores of `permtriton.methods.obs` become

    S_o = (W_o R)^2 / diag(R^T H_o^-1 R),    S_v = (R^T W_v)^2 / diag(H_v^-1)

R = QR(A) is found per layer by Adam on A: first on the entropy of each row of scores (DenoiseRotator,
arXiv 2505.23049, whose rotations stay in the model), then, with the columns of R in the heuristic order, on the share
of the scores that N:M masks lose, of both linears. Query heads that share a value head share its rotation.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from permtriton import ranks
from permtriton.methods.heuristic_order import MAX_ROWS, two_stages
from permtriton.methods.importance import inverts_hessians, reads_activations
from permtriton.methods.obs import inverse_of
from permtriton.methods.statistics import hessians
from permtriton.model.apply import apply_edits
from permtriton.model.edits import rotations_of
from permtriton.model.plan import Axis, ChannelSpace, Placement, Plan, Site, linear_module, weight_in_out
from permtriton.passes.linear_paths import passes_linearly
from permtriton.progress import Advance
from permtriton.run import Run
from permtriton.running.layer_inputs import layer_by_layer
from permtriton.sparsity import NMPattern
from permtriton.step import Outcome

ENTROPY_RATE, LOSS_RATE = 0.01, 0.003  # learning rates of Adam
ROWS = 256  # of each linear that a step draws
TINY = 1e-30


@dataclass(frozen=True)
class Moments:
    """What is known of the inputs of a site that reads attention values, or that their writers read.

    Attributes:
        diagonal: ``diag(H^-1)``, float32 ``[channels]``.
        blocks: the channels of each head, int64 ``[heads, copies, size]``; None if the site reads no values.
        inverse: the blocks of ``H^-1``, float32 ``[heads, copies, size, size]``.
        gram: the same of ``H``, not damped.
    """

    diagonal: Tensor
    blocks: Tensor | None = None
    inverse: Tensor | None = None
    gram: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The weight of a linear that reads or writes the values, with what its scores are divided by.

    Attributes:
        weight: float32 ``[heads, copies, outputs, size]`` of a reader, ``[heads, copies, size, inputs]`` of a writer.
        inverse: blocks of ``H^-1`` of a reader's inputs, ``[heads, copies, size, size]``; of a writer's inputs
            ``diag(H^-1)``, ``[inputs]``.
        pattern: of the linear's mask.
        reads: whether it reads the values.
    """

    weight: Tensor
    inverse: Tensor
    pattern: NMPattern
    reads: bool

    def drawn(self, generator: torch.Generator) -> "Scored":
        """Returns at most `ROWS` of a reader's outputs, or of a writer's inputs, in whole groups."""
        if self.reads:
            chosen = torch.randperm(self.weight.shape[2], generator=generator)[:ROWS].to(self.weight.device)
            return replace(self, weight=self.weight[:, :, chosen])
        size = self.pattern.group
        groups = torch.randperm(self.weight.shape[3] // size, generator=generator)[: max(ROWS // size, 1)]
        chosen = (groups.unsqueeze(1) * size + torch.arange(size)).flatten().to(self.weight.device)
        return replace(self, weight=self.weight[..., chosen], inverse=self.inverse[chosen])

    def scores(self, rotation: Tensor) -> Tensor:
        """Returns the scores of the weights turned by ``rotation``, ``[heads, 1, size, size]``."""
        if self.reads:
            return (self.weight @ rotation).square() / (rotation * (self.inverse @ rotation)).sum(2, keepdim=True)
        return (rotation.mT @ self.weight).square() / self.inverse


def rotate_values(run: Run, entropy_steps: int, loss_steps: int) -> Outcome:
    """Rotates the values of attention in the model of a run, and its statistics; returns what to report.

    Raises:
        CalibrationError: an activation is NaN or infinite, or a Hessian cannot be inverted.
        VerificationError: the outputs changed.
    """
    spaces = [space for space in run.plan.spaces if may_turn(run.graph, run.plan, space)]
    if not spaces:
        run.progress.say("rotate: this model has no attention values that may be rotated; nothing was changed")
        return Outcome()
    share = ranks.own_rows(len(run.samples)).numel()
    with run.progress.stage("rotate", share * len(run.plan.layers()) + len(ranks.dealt(spaces))) as advance:
        moments = _moments(run, spaces, advance)

        def find(space: ChannelSpace) -> tuple[Tensor, dict[str, Any]]:
            started = time.perf_counter()
            scored = [*_readers(run, space, moments), *_writers(run, space, moments)]
            rotation, before, after = searched(scored, entropy_steps, loss_steps, run.config.seed)
            advance()
            seconds = time.perf_counter() - started
            return rotation.cpu(), {"name": space.name, "start": before, "end": after, "seconds": seconds}

        found = ranks.deal(spaces, find)
    for space, (rotation, _) in zip(spaces, found, strict=True):
        apply_edits(run.model, rotations_of(space, rotation))
        for site in run.plan.sites_of(space) if run.statistics else ():
            _turn_statistic(run, site, rotation, moments[site.name])
    run.difference = max(run.difference, run.reference.check(run.model, "after rotating the values of attention"))
    return Outcome(parts=[part for _, part in found])


def may_turn(graph: fx.GraphModule, plan: Plan, space: ChannelSpace) -> bool:
    """Whether a space is heads of one size, whose channels reach all that reads them by linear operators alone."""
    if space.placement is not Placement.FOLDED or not plan.sites_of(space) or len(set(space.segments)) != 1:
        return False
    if any(axis.blocks(space.units, space.segments[0]) is None for axis in space.axes):
        return False
    return passes_linearly(graph, space)


def searched(scored: Sequence[Scored], entropy_steps: int, loss_steps: int, seed: int) -> tuple[Tensor, float, float]:
    """Finds the rotations of one space.

    Args:
        scored: what reads and what writes its values, readers first.
        seed: of the rows that are drawn.

    Returns:
        The rotations, float64 ``[heads, size, size]``, and the share of the scores that masks lose before, in the
        heuristic order, and after. Where a search gains nothing, they are identities.
    """
    heads, _, _, size = scored[0].weight.shape
    generator = torch.Generator().manual_seed(seed)
    start = torch.eye(size, device=scored[0].weight.device).expand(heads, 1, size, size)
    found = ordered(scored, descend(scored, start, entropy, entropy_steps, ENTROPY_RATE, generator))
    found = descend(scored, found, share_lost, loss_steps, LOSS_RATE, generator)
    before, after = float(share_lost(scored, ordered(scored, start))), float(share_lost(scored, found))
    if not after < before:
        found, after = start, before
    return orthogonal(found.squeeze(1).double()), before, after


@torch.enable_grad()
def descend(
    scored: Sequence[Scored],
    start: Tensor,
    measure: Callable[[Sequence[Scored], Tensor], Tensor],
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> Tensor:
    """Minimises a measure of rotations by Adam, from ``start``; each step draws some rows of each linear."""
    free = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=rate)
    for _ in range(steps):
        loss = measure([each.drawn(generator) for each in scored], orthogonal(free))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return orthogonal(free.detach())


def entropy(scored: Sequence[Scored], rotation: Tensor) -> Tensor:
    """Returns the mean entropy of the rows' scores, each row divided by its sum, over the linears."""
    means = []
    for each in scored:
        scores = each.scores(rotation) + TINY
        share = scores / scores.sum(-1, keepdim=True)
        means.append(-(share * share.log()).sum(-1).mean())
    return torch.stack(means).mean()


def share_lost(scored: Sequence[Scored], rotation: Tensor) -> Tensor:
    """Returns the share of the scores that masks lose, as the mean over the linears."""
    shares = []
    for each in scored:
        scores = each.scores(rotation)
        kept = _kept(list(scores.unflatten(-1, (-1, each.pattern.group)).unbind(-1)), each.pattern.kept)
        shares.append(1 - kept.sum() / scores.sum())
    return torch.stack(shares).mean()


def _kept(values: list[Tensor], count: int) -> Tensor:
    """Returns, element by element, the sum of the ``count`` largest values, by maxima and minima, as bubble sort does.

    Of a few large tensors, these are much faster than ``torch.topk`` over short rows.
    """
    total = torch.zeros_like(values[0])
    for _ in range(count):
        highest, rest = values[0], []
        for value in values[1:]:
            rest.append(torch.minimum(highest, value))
            highest = torch.maximum(highest, value)
        total, values = total + highest, rest
    return total


def orthogonal(free: Tensor) -> Tensor:
    """Returns the orthogonal factor of the QR decomposition whose other factor has a positive diagonal."""
    rotation, triangle = torch.linalg.qr(free)
    return rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


@torch.no_grad()
def ordered(scored: Sequence[Scored], rotation: Tensor) -> Tensor:
    """Returns rotations ``[heads, 1, size, size]`` with their columns in the heuristic order of the readers."""
    readers = [each for each in scored if each.reads]
    if not readers:
        return rotation
    quota, rows = max(MAX_ROWS // sum(each.weight.shape[1] for each in readers), 1), []
    for each in readers:
        chosen = torch.linspace(0, each.weight.shape[2] - 1, min(quota, each.weight.shape[2])).long()
        scores = replace(each, weight=each.weight[:, :, chosen.to(rotation.device)]).scores(rotation).flatten(1, 2)
        rows.append((scores / scores.mean((1, 2), keepdim=True)).mT)
    columns = [two_stages(each, readers[0].pattern) for each in torch.cat(rows, 2)]
    return torch.stack([each[..., index] for each, index in zip(rotation, columns, strict=True)])


def _moments(run: Run, spaces: Sequence[ChannelSpace], advance: Advance) -> dict[str, Moments]:
    """Returns site name -> what is known of the inputs of the readers of the values, and of those of their writers."""
    reads = {site.name: space for space in spaces for site in run.plan.sites_of(space)}
    writers = {axis.parameter for space in spaces for axis in space.producers}
    found: dict[str, Moments] = {}
    for layer in layer_by_layer(run.model, run.plan, run.samples, run.batch, changing=False, empty=run.empty):
        sites = [s for s in layer.sites if s.name in reads or any(f"{name}.weight" in writers for name in s.linears)]
        if layer.may_end and not sites:
            continue
        measured = hessians(run.model, replace(layer, sites=sites), advance)
        for site in sites:
            hessian = measured.pop(site.name)
            inverse = inverse_of(hessian, site.name)
            known = Moments(inverse.diagonal().clone())
            if site.name in reads:
                blocks = _blocks(site).to(inverse.device)
                pairs = blocks.unsqueeze(3), blocks.unsqueeze(2)
                known = replace(known, blocks=blocks, inverse=inverse[pairs], gram=hessian[pairs])
            found[site.name] = known
    return found


def _blocks(site: Site) -> Tensor:
    axis = Axis("", 0, site.units, torch.zeros_like(site.units), reads=True)
    blocks = axis.blocks(site.space.units, site.space.segments[0])
    assert blocks is not None, site.name
    return blocks


def _readers(run: Run, space: ChannelSpace, moments: dict[str, Moments]) -> Iterator[Scored]:
    for site in run.plan.sites_of(space):
        known = moments[site.name]
        assert known.blocks is not None
        assert known.inverse is not None
        for name in site.linears:
            weight = weight_in_out(linear_module(run.model, name)).float()[known.blocks]
            yield Scored(weight.mT.contiguous(), known.inverse, run.plan.patterns[name], True)


def _writers(run: Run, space: ChannelSpace, moments: dict[str, Moments]) -> Iterator[Scored]:
    """Yields the linears that write the values, as far as they are pruned."""
    axes = {axis.parameter: axis for axis in space.producers}
    for site, name in run.plan.linears():
        if axis := axes.get(f"{name}.weight"):
            blocks = axis.blocks(space.units, space.segments[0])
            assert blocks is not None, name
            weight = weight_in_out(linear_module(run.model, name)).float().T
            inverse = moments[site.name].diagonal
            yield Scored(weight[blocks.to(weight.device)], inverse, run.plan.patterns[name], False)


def _turn_statistic(run: Run, site: Site, rotation: Tensor, known: Moments) -> None:
    """Makes the statistic of a site that of its turned inputs."""
    method = run.config.importance
    if not reads_activations(method):
        return
    matrix = known.inverse if inverts_hessians(method) else known.gram
    assert matrix is not None
    assert known.blocks is not None
    turned = rotation.to(matrix).unsqueeze(1)
    values = (turned * (matrix @ turned)).sum(2)
    statistic = run.statistics[site.name].clone()
    statistic[known.blocks] = values if inverts_hessians(method) else (values / len(run.samples)).sqrt()
    run.statistics[site.name] = statistic
