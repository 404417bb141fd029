"""What each stage of a compilation does, counted from a model's plan. `scaling.py` measures and projects with it.

A piece of work is a Counter of the kinds of `KINDS`. Divided by a machine's rates, it gives seconds. The times of all
kinds are added: nothing is assumed to run beside something else.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from permtriton import NMPattern
from permtriton.config import CompileConfig
from permtriton.forecast import SWEEPS, TRIALS
from permtriton.methods import obs as solver
from permtriton.methods.heuristic_order import MAX_ROWS, MOST_GROUPS
from permtriton.methods.swap_search import GAINS_AT_ONCE
from permtriton.model.plan import Plan, linear_module, weight_in_out

KINDS = {
    "products": "operations of matrix products in the model's dtype",
    "wide": "operations of matrix products in float32",
    "factors": "operations of Cholesky factors and inverses",
    "moved": "bytes that elementwise operators read and write",
    "distances": "absolute differences in the heuristic",
    "searched": "search steps of the heuristic's assignments, 4 per group",
    "gains": "pairs of channels x rows of swap gains",
    "operators": "small operators, each waiting for the one before",
    "summed": "bytes that each GPU sends to add tensors up or to hand them on",
    "joined": "bytes of activations that CPUs send each other",
    "gathered": "bytes of sharded weights that each GPU receives",
}
FLOAT32 = 4
MASK_PASSES = 2  # over a weight, for one mask: it is read, and the masked weight is written

Work = Counter[str]
Linear = tuple[int, int]  # input channels and rows


def work(**kinds: float) -> Work:
    """Returns a piece of work."""
    assert kinds.keys() <= KINDS.keys()
    return Counter(kinds)  # type: ignore[arg-type]


def times(count: float, one: Work) -> Work:
    """Returns ``count`` times a piece of work."""
    return Counter({kind: count * amount for kind, amount in one.items()})  # type: ignore[misc]


def total(parts: Sequence[Work]) -> Work:
    """Returns the sum of pieces of work."""
    return sum(parts, Counter())


def seconds(done: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Returns the time of a piece of work at a machine's rates, per second."""
    return sum(amount / rates[kind] for kind, amount in done.items())


@dataclass(frozen=True)
class Stage:
    """The work of one stage.

    Attributes:
        split: what is proportional to the number of sequences, of which each rank has its share.
        whole: what every rank does.
        dealt: rounds of items, of which each rank does every N-th, as `permtriton.ranks.deal` does.
        sums: bytes of the tensors that are added up over ranks.
        sent: bytes of the tensors that one rank sends to all.
        joined: bytes of the activations that every rank gets of all sequences, over the CPUs.
        passes: passes over all sequences, each of which needs all weights once per micro-batch.
        trains: whether a micro-batch is the config's, not `TOKENS_WITHOUT_LOGITS` tokens.
    """

    split: Work = field(default_factory=Counter)
    whole: Work = field(default_factory=Counter)
    dealt: Sequence[Sequence[Work]] = ()
    sums: float = 0
    sent: float = 0
    joined: float = 0
    passes: float = 0
    trains: bool = False

    def alone(self) -> Work:
        """Returns the work of one rank without others."""
        return self.split + self.whole + total([item for items in self.dealt for item in items])

    def on_ranks(self, ranks: int, rates: Mapping[str, float]) -> Work:
        """Returns the work of one rank of several; where items are dealt, that of the slowest at each round."""
        others = (ranks - 1) / ranks
        found = times(1 / ranks, self.split) + self.whole
        for items in self.dealt:
            shares = [total(items[rank::ranks]) for rank in range(ranks)]
            found += max(shares, key=lambda share: seconds(share, rates))
        return found + work(summed=others * (2 * self.sums + self.sent), joined=others * self.joined)


@dataclass(frozen=True)
class Sizes:
    """What the work follows from.

    Attributes:
        sequences, length: of the calibration text.
        element: bytes per weight.
        hidden: channels of the stream.
        head: number of weights of the language-model head.
        layers: for each layer its sites, as input channels and the rows of each linear.
        spaces: segments of each space that moves, and the number of rows that read a unit.
        block: channels per block that learns.
    """

    sequences: int
    length: int
    element: int
    hidden: int
    head: int
    layers: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    spaces: tuple[tuple[tuple[int, ...], int], ...]
    block: int = 64

    @classmethod
    def of(cls, model: PreTrainedModel, plan: Plan, sequences: int, length: int) -> "Sizes":
        """Reads the sizes of a model, which may be on the meta device."""
        rows = {name: weight_in_out(linear_module(model, name)).shape[1] for _, name in plan.linears()}
        spaces = tuple(
            (space.segments, sum(site.copies * rows[name] for site in plan.sites_of(space) for name in site.linears))
            for space in plan.spaces
            if not space.frozen
        )
        text = model.config.get_text_config()
        layers = tuple(
            tuple((site.channels, tuple(rows[name] for name in site.linears)) for site in layer)
            for layer in plan.layers()
        )
        hidden, element = int(text.hidden_size), next(model.parameters()).element_size()
        return cls(sequences, length, element, hidden, hidden * int(text.vocab_size), layers, spaces)

    @property
    def tokens(self) -> int:
        """Number of calibration tokens."""
        return self.sequences * self.length

    @property
    def pruned(self) -> int:
        """Number of pruned weights."""
        return sum(channels * sum(rows) for layer in self.layers for channels, rows in layer)

    @property
    def squares(self) -> int:
        """Number of entries of all Hessians."""
        return sum(channels**2 for layer in self.layers for channels, _ in layer)

    @property
    def segments(self) -> list[Linear]:
        """Channels of each segment that moves, and the number of rows that read them."""
        return [(size, rows) for segments, rows in self.spaces for size in segments]

    def forward(self, share: float = 1.0, logits: int = 0) -> Work:
        """Returns a forward pass over a share of the sequences, with the logits of so many models (0 for none).

        Attention counts all pairs of tokens, as if it were not causal.
        """
        linears = self.tokens * (2 * self.pruned + 2 * logits * self.head)
        return times(share, work(products=linears) + self.attention())

    def attention(self) -> Work:
        """Returns the products of queries and keys, and of their weights with values, in a forward pass."""
        return work(products=4 * self.tokens * self.length * self.hidden * len(self.layers))

    def repeated(self) -> Work:
        """Returns the forward pass that checkpointing repeats: it ends before the last linears of each layer."""
        last = sum(layer[-1][0] * sum(layer[-1][1]) for layer in self.layers)
        return self.forward() - work(products=2 * self.tokens * last)

    def masks(self) -> Work:
        """Returns the masks of all weights, or the gradients of all masks."""
        return work(moved=MASK_PASSES * self.element * self.pruned)

    def hessians(self) -> Work:
        """Returns ``X^T X`` of all sites over all sequences."""
        return work(wide=2 * self.tokens * self.squares)


def statistics(sizes: Sizes) -> Stage:
    """Norms of channels (wanda, ria): a forward pass."""
    return Stage(sizes.forward(), passes=1)


def obs_statistics(sizes: Sizes) -> Stage:
    """``diag(H^-1)``: a pass that records the layers' calls, one layer by layer, Hessians and their inverses."""
    inverses = [[work(factors=channels**3) for channels, _ in layer] for layer in sizes.layers]
    split = times(2, sizes.forward()) + sizes.hessians()
    return Stage(split, dealt=inverses, sums=FLOAT32 * sizes.squares, passes=2)


def fisher_rows(sizes: Sizes) -> Stage:
    """A forward pass, its repetition (checkpointing), a backward pass without gradients of weights, and logits.

    The backward pass of attention is twice its forward pass, that of a linear without its weight's gradient once. It
    ends at the outputs of the first linears.
    """
    channels, rows = sizes.layers[0][0]
    split = times(2, sizes.forward()) + sizes.repeated() + sizes.attention()
    split += work(products=4 * sizes.tokens * sizes.head) - work(products=2 * sizes.tokens * channels * sum(rows))
    return Stage(split, passes=2, trains=True)


def heuristic(sizes: Sizes, group: int = 4) -> Stage:
    """Sweeps of assignments in each space; as many as `permtriton.forecast` expects."""
    items = []
    for segments, rows in sizes.spaces:
        rows, item = min(rows, MAX_ROWS), work()
        for size in segments:
            groups = size // group
            parts = -(-groups // MOST_GROUPS)
            together = groups // parts  # groups in one assignment; those of all parts run in one batch
            # Scores are gathered, their thresholds found, and the best of each group summed up.
            call = work(distances=parts * together**2 * rows, searched=4 * together, moved=4 * FLOAT32 * size * rows)
            item += times(SWEEPS * parts * group, call)
        items.append(item)
    return Stage(dealt=[items])


def pairs(size: int, group: int = 4) -> int:
    """Returns the pairs of channels of a segment whose gains one trial computes, panel by panel."""
    height = max(GAINS_AT_ONCE // size // group, 1) * group
    return sum(min(height, size - start) * (size - start) for start in range(0, size, height))


def search_round(sizes: Sizes, trials: int) -> Stage:
    """Gradients of all masked weights, then trials: gains, and a forward pass with other masks.

    The KL objective takes the logits of both models, and the gradient of those of the pruned one.
    """
    split = times(3, sizes.forward()) + sizes.repeated() + work(products=6 * sizes.tokens * sizes.head)
    whole = work(moved=3 * FLOAT32 * sizes.pruned)  # each gradient is read, added to and written
    gains = [
        # Terms: scores and agreements are made of weights and gradients, sorted in groups, and reordered.
        work(gains=rows * sum(map(pairs, segments)), moved=6 * FLOAT32 * rows * sum(segments))
        for segments, rows in sizes.spaces
    ]
    split += times(trials, sizes.forward(logits=2))
    whole += times(trials + 1, times(2, sizes.masks()))  # computed, and copied into the model
    return Stage(split, whole, trials * [gains], FLOAT32 * sizes.pruned, passes=2 + trials, trains=True)


def learning_epoch(sizes: Sizes, config: CompileConfig) -> Stage:
    """Steps with gradients of all masked weights; masks and their gradients once per step; the loss at the end."""
    steps = -(-sizes.sequences // config.learn.batch_size)
    logits = sum(size * min(sizes.block, size) for size, _ in sizes.segments)
    masks = times(2 * steps + 1, sizes.masks())
    split = times(4, sizes.forward()) + sizes.repeated()
    return Stage(split, masks, sums=steps * FLOAT32 * logits, passes=3, trains=True)


class _Counting(TorchDispatchMode):
    """Counts the operators that run inside the context and make no view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@cache
def column_operators() -> float:
    """Returns the number of operators that SparseGPT's update runs per column at 2:4, without views."""
    counts = []
    for columns in (solver.COLUMNS_AT_ONCE, 2 * solver.COLUMNS_AT_ONCE):
        with _Counting() as counting:
            solver.sparsegpt(torch.ones(4, columns), torch.eye(columns), NMPattern(2, 4), None)
        counts.append(counting.count)
    return (counts[1] - counts[0]) / solver.COLUMNS_AT_ONCE


def solve(linear: Linear) -> Work:
    """Returns SparseGPT's update of one linear.

    That is a factor of H, its inverse, the factor of the inverse; the errors of each block, times the columns after it;
    inside a block, each column's error times those after it, a product that is written, then read and subtracted.
    """
    channels, rows = linear
    inside = 4 * FLOAT32 * solver.COLUMNS_AT_ONCE / 2 * rows * channels
    return work(factors=channels**3 * 4 / 3, wide=rows * channels**2, operators=column_operators() * channels) + work(
        moved=inside
    )


def sparsegpt(sizes: Sizes) -> Stage:
    """Recorded calls, Hessians, the update of every linear, and the outputs of the new weights."""
    updates = [[solve((channels, each)) for channels, rows in layer for each in rows] for layer in sizes.layers]
    split = times(3, sizes.forward()) + sizes.hessians()
    sums, sent = FLOAT32 * sizes.squares, sizes.element * sizes.pruned
    return Stage(split, dealt=updates, sums=sums, sent=sent, passes=3)


def reconstruct(sizes: Sizes, config: CompileConfig) -> Stage:
    """Recorded calls and outputs of both models, then epochs: training on 0.9 of the sequences, the loss on the others.

    The loss is also taken before the first epoch and after the last one.
    """
    epochs, steps = config.update.update_epochs, -(-int(0.9 * sizes.sequences) // config.update.update_batch_size)
    kept = sizes.pruned * config.sparsity.kept / config.sparsity.group
    step = work(moved=10 * FLOAT32 * kept + 3 * sizes.element * sizes.pruned)
    epoch = times(3, sizes.forward(0.9)) + sizes.forward(0.1)
    split = times(epochs, epoch) + times(4, sizes.forward()) + sizes.forward(0.2)
    outputs = 2.0 * len(sizes.layers) * sizes.tokens * sizes.hidden * sizes.element  # of both models
    sums = epochs * steps * FLOAT32 * kept
    return Stage(split, times(epochs * steps, step), sums=sums, joined=outputs, passes=4)


def stages(sizes: Sizes, config: CompileConfig, trials: int = TRIALS) -> dict[str, Stage]:
    """Returns stage -> its work; ``trials`` are those of a search round."""
    return {
        "statistics (wanda)": statistics(sizes),
        "statistics (obs)": obs_statistics(sizes),
        "Fisher rows": fisher_rows(sizes),
        "heuristic order": heuristic(sizes),
        "one search round": search_round(sizes, trials),
        "one learning epoch": learning_epoch(sizes, config),
        "SparseGPT": sparsegpt(sizes),
        "reconstruct": reconstruct(sizes, config),
    }
