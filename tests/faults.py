"""Bugs to plant in permtriton, each a small monkeypatch, and what refuses each of them."""

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import permtriton
from permtriton.checkpoint import format_writer
from permtriton.driver import pipeline as compiler
from permtriton.kernels import sparsegpt_block
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods import run as running
from permtriton.methods.measure import fisher, statistics
from permtriton.methods.order import heuristic, searched
from permtriton.methods.order.heuristic import Heuristic
from permtriton.methods.order.learned import Learned
from permtriton.methods.order.searched import Searcher
from permtriton.methods.prune import mask, refit, sparsegpt
from permtriton.methods.prune.mask import Mask
from permtriton.methods.train.kept_weights import KeptWeights
from permtriton.passes import weight_folds as pass_edits
from permtriton.passes.plan import ChannelSpace, Site, linear_module
from permtriton.passes.weight_folds import Fold
from permtriton.running import layer_walk
from permtriton.running.layer_walk import LayerInputs, LayerWalk
from permtriton.util.permutation import compose, inverse

from . import folders, zoo

HEURISTIC = {"recipe": "heuristic,mask"}
FUSED = {**HEURISTIC, "layout": "fused", "o_proj": "free"}
LEARNED = {
    **HEURISTIC, "recipe": "heuristic,learned,mask", "learn_epochs": 2, "learn_batch_size": 4,
    "learn_learning_rate": 0.1, "learn_block_size": 16, "learn_keep": "last",
}  # fmt: skip
SEARCHED = {**HEURISTIC, "recipe": "heuristic,searched,mask", "search_rounds": 2}
SPARSEGPT = {**HEURISTIC, "recipe": "heuristic,sparsegpt", "importance": "wanda"}
REFIT = {**HEURISTIC, "recipe": "heuristic,refit"}
# Training spoils the model, so that the weights before it are the ones kept, and written back.
DISTILL = {**HEURISTIC, "recipe": "heuristic,mask,distill", "distill_epochs": 1, "distill_learning_rate": 10.0}
Plant = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Fault:
    """A bug, and what refuses it.

    Attributes:
        plant: patches the bug in.
        refused: pattern of the error of the compilation, if it is refused.
        caught_by: test that fails under the bug, if it is not.
        options: options of the compilation.
        model: name in the zoo; ``llama_eager`` has biases, grouped heads and an untied head.
        changes: what is changed in its config.
        dtype: its dtype.
        then: what is done with the compiled model: nothing, ``save`` or ``export``.
    """

    plant: Plant
    refused: str = ""
    caught_by: str = ""
    options: dict[str, Any] = field(default_factory=lambda: HEURISTIC)
    model: str = "llama_eager"
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    then: str = ""


# -- plants ------------------------------------------------------------------------------------------------------------


def replaced(owner: object, name: str, wrap: Callable[..., Any]) -> Plant:
    """Replaces a function of a module or class by ``wrap(original, *arguments)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: wrap(original, *args, **options))

    return plant


def other_indices(change: Callable[[Tensor], Tensor]) -> Plant:
    """The edits follow another order than the one that was found."""
    return replaced(
        running,
        "moves_of",
        lambda original, plan, found, *more: original(plan, {k: change(v) for k, v in found.items()}, *more),
    )


def other_edits(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """The model gets other edits than the graph."""
    return replaced(running, "apply_edits", lambda original, model, edits: original(model, change(list(edits))))


def without(*endings: str) -> Plant:
    """Folds of parameters whose names end so are forgotten."""
    return other_edits(
        lambda edits: [edit for edit in edits if not (isinstance(edit, Fold) and edit.parameter.endswith(endings))]
    )


def twice(ending: str) -> Callable[[list[Any]], list[Any]]:
    return lambda edits: [*edits, next(e for e in edits if isinstance(e, Fold) and e.parameter.endswith(ending))]


def rotated(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every site gets the statistics of the next site of its width."""
    changed = dict(values)
    for name, value in values.items():
        names = [other for other, found in values.items() if found.shape == value.shape]
        changed[name] = values[names[(names.index(name) + 1) % len(names)]]
    return changed


def mask_of(
    change: Callable[[Tensor, permtriton.NMPattern], Tensor], owner: object = mask, name: str = "top_n_mask"
) -> Plant:
    return lambda patch: patch.setattr(owner, name, change)


def smallest(scores: Tensor, pattern: permtriton.NMPattern) -> Tensor:
    return top_n_mask(-scores, pattern)


def one_of_four(scores: Tensor, pattern: permtriton.NMPattern) -> Tensor:
    return top_n_mask(scores, dataclasses.replace(pattern, kept=1))


def off_by_one_slot(scores: Tensor, pattern: permtriton.NMPattern) -> Tensor:
    return top_n_mask(scores, pattern).unflatten(0, (-1, pattern.group)).roll(1, 1).flatten(0, 1)


def untied_copies(original: Callable[..., Tensor], site: Site, index: Tensor) -> Tensor:
    found = original(site, index)
    if site.copies > 1:
        found[:2] = found[:2].flip(0)
    return found


def swapped_after(original: Callable[..., Any], *given: Any) -> Any:
    """A round's order is not the one whose loss it reports."""
    indices, row = original(*given)
    return {name: index.view(-1, 16).roll(1, 1).flatten() for name, index in indices.items()}, row


def rejected_kept(original: Callable[..., Any], searcher: Searcher, *given: Any) -> Any:
    """A round takes swaps that it should reject, and reports what it took."""
    _, row = original(searcher, *given)
    spoilt = {space.name: index for space, index in _shuffled(searcher._spaces)}
    return spoilt, {**row, "loss": searcher.loss(spoilt)}


def _shuffled(spaces: list[ChannelSpace]) -> list[tuple[ChannelSpace, Tensor]]:
    return [(space, zoo.random_index(space, 3)) for space in spaces]


def wrong_epoch(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    indices, outcome = original(*args, **options)
    outcome.kept -= 1
    return indices, outcome


def minus_zero(original: Callable[..., None], model: Any, plan: Any, *more: Any) -> None:
    original(model, plan, *more)
    weight = linear_module(model, next(plan.linears())[1]).weight.data
    weight[weight == 0] = -0.0


def forward_left(original: Callable[..., None], model: Any, *more: Any) -> None:
    """The model keeps a layer's forward that was replaced while a step ran, which the graph does not know."""
    original(model, *more)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: 1.1 * forward(hidden)


def outside(original: Callable[..., None], kept: KeptWeights, values: dict[str, Tensor]) -> None:
    for name, weight in kept._weights.items():
        elsewhere = (weight.data != 0).roll(1, 1)
        weight.data.zero_().masked_scatter_(elsewhere, values[name])


def full_column(original: Callable[..., Tensor], weight: Tensor, *more: Any) -> Tensor:
    found = original(weight, *more)
    found[:, 0:4] = weight[:, 0:4]
    return found


def on_disk(change: Callable[[dict[str, Tensor]], object]) -> Plant:
    """The files hold something else than the model in memory."""

    def save(original: Callable[..., None], model: Any, folder: Path, **options: Any) -> None:
        original(model, folder, **options)
        folders.edit_tensors(Path(folder), change)

    return replaced(PreTrainedModel, "save_pretrained", save)


def of_another_layer(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.{}.mlp.up_proj.weight"
    tensors[name.format(0)], tensors[name.format(1)] = tensors[name.format(1)], tensors[name.format(0)]


def watched(consume_other: Callable[[Callable[..., None], list[Site], Site, Tensor], None]) -> Plant:
    """Calibration consumes other activations than those of the site."""

    def watch(original: Any, model: Any, layer: LayerInputs, consume: Any, *more: Any) -> None:
        def changed(site: Site, inputs: Tensor, residual: Tensor | None) -> None:
            consume_other(lambda site, inputs: consume(site, inputs, residual), layer.sites, site, inputs)

        original(model, layer, changed, *more)

    return replaced(statistics, "watch_inputs", watch)


def into_next_site(consume: Callable[..., None], sites: list[Site], site: Site, inputs: Tensor) -> None:
    alike = [other for other in sites if other.channels == site.channels]
    consume(alike[(alike.index(site) + 1) % len(alike)], inputs)


def of_the_first_layer(change: Callable[[Any, Any], Any]) -> Plant:
    """What refitting measured of the first layer is left behind; ``change`` takes it and a later layer's."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original, first = refit.moments, {}

        def moments(*arguments: Any) -> dict[str, Any]:
            found = original(*arguments)
            return {name: change(first.setdefault(re.sub(r"\d+", "", name), own), own) for name, own in found.items()}

        patch.setattr(refit, "moments", moments)

    return plant


def exchanged(patch: pytest.MonkeyPatch) -> None:
    """What runs with the dense weights and what runs with the pruned ones change places."""

    def changing(walk: LayerWalk, _keep: Any) -> Any:
        linears = [name for _, name in walk.plan.linears()]
        dense = {name: linear_module(walk.model, name).weight.detach().clone() for name in linears}
        return walk._walk(layer_walk._with_weights(walk.model, walk.plan, dense), None, False)

    patch.setattr(LayerWalk, "walk_and_change", changing)
    patch.setattr(LayerWalk, "walk_dense", lambda walk, _values: walk._walk(nullcontext, None, False))


def of_another_linear(original: Callable[..., Any], model: Any, name: str) -> Any:
    pair = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    owner, _, last = name.rpartition(".")
    return original(model, f"{owner}.{pair.get(last, last)}")


def other_moves(change: Callable[[Any], Any]) -> Plant:
    """Graph and model get the same edits, which are wrong."""
    return replaced(running, "moves_of", lambda original, *args: tuple(change(move) for move in original(*args)))


def other_eps(move: Any) -> Any:
    """A norm that is written anew adds another number to the mean square."""
    if move.norm is None:
        return move
    norm = dataclasses.replace(move.norm.norm, variant=dataclasses.replace(move.norm.norm.variant, eps=2e-3))
    return dataclasses.replace(move, norm=dataclasses.replace(move.norm, norm=norm))


def without_upstream(name: str) -> Callable[[Any], Any]:
    def change(move: Any) -> Any:
        kept = tuple(fold for fold in move.upstream if name not in fold.parameter)
        return dataclasses.replace(move, upstream=kept)

    return change


def after_proof(change: Callable[[Tensor], object], name: str = "layers.0.mlp.up_proj.weight") -> Plant:
    """A weight changes between the proof and saving."""

    def measured(original: Any, run: Any, held_out: Any) -> Any:
        change(run.model.model.get_parameter(name).data)
        return original(run, held_out)

    return replaced(compiler, "measured", measured)


def other_config(original: Callable[..., None], model: Any, folder: Path, **options: Any) -> None:
    original(model, folder, **options)
    folders.configure(Path(folder), rms_norm_eps=0.5)


CLOSER = "tests/test_refitting.py::test_the_last_hidden_state_comes_closer_than_with_sparsegpt"
RETAIN, FOLDING = "should retain an importance", "after folding permutations"
FAULTS: dict[str, Fault] = {
    "inverse everywhere": Fault(other_indices(inverse), FOLDING),
    "inverse everywhere, fused": Fault(other_indices(inverse), RETAIN, options=FUSED),
    "order applied twice": Fault(other_indices(lambda index: compose(index, index)), FOLDING),
    "order not applied": Fault(other_indices(lambda index: torch.arange(index.numel())), FOLDING),
    "fold applied twice": Fault(other_edits(twice("up_proj.weight")), FOLDING),
    "tied weight folded twice": Fault(other_edits(twice("embed_tokens.weight")), FOLDING, model="llama_tied"),
    "fold forgotten": Fault(without("layers.1.mlp.down_proj.weight"), FOLDING),
    "bias not moved": Fault(without("up_proj.bias"), FOLDING),
    "norm weight not permuted": Fault(without("input_layernorm.weight"), FOLDING),
    "head columns not permuted": Fault(without("lm_head.weight"), FOLDING),
    "embedding not permuted": Fault(without("embed_tokens.weight"), FOLDING),
    "Conv1D not folded": Fault(without("mlp.c_proj.weight"), FOLDING, model="gpt2"),
    "copies of a value head not tied": Fault(replaced(Site, "expand", untied_copies), "joins channels|joined"),
    "gather with the inverse": Fault(
        replaced(pass_edits, "_gather_input", lambda f, model, name, index: f(model, name, inverse(index))),
        FOLDING, options=FUSED,
    ),
    "norm with the inverse": Fault(
        replaced(
            pass_edits, "_permute_norm", lambda f, model, e: f(model, dataclasses.replace(e, index=inverse(e.index)))
        ),
        FOLDING, options=FUSED,
    ),
    "epsilon of a norm lost": Fault(other_moves(other_eps), "outputs differ", options=FUSED, dtype=torch.bfloat16),
    "router not permuted": Fault(without("gate.weight"), "choices of experts|" + FOLDING, model="mixtral"),
    "fold of an expert that no sample reaches forgotten": Fault(
        other_moves(without_upstream("layers.0.mlp.experts.6.gate_up_proj")), "joins channels|joined", model="mixtral",
        changes={"num_local_experts": 40},
    ),
    "statistics not moved": Fault(
        replaced(running, "reorder_statistics", lambda f, found, moves: dict(found)), RETAIN
    ),
    "statistics of another site": Fault(
        replaced(running, "reorder_statistics", lambda f, found, moves: rotated(f(found, moves))), RETAIN
    ),
    "order is no permutation": Fault(
        replaced(Heuristic, "indices", lambda f, *args: {k: v + 1 for k, v in f(*args).items()}),
        "stream: the order found for its 64 units is not a permutation",
    ),
    "order leaves its head": Fault(
        replaced(Heuristic, "indices", lambda f, *args: {k: v.roll(1) for k, v in f(*args).items()}),
        r"from one segment \(a head\) to another",
    ),
    "learned order of another epoch": Fault(
        replaced(Learned, "learn", wrong_epoch), r"loss \(calibration", options=LEARNED
    ),
    "rejected swaps applied": Fault(
        replaced(Searcher, "round", swapped_after), r"loss \(calibration", options=SEARCHED
    ),
    "rejected swaps reported": Fault(
        replaced(Searcher, "round", rejected_kept), "the search began with a loss", options=SEARCHED
    ),
    "mask keeps the smallest": Fault(mask_of(smallest), RETAIN),
    "mask keeps 1 of 4": Fault(mask_of(one_of_four), "groups keep fewer weights than 2:4"),
    "mask off by one slot": Fault(mask_of(off_by_one_slot), RETAIN),
    "mask not applied": Fault(replaced(mask, "mask_weights", lambda f, *args: None), RETAIN),
    "nothing pruned": Fault(replaced(Mask, "run", lambda f, *args: None), "allows 2"),
    "-0.0 left": Fault(replaced(mask, "mask_weights", minus_zero), "-0.0"),
    "forward of a layer not given back": Fault(replaced(mask, "mask_weights", forward_left), "after pruning"),
    "SparseGPT keeps 1 of 4": Fault(
        mask_of(one_of_four, sparsegpt_block, "_largest"), "groups keep fewer weights than 2:4", options=SPARSEGPT
    ),
    "SparseGPT leaves a group dense": Fault(
        replaced(sparsegpt, "sparsegpt", full_column), "the fullest one keeps 4", options=SPARSEGPT
    ),
    "refit keeps a worse weight": Fault(
        replaced(refit, "better_rows", lambda f, found, *more: 2 * found),
        "refitting .* began with a loss", options={**REFIT, "refit_metric_tokens": 0},
    ),
    "refit leaves a group dense": Fault(
        replaced(refit, "least_squares", lambda f, start, target, *more: f(start, target, *more) + 1e-4 * target),
        "the fullest one keeps", options=REFIT,
    ),
    "refit with the shift of another layer": Fault(
        of_the_first_layer(lambda first, own: dataclasses.replace(own, shift=first.shift)),
        caught_by="tests/test_refitting.py::test_moments_are_those_of_both_models",
    ),
    "refit with the residual stream of another layer": Fault(
        of_the_first_layer(lambda first, own: dataclasses.replace(own, residual_shift=first.residual_shift)),
        caught_by="tests/test_refitting.py::test_the_residual_moments_are_those_of_both_models",
    ),
    "refit with statistics left behind": Fault(of_the_first_layer(lambda first, own: first), caught_by=CLOSER),
    "refit with dense and pruned inputs exchanged": Fault(
        exchanged,
        caught_by="tests/test_refitting.py::test_moments_are_those_of_both_models",
    ),
    "distill writes outside the mask": Fault(
        replaced(KeptWeights, "write", outside), "held out, when its weights were kept", options=DISTILL
    ),
    "distill keeps other weights than it measured": Fault(
        replaced(KeptWeights, "snapshot", lambda f, *args: {k: v * 1.5 for k, v in f(*args).items()}),
        "held out, when its weights were kept", options=DISTILL,
    ),
    "saved tensor of another layer": Fault(
        on_disk(of_another_layer), "what was written differs from the model in memory", then="save"
    ),
    "saved weight not pruned": Fault(
        on_disk(lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].add_(1)),
        "allows 2", then="save",
    ),
    "weight changed after the proof": Fault(after_proof(lambda weight: weight.add_(1)), "allows 2", then="save"),
    "NaN after the proof": Fault(
        after_proof(lambda weight: weight.fill_(torch.nan), "norm.weight"), "are not finite", then="save"
    ),
    "tensor not saved": Fault(
        on_disk(lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight")), "are not in the checkpoint",
        then="save",
    ),
    "saved config of another model": Fault(
        replaced(PreTrainedModel, "save_pretrained", other_config), "reloading the saved checkpoint", then="save"
    ),
    "packed positions of other rows": Fault(
        replaced(format_writer, "pack", lambda f, *args: (f(*args)[0], f(*args)[1].roll(1, 0))),
        "differs from what was read", then="export",
    ),
    "packed values rolled": Fault(
        replaced(format_writer, "pack", lambda f, *args: (f(*args)[0].roll(1, 1), f(*args)[1])),
        "differs from what was read", then="export",
    ),
    "norms summed without squares": Fault(
        watched(lambda consume, sites, site, inputs: consume(site, inputs.abs().sqrt())),
        caught_by="tests/test_statistics.py::test_norms_are_roots_of_sums_of_squares[gpt2]",
    ),
    "calibration of another site": Fault(
        watched(into_next_site), caught_by="tests/test_statistics.py::test_norms_are_roots_of_sums_of_squares[gpt2]"
    ),
    "Hessian rolled by one": Fault(
        watched(lambda consume, sites, site, inputs: consume(site, inputs.roll(1, -1))),
        caught_by="tests/test_statistics.py::test_hessians_are_products_of_inputs[gpt2]",
    ),
    "dead channels not damped": Fault(
        replaced(statistics, "damped", lambda f, h: f(h) * (h.diagonal() != 0)),
        caught_by="tests/test_sparsegpt.py::test_inverse_diagonal_is_that_of_the_dense_inverse",
    ),
    "row weights of another linear": Fault(
        replaced(fisher, "linear_module", of_another_linear),
        caught_by="tests/test_fisher.py::test_rows_and_columns_are_those_of_plain_autograd",
    ),
    "heuristic order inverted": Fault(
        replaced(heuristic, "_two_stages", lambda f, *args: inverse(f(*args))),
        caught_by="tests/test_heuristic.py::test_finds_a_planted_order",
    ),
    "gains of swaps with the wrong sign": Fault(
        replaced(searched, "swap_gains", lambda f, *args: -f(*args)),
        caught_by="tests/test_search.py::test_the_loss_falls_to_what_is_reported",
    ),
}  # fmt: skip
