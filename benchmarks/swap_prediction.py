"""How well gradients predict what single swaps do to the loss, on the embedded demo model.

    python -m benchmarks.swap_prediction --swaps 100 --layout portable
    python -m benchmarks.swap_prediction learned --swaps 100 --layout fused

Swaps are drawn at random from all pairs of every space, half of them among the best partners that a round of the search
would choose from. Each is applied alone, and the loss over all calibration sequences is measured. One JSON line is
printed: the rank correlation (Spearman) of gain and true fall of the loss, and the median of true over predicted.

With ``learned``, the gains are those of the gradients that learning hands to its permutations: random swaps inside
blocks of 64, the loss that learning minimises, and beside the correlation the share of swaps whose sign is right, and
of those that are predicted to lower the loss.
"""

import argparse
import json
import math
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.known_run import Known
from benchmarks.shared import find_plan
from permtriton.data.calibration import calibration_samples
from permtriton.data.samples import Samples
from permtriton.demo import FOLDER
from permtriton.kernels.nm_mask import nm_mask_backward
from permtriton.kernels.swap_gains import swap_gains
from permtriton.methods.measure.fisher import curvatures
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.losses import ObjectiveKind, dense_objective
from permtriton.methods.measure.statistics import site_statistics
from permtriton.methods.order.hard_masks import HardMasks, hard_masked
from permtriton.methods.order.searched import Searcher
from permtriton.model.load import load_original
from permtriton.model.source import Source
from permtriton.passes.plan import ChannelSpace
from permtriton.recipe import config_from
from permtriton.running.layer_walk import LayerWalk
from permtriton.util.machine import device_name, versions
from permtriton.util.permutation import identity
from permtriton.util.progress import NoProgress

BLOCK = 64
Pair = tuple[int, int, int]  # number of the space, position, position


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="searched", choices=["searched", "learned"])
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences")
    parser.add_argument("--layout", default="portable", choices=["portable", "fused"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = config_from({"layout": args.layout, "seed": args.seed, "samples": args.samples}, model="demo")
    model, tokenizer = load_original(Source(str(FOLDER)))
    ids = calibration_samples(config, tokenizer, model)[0].inputs["input_ids"]
    plan = find_plan(model, config.sparsity, layout=args.layout)
    statistics_of = site_statistics(LayerWalk(model, plan, Samples.of(ids), 16), config.importance, NoProgress())
    importances = importances_of(model, plan, config.importance, statistics_of)
    kind: ObjectiveKind = "cosine" if args.what == "learned" else "kl"
    objective = dense_objective(model, kind, Samples.of(ids), 16)
    run = Known(model, plan, Samples.of(ids), config, importances=importances)
    spaces = [space for space in plan.spaces if not space.frozen]
    with hard_masked(run, model, objective, curvatures(run, kind)) as masks:
        searcher = Searcher(masks, spaces)
        base = {space.name: identity(space.units) for space in spaces}
        masks.set(base)
        start = masks.take_gradients()
        trial = Trial(masks, searcher, spaces, base, start)
        report = (_learned if args.what == "learned" else _searched)(trial, args.swaps, args.seed)
    print(json.dumps({
        **report, "loss": round(start, 4), "objective": kind, "layout": args.layout, "seed": args.seed,
        "samples": args.samples, "device": device_name(model.device), "system": platform.platform(),
        "versions": versions(),
    }))  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """The masked model in its base order, its loss there, and what swaps are measured with."""

    masks: HardMasks
    searcher: Searcher
    spaces: list[ChannelSpace]
    base: dict[str, Tensor]
    start: float

    def falls(self, pairs: list[Pair]) -> list[float]:
        """Returns the true fall of the loss by each swap."""
        found = [self.start - self.searcher.loss(_swap(self.spaces, self.base, *pair)) for pair in pairs]
        self.masks.set(self.base)
        return found


def _searched(trial: Trial, count: int, seed: int) -> dict[str, Any]:
    report = {}
    for damping in (0.0, 1.0):
        pairs = _draw(trial, damping, count, seed)
        gains = [_gain(trial, pair, damping) for pair in pairs]
        falls = trial.falls(pairs)
        report[f"damping {damping:g}"] = {
            **_correlation(gains, falls),
            "median_true_over_predicted": round(
                statistics.median(fall / gain for fall, gain in zip(falls, gains, strict=True) if gain), 3
            ),
        }
    return report


def _learned(trial: Trial, count: int, seed: int) -> dict[str, Any]:
    """All gradients of the same swaps."""
    pairs = _draw(trial, None, count, seed)
    falls = trial.falls(pairs)
    found = {
        "published": [_published(trial, pair) for pair in pairs],
        "placement without curvature": [_gain(trial, pair, 0.0) for pair in pairs],
        "placement": [_gain(trial, pair, 1.0) for pair in pairs],
    }
    report: dict[str, Any] = {"share_that_falls": _share(fall > 0 for fall in falls)}
    for name, gains in found.items():
        right = ((gain > 0) == (fall > 0) for gain, fall in zip(gains, falls, strict=True))
        falling = _share(gain > 0 for gain in gains)
        report[name] = {**_correlation(gains, falls), "sign_right": _share(right), "predicted_to_fall": falling}
    return report


def _correlation(gains: list[float], falls: list[float]) -> dict[str, Any]:
    return {"rank_correlation": round(float(spearmanr(gains, falls).statistic), 3), "swaps": len(gains)}


def _share(true: Iterable[bool]) -> float:
    return round(statistics.fmean(true), 3)


def _draw(trial: Trial, damping: float | None, count: int, seed: int) -> list[Pair]:
    """Returns half random swaps and half of the best ones; without a damping, random swaps inside blocks."""
    generator = torch.Generator().manual_seed(seed)
    pairs: list[Pair] = []
    if damping is not None:
        swaps = trial.searcher.swaps(trial.base, damping)
        best = [
            (number, left, right)
            for number, space in enumerate(trial.spaces)
            for left, right in zip(*(positions.tolist() for positions in swaps[space.name][:2]), strict=True)
        ]
        pairs += [best[row] for row in torch.randperm(len(best), generator=generator)[: count // 2].tolist()]
    while len(pairs) < count:
        number = int(torch.randint(len(trial.spaces), (), generator=generator))
        space = trial.spaces[number]
        runs = space.spans if damping is not None else space.blocks(BLOCK)
        start, size = list(runs)[int(torch.randint(len(list(runs)), (), generator=generator))]
        left, right = (start + torch.randperm(size, generator=generator)[:2]).tolist()
        if left // space.group_units != right // space.group_units:
            pairs.append((number, left, right))
    return pairs


def _gain(trial: Trial, pair: Pair, damping: float) -> float:
    number, *positions = pair
    terms = trial.masks.terms(trial.spaces[number], trial.base, damping)
    one, other = map(torch.tensor, ([position] for position in positions))
    return math.fsum(float(swap_gains(t.of_positions(one), t.of_positions(other))) for t in terms)


def _published(trial: Trial, pair: Pair) -> float:
    """Returns the fall of the loss that the published gradient of the permutation predicts."""
    number, *positions = pair
    fall = 0.0
    for linear in trial.masks._linears:
        if linear.site.space is not trial.spaces[number]:
            continue
        given = (linear.total, linear.dense, linear.importance)
        blocks = [size for _, size in linear.site.space.blocks(BLOCK)] * linear.site.copies
        index = torch.arange(linear.site.channels)
        flat = nm_mask_backward(*given, index, blocks, linear.pattern.group)
        matrix = torch.block_diag(
            *(part.view(size, size) for part, size in zip(flat.split([s * s for s in blocks]), blocks, strict=True))
        )
        for i, j in zip(*(linear.site.channels_by_unit[position].tolist() for position in positions), strict=True):
            fall += float(matrix[i, i] + matrix[j, j] - matrix[i, j] - matrix[j, i])
    return fall


def _swap(spaces: list[ChannelSpace], base: dict[str, Tensor], number: int, left: int, right: int) -> dict[str, Tensor]:
    index = base[spaces[number].name].clone()
    index[left], index[right] = index[right].item(), index[left].item()
    return {**base, spaces[number].name: index}


if __name__ == "__main__":
    main()
