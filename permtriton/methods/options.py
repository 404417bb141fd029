"""The options that an algorithm in a file of its own reads, where they are many; the step adds its other ones."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from permtriton.util.option import option

FIT_AFTER_EXCHANGE = 4  # rounds of conjugate gradients after each round of exchanges
TRAINED_PER_HELD_OUT, MOST_HELD_OUT = 10, 16  # samples of `tune`


@dataclass(frozen=True)
class Learning:
    """Options of `permtriton.methods.order.learning`."""

    block_size: int = option(
        64,
        "Channels per block of the block permutation, a multiple of M; "
        "a value of at least the number of channels makes one block: the full permutation.",
        minimum=1,
    )
    sinkhorn_rounds: int = option(5, "Rounds of row and column normalisation (eq. 3-5); 0 means a row softmax.")
    tau_start: float = option(1.0, "Temperature at the first step.", positive=True)
    tau_end: float = option(0.5, "Temperature at the last step, reached linearly.", positive=True)
    tau_falls: Literal["step", "epoch"] = option(
        "step", "When the temperature falls: at every step, or at the start of every epoch but the first."
    )
    epochs: int = option(50, "Passes over the calibration sequences.", minimum=1)
    batch_size: int = option(16, "Sequences per optimiser step.", minimum=1)
    learning_rate: float = option(
        5e-3,
        "Peak AdamW learning rate, with cosine decay; the recipe permllm takes 0.005 with the importance ria.",
        positive=True,
    )
    weight_decay: float = option(0.1, "AdamW weight decay.")
    layers: str = option(
        "all",
        "Layers whose permutations are learned; the others keep their order.",
        pattern=r"all|last:[1-9]\d*",
        values="all, or last:K with K at least 1",
    )
    init: Literal["identity", "random"] = option(
        "identity", "Start of learning: near the order of the steps before (identity) or random."
    )
    init_noise: float = option(0.1, "Size of the random part when learning starts near the identity.")
    clamp: float = option(0.0, "Limit on the absolute value of logits; 0 for none.")
    gradient: Literal["placement", "published"] = option(
        "placement",
        "Gradient of the permutations: placement (what the loss does as each channel takes each position, with its "
        "curvature) or published (by way of a softmax over each group).",
    )
    group_scale: bool = option(
        True,
        "Divide scores by the mean of their group before the softmax of the published gradient.",
        needs={"learn_gradient": ("published",)},
    )
    keep: Literal["best", "last"] = option(
        "best",
        "Epoch to keep: best (the one with the lowest loss under the hard permutation, or the start) or last.",
    )

    @property
    def last_layers(self) -> int | None:
        """K of ``last:K``, or None for all layers."""
        return None if self.layers == "all" else int(self.layers.removeprefix("last:"))


@dataclass(frozen=True)
class Searching:
    """Options of `permtriton.methods.order.swap_search`."""

    rounds: int = option(
        12,
        "Most rounds: a round measures all gains, swaps the best channels and keeps the swaps if the loss falls.",
        minimum=1,
    )
    damping: float = option(
        4.0,
        "Weight of the curvature in the gains of the first round; it adapts to how well the gains predict.",
        positive=True,
    )


@dataclass(frozen=True)
class Refitting:
    """Options of `permtriton.methods.prune.refitting`."""

    dense_targets: float = option(
        0.5,
        "Share of the dense model's own inputs in what weights are fitted to; the rest are the inputs of the model "
        "as pruned so far.",
        maximum=1.0,
    )
    residual_targets: float = option(
        0.25,
        "How much of the error that the residual stream has so far (dense minus pruned) the linears that write into it "
        "make up for: 0 for none, 1 for all of it.",
        maximum=1.0,
    )
    iterations: int = option(20, "Rounds of conjugate gradients per weight; 0 leaves SparseGPT's weights and mask.")
    exchanges: int = option(
        4, "Most rounds in which pruned weights take the place of kept ones, each followed by a further fit."
    )
    metric_tokens: int = option(
        2048,
        "Calibration tokens whose gradients say how errors of a linear's outputs add up in the loss: whole sequences, "
        "at least one; 0 takes all outputs for equal and unrelated.",
    )
    metric_rounds: int = option(12, "Rounds of conjugate gradients in that metric, after all others.", minimum=1)


@dataclass(frozen=True)
class Tuning:
    """Options of `permtriton.methods.train.tuning`."""

    steps: int = option(
        32, "Optimiser steps, each on sequences that calibration does not read, where there are.", minimum=1
    )
    learning_rate: float = option(
        2.5e-3,
        "Peak Adam learning rate, with cosine decay to 0: relative to a scale, and to the root mean square of a norm's "
        "gains or of a bias; where a bias is all 0, to that of the weight beside it.",
        positive=True,
    )
    batch_size: int = option(1, "Sequences per optimiser step.", minimum=1)

    @property
    def trained(self) -> int:
        """Number of samples that all steps train on."""
        return self.steps * self.batch_size

    @property
    def draws(self) -> int:
        """Number of samples to train on and to hold out."""
        return self.trained + min(ceil(self.trained / TRAINED_PER_HELD_OUT), MOST_HELD_OUT)

    @staticmethod
    def held_out(samples: int) -> int:
        """Returns how many of so many samples decide which round is kept."""
        return min(max(samples // (TRAINED_PER_HELD_OUT + 1), 1), MOST_HELD_OUT)
