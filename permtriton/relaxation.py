"""The learnable side of a permutation: logits of every block, their soft and hard permutations (eq. 2-6)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from permtriton.config import LearnConfig
from permtriton.errors import CalibrationError
from permtriton.kernels.assignment import assignment
from permtriton.kernels.sinkhorn import sinkhorn
from permtriton.permutation import identity
from permtriton.plan import ChannelSpace, Site


class Relaxation(nn.Module):
    """Logits ``scale * w`` for every block of every learned space, blocks of one size batched together.

    ``scale`` is one number a space and starts at the root of the block size: with ``w`` in the range that weight decay
    and the published learning rate are made for, logits without it hardly move. ``w`` starts at
    ``(eye + noise * u) / sqrt(B)``, near the base order, or ``u / sqrt(B)``, with ``u`` uniform on (-1, 1).

    Attributes:
        sizes: of blocks, ascending.
        weights: ``w`` of each size, float32 ``[blocks, size, size]``.
        owners: int64 ``[blocks]`` for each size: which space's scale a block has.
        scale: float32 ``[spaces]``.
        block_size, rounds, clamp: of the config.
    """

    def __init__(self, spaces: Sequence[ChannelSpace], config: LearnConfig, seed: int, device: torch.device) -> None:
        super().__init__()
        self.block_size, self.rounds, self.clamp = config.block_size, config.sinkhorn_rounds, config.clamp_logits
        self._spaces = list(spaces)
        self._blocks: dict[int, list[tuple[int, int]]] = {}  # size -> (number of the space, first unit)
        for number, space in enumerate(spaces):
            for start, size in space.blocks(config.block_size):
                self._blocks.setdefault(size, []).append((number, start))
        self.sizes = sorted(self._blocks)
        self._places = {
            (self._spaces[number].name, start): (place, row)
            for place, size in enumerate(self.sizes)
            for row, (number, start) in enumerate(self._blocks[size])
        }
        self.owners = [torch.tensor([number for number, _ in self._blocks[size]]) for size in self.sizes]
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for size in self.sizes:
            noise = torch.rand(len(self._blocks[size]), size, size, generator=generator) * 2 - 1
            near = torch.eye(size) + config.start_noise * noise if config.start == "identity" else noise
            weights.append(nn.Parameter((near / size**0.5).to(device)))
        self.weights = nn.ParameterList(weights)
        largest = [max(size for _, size in space.blocks(config.block_size)) for space in spaces]
        self.scale = nn.Parameter(torch.tensor(largest, dtype=torch.float32).sqrt().to(device))

    def soft(self, tau: float) -> list[Tensor]:
        """Returns the soft permutations of each block size, ``[blocks, size, size]`` float32."""
        found = []
        for owners, weight in zip(self.owners, self.weights, strict=True):
            logits = self.scale[owners.to(weight.device)].view(-1, 1, 1) * weight
            if self.clamp:
                logits = logits.clamp(-self.clamp, self.clamp)
            found.append(sinkhorn(logits, tau, self.rounds))
        return found

    @torch.no_grad()
    def harden(self, soft: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns space name -> unit index ``[units]``: the permutation nearest to each block's soft one.

        Raises:
            CalibrationError: a soft permutation is not finite.
        """
        indices = {space.name: identity(space.units) for space in self._spaces}
        for size, matrices in zip(self.sizes, soft, strict=True):
            if not bool(matrices.isfinite().all()):
                raise CalibrationError(
                    "the permutation logits are no longer finite: lower learning_rate or weight_decay, or raise tau_end"
                )
            chosen = assignment(matrices).cpu().long()
            for (number, start), inside in zip(self._blocks[size], chosen, strict=True):
                indices[self._spaces[number].name][start : start + size] = start + inside
        return indices

    def blocks_of(self, site: Site) -> "SiteBlocks":
        """Returns where a site's channel blocks lie among the batched blocks."""
        return SiteBlocks(self, site)

    def position(self, space: ChannelSpace, start: int) -> tuple[int, int]:
        """Returns (place of its size, row in that batch) of the block that starts at unit ``start`` of ``space``."""
        return self._places[space.name, start]


class SiteBlocks:
    """A site's blocks in channel order; tied channels (grouped queries) use their block once a copy.

    Attributes:
        sizes: of the blocks.
        runs: (place of the size in `Relaxation.sizes`, rows of that batch), one after another.
    """

    def __init__(self, relaxation: Relaxation, site: Site) -> None:
        by_unit = torch.argsort(site.units, stable=True).view(site.space.units, -1)
        placed = []
        for start, size in site.space.blocks(relaxation.block_size):
            batch, row = relaxation.position(site.space, start)
            placed += [(int(channel), size, batch, row) for channel in by_unit[start]]
        placed.sort()
        self.sizes = [size for _, size, _, _ in placed]
        self.runs: list[tuple[int, list[int]]] = []
        for _, _, place, row in placed:
            if not self.runs or self.runs[-1][0] != place:
                self.runs.append((place, []))
            self.runs[-1][1].append(row)

    def flat(self, soft: Sequence[Tensor]) -> Tensor:
        """Returns the blocks' matrices one after another in channel order, flat, differentiable in ``soft``."""
        return torch.cat([soft[place][rows].reshape(-1) for place, rows in self.runs])
