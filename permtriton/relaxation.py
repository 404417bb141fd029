"""The learnable side of a permutation: logits of every block, their soft and hard permutations (eq. 2-6)."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from permtriton.config import LearnConfig
from permtriton.errors import CalibrationError
from permtriton.kernels.assignment import assignment_warm
from permtriton.kernels.sinkhorn import sinkhorn
from permtriton.permutation import inverse
from permtriton.plan import ChannelSpace, Site


class Relaxation(nn.Module):
    """Logits ``scale * w`` for every block of every learned space, blocks of one size batched together.

    ``scale`` is one number a space and starts at the root of the block size: with ``w`` in the range that weight decay
    and the published learning rate are made for, logits without it hardly move. ``w`` starts at
    ``(eye + noise * u) / sqrt(B)``, near the base order, or ``u / sqrt(B)``, with ``u`` uniform on (-1, 1).

    Attributes:
        sizes: of blocks, ascending.
        weights: ``w`` of each size, float32 ``[blocks, size, size]``.
        owners: int64 ``[blocks]`` for each size, on the logits' device: which space's scale a block has.
        scale: float32 ``[spaces]``.
        block_size, rounds, clamp: of the config.
    """

    def __init__(self, spaces: Sequence[ChannelSpace], config: LearnConfig, seed: int, device: torch.device) -> None:
        super().__init__()
        self.block_size, self.rounds, self.clamp = config.block_size, config.sinkhorn_rounds, config.clamp_logits
        self._spaces = list(spaces)
        self._first: dict[str, int] = {}  # name of the space -> its first unit, all spaces' units in a row
        blocks: dict[int, list[tuple[int, int]]] = {}  # size -> (number of the space, first unit)
        units = 0
        for number, space in enumerate(spaces):
            self._first[space.name] = units
            for start, size in space.blocks(config.block_size):
                blocks.setdefault(size, []).append((number, units + start))
            units += space.units
        self.sizes = sorted(blocks)
        self._places = {
            first: (place, row) for place, size in enumerate(self.sizes) for row, (_, first) in enumerate(blocks[size])
        }
        self.owners = [torch.tensor([number for number, _ in blocks[size]], device=device) for size in self.sizes]
        self._starts = [torch.tensor([[first] for _, first in blocks[size]], device=device) for size in self.sizes]
        inside = [torch.arange(size, device=device) for size in self.sizes]
        by_size = [(starts + more).flatten() for starts, more in zip(self._starts, inside, strict=True)]
        self._order = inverse(torch.cat(by_size))
        self._prices = [torch.full((len(blocks[size]), size), math.nan, device=device) for size in self.sizes]
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for size in self.sizes:
            noise = torch.rand(len(blocks[size]), size, size, generator=generator) * 2 - 1
            near = torch.eye(size) + config.start_noise * noise if config.start == "identity" else noise
            weights.append(nn.Parameter((near / size**0.5).to(device)))
        self.weights = nn.ParameterList(weights)
        largest = [max(size for _, size in space.blocks(config.block_size)) for space in spaces]
        self.scale = nn.Parameter(torch.tensor(largest, dtype=torch.float32).sqrt().to(device))

    def soft(self, tau: float) -> list[Tensor]:
        """Returns the soft permutations of each block size, ``[blocks, size, size]`` float32."""
        found = []
        for owners, weight in zip(self.owners, self.weights, strict=True):
            logits = self.scale[owners].view(-1, 1, 1) * weight
            if self.clamp:
                logits = logits.clamp(-self.clamp, self.clamp)
            found.append(sinkhorn(logits, tau, self.rounds))
        return found

    def harden(self, soft: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns space name -> unit index ``[units]``, int64 on the CPU: what `assign` finds, space by space.

        Raises:
            CalibrationError: a soft permutation is not finite.
        """
        parts = self.assign(soft).cpu().split([space.units for space in self._spaces])
        return {space.name: part - self._first[space.name] for space, part in zip(self._spaces, parts, strict=True)}

    @torch.no_grad()
    def assign(self, soft: Sequence[Tensor]) -> Tensor:
        """Returns the permutation nearest to each block's soft one, as the unit indices of all spaces in a row.

        Every search starts from the prices of the one before. The total is the best from any, but among several best
        permutations the prices may decide: on a GPU, a continued run may part from a whole one at an exact tie.

        Returns:
            int64 ``[units of all spaces]`` on the logits' device; units are numbered through all spaces.

        Raises:
            CalibrationError: a soft permutation is not finite.
        """
        found = []
        for place, (matrices, starts) in enumerate(zip(soft, self._starts, strict=True)):
            try:
                inside, self._prices[place] = assignment_warm(matrices, self._prices[place])
            except ValueError as error:  # the solver looks at every score anyway
                raise CalibrationError(
                    "the permutation logits are no longer finite: lower learning_rate or weight_decay, or raise tau_end"
                ) from error
            found.append((starts + inside).flatten())
        return torch.cat(found)[self._order]

    def join(self, indices: Mapping[str, Tensor]) -> Tensor:
        """Returns unit indices by space, as `harden` returns them, as one of all spaces, as `assign` returns it."""
        joined = torch.cat([indices[space.name] + self._first[space.name] for space in self._spaces])
        return joined.to(self._order.device)

    def blocks_of(self, site: Site) -> "SiteBlocks":
        """Returns where a site's channel blocks lie among the batched blocks."""
        return SiteBlocks(self, site)

    def position(self, space: ChannelSpace, start: int) -> tuple[int, int]:
        """Returns (place of its size, row in that batch) of the block that starts at unit ``start`` of ``space``."""
        return self._places[self._first[space.name] + start]

    def units_of(self, site: Site) -> Tensor:
        """Returns the unit of each channel of a site, int64 ``[channels]``, numbered through all spaces."""
        return (site.units + self._first[site.space.name]).to(self._order.device)


class SiteBlocks:
    """A site's blocks in channel order; tied channels (grouped queries) use their block once a copy.

    Attributes:
        sizes: of the blocks.
        runs: (place of the size in `Relaxation.sizes`, rows of that batch), one after another.
        units: int64 ``[channels]``: the unit of each channel, numbered as in `Relaxation.assign`.
    """

    def __init__(self, relaxation: Relaxation, site: Site) -> None:
        by_unit = torch.argsort(site.units, stable=True).view(site.space.units, -1)
        placed = sorted(
            (int(channel), start, size, *relaxation.position(site.space, start))
            for start, size in site.space.blocks(relaxation.block_size)
            for channel in by_unit[start]
        )
        in_a_row = torch.cat([torch.arange(start, start + size) for _, start, size, _, _ in placed])
        assert torch.equal(site.units, in_a_row), f"{site.name}: the channels of a block are apart"
        self.sizes = [size for _, _, size, _, _ in placed]
        self.runs = [(place, [row for *_, row in run]) for place, run in groupby(placed, itemgetter(3))]
        self.units = relaxation.units_of(site)
        self._rows = [(place, _slice_or_tensor(rows, self.units.device)) for place, rows in self.runs]
        self._lengths = [len(rows) * relaxation.sizes[place] ** 2 for place, rows in self.runs]

    def flat(self, soft: Sequence[Tensor]) -> Tensor:
        """Returns the blocks' matrices one after another in channel order, flat, differentiable in ``soft``.

        A view where they lie one after another already.
        """
        parts = [soft[place][rows].reshape(-1) for place, rows in self._rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_gradient(self, flat: Tensor, grads: Sequence[Tensor]) -> None:
        """Adds the gradient of what `flat` returned to those of its argument, in place.

        Autograd would make and add a gradient of all blocks for every site.
        """
        for (place, rows), part in zip(self._rows, flat.split(self._lengths), strict=True):
            grad = grads[place]
            matrices = part.view(-1, *grad.shape[1:])
            if isinstance(rows, slice):
                grad[rows].add_(matrices)
            else:
                grad.index_put_((rows,), matrices, accumulate=True)


def _slice_or_tensor(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
