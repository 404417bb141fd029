"""How well the gains of single swaps predict the true change of the loss, on the embedded demo model.

Swaps are drawn at random from all pairs of every space, half of them among the best partners that a round would choose
from. Each is applied alone, and the loss over all calibration sequences is measured. One JSON line is printed: the rank
correlation (Spearman) of gain and true fall of the loss, and the median of true over predicted.

    python benchmarks/swap_prediction.py --swaps 100 --layout portable
"""

import argparse
import json
import math
import platform
import statistics

import torch
from scipy.stats import spearmanr
from torch import Tensor

from permtriton import find_plan
from permtriton.data.samples import Samples
from permtriton.data.text import calibration_ids
from permtriton.demo import FOLDER
from permtriton.kernels.swap_gains import swap_gains
from permtriton.methods.measure.fisher import fisher_information
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.objective import dense_objective
from permtriton.methods.measure.statistics import site_statistics
from permtriton.methods.order.hard_masks import HardMasks, hard_masked
from permtriton.methods.order.searched import Searched
from permtriton.methods.order.swap_search import Searcher, Swaps
from permtriton.model.load import load_original
from permtriton.model.source import Source
from permtriton.passes.plan import ChannelSpace
from permtriton.recipe import config_from
from permtriton.util.machine import device_name, versions
from permtriton.util.permutation import identity
from permtriton.util.progress import NoProgress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--layout", default="portable", choices=["portable", "fused"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = config_from({"layout": args.layout, "seed": args.seed}, model="demo")
    model, tokenizer = load_original(Source(str(FOLDER)))
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    ids = calibration_ids(config.calibration, tokenizer, vocabulary, args.seed)
    plan = find_plan(model, config.sparsity, layout=args.layout)
    statistics_of = site_statistics(model, plan, config.importance, Samples.of(ids), 16, NoProgress())
    importances = importances_of(model, plan, config.importance, statistics_of)
    objective = dense_objective(model, "kl", Samples.of(ids), 16)
    fisher = fisher_information(model, plan, "kl", Samples.of(ids), config, NoProgress())
    spaces = [space for space in plan.spaces if not space.frozen]
    with hard_masked(model, plan, importances, fisher, config) as masks:
        searcher = Searcher(masks, spaces, Samples.of(ids), objective, Searched())
        base = {space.name: identity(space.units) for space in spaces}
        masks.set(base)
        start = masks.take_gradients(objective, Samples.of(ids))
        report = {}
        for damping in (0.0, 1.0):
            pairs = _draw(searcher, spaces, base, damping, args.swaps, args.seed, config.sparsity.group)
            gains = [_gain(masks, spaces[space], base, left, right, damping, ids) for space, left, right in pairs]
            falls = [start - searcher.loss(_swap(spaces, base, *pair)) for pair in pairs]
            masks.set(base)
            report[f"damping {damping:g}"] = {
                "rank_correlation": round(float(spearmanr(gains, falls).statistic), 3),
                "median_true_over_predicted": round(
                    statistics.median(fall / gain for fall, gain in zip(falls, gains, strict=True) if gain), 3
                ),
                "swaps": len(pairs),
            }
    print(json.dumps({
        **report, "loss": round(start, 4), "layout": args.layout, "seed": args.seed,
        "device": device_name(model.device), "system": platform.platform(), "versions": versions(),
    }))  # fmt: skip


def _draw(searcher: Searcher, spaces: list[ChannelSpace], base: dict[str, Tensor], damping: float, count: int,
          seed: int, group: int) -> list[tuple[int, int, int]]:  # fmt: skip
    """Returns (number of the space, position, position) of half random swaps and half of the best ones."""
    generator = torch.Generator().manual_seed(seed)
    best: Swaps = searcher.swaps(base, damping)
    rows = torch.randperm(best.count, generator=generator)[: count // 2].tolist()
    pairs = [(int(best.space[row]), int(best.left[row]), int(best.right[row])) for row in rows]
    while len(pairs) < count:
        number = int(torch.randint(len(spaces), (), generator=generator))
        segment = int(torch.randint(len(spaces[number].segments), (), generator=generator))
        start, size = sum(spaces[number].segments[:segment]), spaces[number].segments[segment]
        left, right = (start + torch.randperm(size, generator=generator)[:2]).tolist()
        if left // group != right // group:
            pairs.append((number, left, right))
    return pairs


def _gain(masks: HardMasks, space: ChannelSpace, base: dict[str, Tensor], left: int, right: int, damping: float,
          ids: Tensor) -> float:  # fmt: skip
    terms = masks.terms(space, base, damping, ids.numel())
    one, other = torch.tensor([left]), torch.tensor([right])
    return math.fsum(float(swap_gains(t.of_positions(one), t.of_positions(other))) for t in terms)


def _swap(spaces: list[ChannelSpace], base: dict[str, Tensor], number: int, left: int, right: int) -> dict[str, Tensor]:
    index = base[spaces[number].name].clone()
    index[left], index[right] = index[right].item(), index[left].item()
    return {**base, spaces[number].name: index}


if __name__ == "__main__":
    main()
