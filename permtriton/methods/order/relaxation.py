"""The learned logits, and the soft and hard permutations that are computed from them (eq. 2-6)."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from permtriton.errors import CalibrationError, ModelError
from permtriton.kernels.assignment import assignment
from permtriton.kernels.sinkhorn import sinkhorn
from permtriton.passes.plan import ChannelSpace, Site
from permtriton.util.permutation import inverse


class Relaxation(nn.Module):
    """Logits ``scale * w`` for every block of every learned space; blocks of one size are one batch.

    ``scale`` is one number per space and starts at the square root of the space's largest block size: without a scale,
    logits hardly move at the published learning rate. ``w`` starts at ``(eye + noise * u) / sqrt(B)``, near the base
    order, or without ``noise`` at ``u / sqrt(B)``, with block size ``B`` and ``u`` uniform on (-1, 1).

    Attributes:
        sizes: block size of each batch, ascending.
        weights: ``w`` of each batch, float32 ``[blocks, size, size]``.
        owners: for each batch, int64 ``[blocks]`` on the logits' device: the number of the space of each block.
        spaces: the learned spaces. Their units are numbered one space after another.
        first: name of each learned space -> the number of its first unit.
    """

    def __init__(
        self,
        spaces: Sequence[ChannelSpace],
        seed: int,
        device: torch.device,
        *,
        block_size: int,
        rounds: int,
        clamp: float,
        noise: float | None,
    ) -> None:
        super().__init__()
        self.block_size, self.rounds, self.clamp = block_size, rounds, clamp
        self.spaces = list(spaces)
        self.first: dict[str, int] = {}
        blocks: dict[int, list[tuple[int, int]]] = {}  # block size -> (number of the space, first unit)
        self.units = 0
        for number, space in enumerate(spaces):
            self.first[space.name] = self.units
            for start, size in space.blocks(block_size):
                blocks.setdefault(size, []).append((number, self.units + start))
            self.units += space.units
        self.sizes = sorted(blocks)
        self._batches = {
            first: (batch, row) for batch, size in enumerate(self.sizes) for row, (_, first) in enumerate(blocks[size])
        }
        self.owners = [torch.tensor([number for number, _ in blocks[size]], device=device) for size in self.sizes]
        self._starts = [torch.tensor([[first] for _, first in blocks[size]], device=device) for size in self.sizes]
        batches = zip(self._starts, self.sizes, strict=True)
        units_by_position = [(starts + torch.arange(size, device=device)).flatten() for starts, size in batches]
        self._order = inverse(torch.cat(units_by_position))  # unit -> its position in the concatenated batches
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for size in self.sizes:
            values = torch.rand(len(blocks[size]), size, size, generator=generator) * 2 - 1
            if noise is not None:
                values = torch.eye(size) + noise * values
            weights.append(nn.Parameter((values / size**0.5).to(device)))
        self.weights = nn.ParameterList(weights)
        largest = [max(size for _, size in space.blocks(block_size)) for space in spaces]
        self.scale = nn.Parameter(torch.tensor(largest, dtype=torch.float32).sqrt().to(device))

    def soft(self, tau: float) -> list[Tensor]:
        """Returns the soft permutations of each batch, float32 ``[blocks, size, size]``."""
        batches = []
        for owners, weight in zip(self.owners, self.weights, strict=True):
            logits = self.scale[owners].view(-1, 1, 1) * weight
            if self.clamp:  # straight-through gradient, as in the published code: otherwise clamped logits stay clamped
                logits = logits + (logits.clamp(-self.clamp, self.clamp) - logits).detach()
            batches.append(sinkhorn(logits, tau, self.rounds))
        return batches

    @torch.no_grad()
    def assign(self, soft: Sequence[Tensor]) -> Tensor:
        """Returns the hard permutation nearest to each block's soft one, int64 ``[units of all spaces]``."""
        batches = []
        for matrices, starts in zip(soft, self._starts, strict=True):
            try:
                offsets = assignment(matrices)
            except ModelError as error:  # the solver checks every score, so there is no check before it
                raise CalibrationError(
                    "the permutation logits are no longer finite: lower learning_rate or weight_decay, or raise tau_end"
                ) from error
            batches.append((starts + offsets).flatten())
        return torch.cat(batches)[self._order]

    def by_space(self, index: Tensor) -> dict[str, Tensor]:
        """Splits an index as from `assign`: returns space name -> unit index, int64 ``[units]`` on the CPU."""
        parts = index.cpu().split([space.units for space in self.spaces])
        return {space.name: part - self.first[space.name] for space, part in zip(self.spaces, parts, strict=True)}

    def position(self, space: ChannelSpace, start: int) -> tuple[int, int]:
        """Returns (batch, row in the batch) of the block that starts at unit ``start`` of ``space``."""
        return self._batches[self.first[space.name] + start]


class SiteBlocks:
    """A site's blocks in channel order, and where they are in the batches of a relaxation.

    Under grouped-query attention, a block appears once per query head that shares it.
    """

    def __init__(self, relaxation: Relaxation, site: Site) -> None:
        # For each block: its first channel, its first unit, its size, and the position of its logits in the batches.
        blocks = sorted(
            (int(channel), start, size, *relaxation.position(site.space, start))
            for start, size in site.space.blocks(relaxation.block_size)
            for channel in site.channels_by_unit[start]
        )
        self.sizes = [size for _, _, size, _, _ in blocks]  # size of each block
        units = torch.cat([torch.arange(start, start + size) for _, start, size, _, _ in blocks])
        assert torch.equal(site.units, units), f"{site.name}: the channels of a block are apart"
        self._units = (site.units + relaxation.first[site.space.name]).to(relaxation.scale.device)
        # Constant inside a block: its channels move as its units do.
        self._shift = torch.arange(site.channels, device=self._units.device) - self._units
        runs = [(batch, [row for *_, row in run]) for batch, run in groupby(blocks, itemgetter(3))]
        self._rows = [(batch, _slice_or_tensor(rows, self._units.device)) for batch, rows in runs]
        self._lengths = [len(rows) * relaxation.sizes[batch] ** 2 for batch, rows in runs]

    def order(self, index: Tensor) -> Tensor:
        """Returns the index over the site's channels for one over the units of all spaces (`Relaxation.assign`)."""
        return index[self._units] + self._shift

    def flat(self, soft: Sequence[Tensor]) -> Tensor:
        """Returns the blocks' matrices in channel order, float32 ``[sum of sizes^2]``, differentiable in ``soft``.

        The result is a view where the matrices are consecutive in ``soft`` already.
        """
        parts = [soft[batch][rows].reshape(-1) for batch, rows in self._rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_gradient(self, flat: Tensor, grads: Sequence[Tensor]) -> None:
        """Adds ``flat``, the gradient of what `flat` returned, to ``grads``, the gradients of ``soft``, in place.

        Autograd would instead allocate a gradient of all blocks for every site.
        """
        for (batch, rows), part in zip(self._rows, flat.split(self._lengths), strict=True):
            grad = grads[batch]
            matrices = part.view(-1, *grad.shape[1:])
            if isinstance(rows, slice):
                grad[rows].add_(matrices)
            else:
                grad.index_put_((rows,), matrices, accumulate=True)


def _slice_or_tensor(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
