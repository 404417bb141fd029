"""Compares the pruning methods on the same calibration sequences and the same held-out text."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.compiler import compile
from permtriton.config import CompileConfig
from permtriton.errors import ConfigError
from permtriton.progress import NoProgress, Progress
from permtriton.prune.evaluate import Evaluation

_OBS = {"importance": "obs", "permutation": "heuristic", "weight_update": "sparsegpt"}
_ORDERS: dict[str, dict[str, Any]] = {
    "wanda + heuristic without row weights": {"permutation": "heuristic", "row_weights": "none"},
    "wanda + heuristic": {"permutation": "heuristic"},
    "ria + heuristic": {"importance": "ria", "permutation": "heuristic"},
    "wanda + learned": {"permutation": "learned"},
    "wanda + searched": {"permutation": "searched"},
    "heuristic + sparsegpt without row weights": {**_OBS, "row_weights": "none"},
    "heuristic + sparsegpt": _OBS,
    "heuristic + sparsegpt + reconstruct": {**_OBS, "weight_update": "sparsegpt+reconstruct"},
    "heuristic + sparsegpt + distill": {**_OBS, "weight_update": "sparsegpt+distill"},
}
# Name of each method -> the options in which it differs from the given config; what it does not name is as in _PLAIN.
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"importance": "magnitude"},
    "wanda": {},
    "ria": {"importance": "ria"},
    "sparsegpt": {"importance": "obs", "weight_update": "sparsegpt"},
    **_ORDERS,
    **{f"{name} (fused)": {**options, "layout": "fused"} for name, options in _ORDERS.items()},
}
_PLAIN = {
    "importance": "wanda",
    "permutation": "none",
    "row_weights": "fisher",
    "weight_update": "none",
    "update_mask": "own",
    "layout": "portable",
}


@dataclass(frozen=True)
class MethodResult:
    """The result of one method over all seeds.

    Attributes:
        method: key of `METHODS`, or ``dense``.
        values: held-out perplexity (cosine for encoders) per seed.
        seconds: time that all seeds took together.
    """

    method: str
    values: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Sample standard deviation over seeds; 0 with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: CompileConfig,
    windows: Tensor,
    *,
    ids: Tensor | None = None,
    seeds: Sequence[int] = (0,),
    methods: Sequence[str] = tuple(METHODS),
    progress: Progress | None = None,
    finished: Callable[[MethodResult], None] = lambda result: None,
) -> list[MethodResult]:
    """Prunes a copy of ``model`` with each method and each seed; ``model`` itself stays dense.

    Args:
        model: dense model.
        tokenizer: tokenizer of the calibration text.
        config: options that the methods do not set.
        windows: held-out sequences, int64 ``[windows, tokens]``.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's calibration text.
        seeds: seeds of the calibration draw and of learning, at least one.
        methods: keys of `METHODS`.
        progress: progress reporter.
        finished: function called with each result as soon as it is known.

    Returns:
        The dense model's result, then one result per method.

    Raises:
        ConfigError: a method is unknown, or there is no seed.
        PermTritonError: a compilation fails; see `permtriton.compile`.
    """
    if unknown := [method for method in methods if method not in METHODS]:
        raise ConfigError(f"method {unknown[0]!r} is unknown: choose from {', '.join(METHODS)}")
    if not seeds:
        raise ConfigError("no seed: give at least one")
    progress = progress or NoProgress()
    started = time.perf_counter()
    evaluation = Evaluation(model, windows, progress)
    results = [MethodResult("dense", (evaluation.dense,), time.perf_counter() - started)]
    finished(results[0])
    for method in methods:
        started = time.perf_counter()
        values = []
        for seed in seeds:
            chosen = dataclasses.replace(config, seed=seed, **{**_PLAIN, **METHODS[method]})
            compiled = compile(copy.deepcopy(model), tokenizer, chosen, ids=ids, progress=progress)
            values.append(evaluation.compiled(compiled.model, compiled.plan.hidden_order(compiled.indices)))
        results.append(MethodResult(method, tuple(values), time.perf_counter() - started))
        finished(results[-1])
    return results
