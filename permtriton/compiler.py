"""The pipeline: prepare -> permute -> prune -> report."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton import memory
from permtriton.checkpoint.quantizer import attach
from permtriton.checkpoint.report import compilation_report
from permtriton.checkpoint.save import CompiledModel
from permtriton.config import CompileConfig
from permtriton.kernels.importance import ImportanceFactors
from permtriton.machine import versions
from permtriton.model.apply import apply_edits
from permtriton.model.checks import check_pruned, check_same_outputs, model_outputs, weights_hash
from permtriton.model.edits import edits_of, moves_of
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import check_length, hidden_states, mean_cosine_loss
from permtriton.model.load import check_original
from permtriton.model.plan import ChannelSpace, Plan
from permtriton.model.reference import Reference
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import Pass, PassResult, permutation_passes, pruning_passes, run_passes
from permtriton.passes.verify_graph import count_operators, run
from permtriton.permutation import compose, identity
from permtriton.planning import plan_model
from permtriton.progress import NoProgress, Progress
from permtriton.prune.evaluate import Evaluation
from permtriton.prune.heuristic import heuristic_indices
from permtriton.prune.importance import importances_of
from permtriton.prune.learn import learn, learned_spaces
from permtriton.prune.promises import (
    check_loss,
    check_retained,
    retained_importance,
    total_importance,
)
from permtriton.prune.resume import ResumeFile
from permtriton.prune.statistics import reorder_statistics, site_statistics
from permtriton.prune.text import calibration_ids, check_ids, ids_hash
from permtriton.prune.weights import mask_weights, update_weights
from permtriton.stages import Permuted, Prepared, Pruned, Work

TOKENS_AT_ONCE = 4096  # per forward pass without gradients


def compile(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Tensor | None = None,
    evaluation_windows: Tensor | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
) -> CompiledModel:
    """Permutes the channels of ``model`` and prunes it to N:M, in place.

    Args:
        model: dense model on the device to work on; it is set to eval mode.
        tokenizer: tokenizer of the calibration text; not needed if the text is already token ids.
        config: every option; None means the default recipe.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's calibration text.
        evaluation_windows: held-out sequences to evaluate dense and compiled models on, int64 ``[windows, tokens]``.
        progress: progress reporter.
        resume_path: file for the state of learning after each epoch; a later call with equal inputs continues from it.

    Returns:
        The compiled model, which holds ``model`` itself.

    Raises:
        PermTritonError: bad input, too little memory, or a failed check. The model may then be partly changed.
    """
    work = Work(model.eval(), config or CompileConfig(), progress or NoProgress())
    with unstacked_experts(model):
        prepared = prepare(work, tokenizer, ids, evaluation_windows)
        permuted = permute(work, prepared, resume_path)
        pruned = prune(work, prepared, permuted)
        report = _report(work, prepared, permuted, pruned)
    return CompiledModel(
        model, tokenizer, work.config, prepared.plan, permuted.indices, report, prepared.reference.ids, permuted.resume
    )


# -- prepare -----------------------------------------------------------------------------------------------------------


def prepare(
    work: Work, tokenizer: PreTrainedTokenizerBase | None, ids: Tensor | None, windows: Tensor | None
) -> Prepared:
    """Reads the calibration text, traces the model, and measures the dense model.

    Args:
        work: model, config and progress reporter.
        tokenizer: tokenizer of the calibration text.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's calibration text.
        windows: held-out sequences, int64 ``[windows, tokens]``, or None.

    Raises:
        PermTritonError: bad input, a model that cannot be traced, or too little memory.
    """
    model, config = work.model, work.config
    check_original(model)
    with work.timed("calibration text"):
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        check_length(model, config.calibration.sequence_length if ids is None else ids.shape[-1])
        if ids is None:
            ids = calibration_ids(config.calibration, tokenizer, vocabulary, config.seed)
        ids = check_ids(ids, vocabulary).cpu()
    with work.timed("trace"):
        plan, graph = plan_model(model, config)
    needs = memory.estimate(model, plan, config, ids, windows)
    work.progress.say(memory.describe(needs, model.device))
    memory.check_fits(needs, model.device)
    batch = max(TOKENS_AT_ONCE // ids.shape[1], 1)
    reference = Reference(model, ids, plan.unseen)
    with work.timed("evaluate"):
        evaluation = None if windows is None else Evaluation(model, windows, work.progress)
    with work.timed("calibrate"):
        statistics = site_statistics(model, plan, config.importance, ids, batch, work.progress)
    return Prepared(ids, batch, plan, graph, reference, needs, statistics, evaluation)


# -- permute -----------------------------------------------------------------------------------------------------------


def permute(work: Work, prepared: Prepared, resume_path: Path | None) -> Permuted:
    """Finds the permutations and writes them into the model: the heuristic ones first, then the learned ones.

    Args:
        work: model, config and progress reporter.
        prepared: plan of the model, and what was measured on it.
        resume_path: file that keeps the state of learning after each epoch, or None.

    Raises:
        PermTritonError: learning fails, or an exact step changed the outputs.
    """
    config, plan = work.config, prepared.plan
    permuted = Permuted(_unmoved(plan), prepared.graph, prepared.statistics)
    if spaces := _base_spaces(plan, config):
        with work.timed("heuristic"):
            importances = _importances(work, plan, permuted.statistics)
            base = heuristic_indices(work.model, plan, spaces, importances, config.sparsity, work.progress)
        permuted = _moved(work, prepared, permuted, base)
    if config.permutation == "learned":
        permuted = _learned(work, prepared, permuted, resume_path)
    return permuted


def _unmoved(plan: Plan) -> dict[str, Tensor]:
    return {space.name: identity(space.units) for space in plan.spaces}


def _base_spaces(plan: Plan, config: CompileConfig) -> list[ChannelSpace]:
    """Returns the spaces that take the heuristic order, as their final order or as the base order of learning."""
    if config.permutation == "none":
        return []
    spaces = [space for space in plan.spaces if not space.frozen]
    if config.permutation == "learned" and config.learn.base_order == "identity":
        learning = learned_spaces(plan, config.learn)
        spaces = [space for space in spaces if not any(space is other for other in learning)]
    return spaces


def _learned(work: Work, prepared: Prepared, permuted: Permuted, resume_path: Path | None) -> Permuted:
    model, config = work.model, work.config
    resume = None if resume_path is None else ResumeFile(resume_path, _fingerprint(work, prepared))
    with work.timed("learn"):
        target = hidden_states(model, prepared.ids, prepared.batch)
        importances = _importances(work, prepared.plan, permuted.statistics)
        learned = learn(
            model, prepared.plan, importances, prepared.ids, target, config.learn, config.sparsity, config.seed,
            work.progress, resume,
        )  # fmt: skip
    moved = _moved(work, prepared, permuted, learned.indices, config.learn.block_size)
    return replace(moved, learned=learned, target=target if config.weight_update == "none" else None, resume=resume)


def _moved(
    work: Work,
    prepared: Prepared,
    permuted: Permuted,
    indices: Mapping[str, Tensor],
    block_size: int | None = None,
) -> Permuted:
    """Writes permutations into graph, model and statistics, and checks that the outputs stay the same.

    Args:
        work: model, config and progress reporter.
        prepared: plan and dense outputs.
        permuted: state so far.
        indices: space name -> unit index relative to the present order, int64 ``[units]``.
        block_size: block size of the indices, if they are block permutations.
    """
    promised = _retained(work, prepared.plan, permuted.statistics, indices)
    moves = moves_of(prepared.plan, indices, block_size)
    graph, results = _run(permuted.graph, permutation_passes(moves), _batches(work, prepared))
    apply_edits(work.model, edits_of(moves))
    difference = prepared.reference.check(work.model, "after folding permutations")
    statistics = reorder_statistics(permuted.statistics, moves)
    retained = _retained(work, prepared.plan, statistics, {})
    check_retained(promised, retained)
    return Permuted(
        {**permuted.indices, **{name: compose(permuted.indices[name], index) for name, index in indices.items()}},
        absorb_folds(graph),
        statistics,
        permuted.passes + results,
        max(permuted.difference, difference),
        retained,
    )


# -- prune -------------------------------------------------------------------------------------------------------------


def prune(work: Work, prepared: Prepared, permuted: Permuted) -> Pruned:
    """Prunes the model, checks that its outputs are those of the lowered graph, and evaluates it.

    Args:
        work: model, config and progress reporter.
        prepared: plan of the model, and what was measured on the dense model.
        permuted: model with its channels in the new order.

    Raises:
        PermTritonError: a Hessian cannot be inverted, or a check failed.
    """
    model, config, plan = work.model, work.config, prepared.plan
    updates, batches = config.weight_update != "none", _batches(work, prepared)
    with work.timed("update" if updates else "mask"):
        if updates:
            update_weights(model, plan, permuted.statistics, prepared.ids, prepared.batch, config, work.progress)
            importances = _by_magnitude(work, plan)  # the weights are N:M already, so these masks keep all of them
        else:
            importances = _importances(work, plan, permuted.statistics)
        passes = pruning_passes(plan, importances, config.sparsity, exact=updates)
        graph, results = _run(permuted.graph, passes, batches)
        expected = run(graph, batches[0], wide=False)
        if not updates:
            promised = permuted.retained or retained_importance(model, plan, importances, config.sparsity, {})
            mask_weights(model, plan, importances, config.sparsity)
            check_retained(promised, total_importance(model, plan, importances))
            _check_learned(work, prepared, permuted)
        comparison = _compare_lowered(model, graph, expected, batches[0])
    check_pruned(model, plan, config.sparsity)
    evaluation = {}
    if prepared.evaluation is not None:
        with work.timed("evaluate"):
            evaluation = prepared.evaluation.measured(model, plan.hidden_order(permuted.indices))
    if config.layout == "fused":
        attach(model, str(config.sparsity))  # so that save_pretrained also writes the gathers and the permuted norms
    return Pruned(results, comparison, evaluation)


def _check_learned(work: Work, prepared: Prepared, permuted: Permuted) -> None:
    """Compares the loss measured while learning, where the permutation is learned, with that of the pruned model."""
    learned, plan = permuted.learned, prepared.plan
    if learned is not None and permuted.target is not None:
        order = plan.hidden_order({**_unmoved(plan), **learned.indices})
        loss = mean_cosine_loss(work.model, prepared.ids, permuted.target, prepared.batch, order)
        check_loss(learned.history[learned.kept].loss, loss, work.model.dtype)


def _compare_lowered(model: PreTrainedModel, graph: fx.GraphModule, expected: Tensor, batch: Tensor) -> str:
    """Compares the pruned model with the output of the lowered graph; returns `Pruned.comparison`."""
    if model.dtype.itemsize < 4 and any("topk" in operator for operator in count_operators(graph)):
        return f"not compared: in {model.dtype} rounding sends tokens to other experts"
    check_same_outputs(expected.float().cpu(), model_outputs(model, batch), model.dtype, "after pruning")
    return "same outputs"


# -- helpers -----------------------------------------------------------------------------------------------------------


def _importances(work: Work, plan: Plan, statistics: Mapping[str, Tensor]) -> dict[str, ImportanceFactors]:
    return importances_of(work.model, plan, work.config.importance, statistics)


def _retained(
    work: Work, plan: Plan, statistics: Mapping[str, Tensor], indices: Mapping[str, Tensor]
) -> dict[str, float]:
    return retained_importance(work.model, plan, _importances(work, plan, statistics), work.config.sparsity, indices)


def _by_magnitude(work: Work, plan: Plan) -> dict[str, ImportanceFactors]:
    ones = {site.name: torch.ones(site.channels, device=work.model.device) for site in plan.sites}
    return importances_of(work.model, plan, "magnitude", ones)


def _run(
    graph: fx.GraphModule, passes: Sequence[Pass], batches: Sequence[Tensor]
) -> tuple[fx.GraphModule, tuple[PassResult, ...]]:
    results: list[PassResult] = []
    return run_passes(graph, passes, batches, results.append), tuple(results)


def _batches(work: Work, prepared: Prepared) -> list[Tensor]:
    """Returns token ids of the traced length, int64 ``[1, tokens]`` each, on which passes are verified."""
    placeholder = next(node for node in prepared.graph.graph.nodes if node.op == "placeholder")
    tokens = placeholder.meta["val"].shape[1]
    rows = prepared.reference.ids
    rows = rows.repeat(1, math.ceil(tokens / rows.shape[1]))[:, :tokens]  # sequences may be shorter than the trace
    return list(rows.to(work.model.device).split(1))


def _fingerprint(work: Work, prepared: Prepared) -> str:
    """Returns a hash of everything that decides what learning finds."""
    inputs = {
        "config": work.config.to_dict(),
        "ids": ids_hash(prepared.ids),
        "weights": weights_hash(work.model),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _report(work: Work, prepared: Prepared, permuted: Permuted, pruned: Pruned) -> dict[str, Any]:
    return compilation_report(
        work.model,
        work.config,
        prepared.plan,
        permuted.indices,
        calibration={"sha256": ids_hash(prepared.ids), "shape": list(prepared.ids.shape)},
        learned=permuted.learned,
        evaluation=pruned.evaluation,
        passes=[*permuted.passes, *pruned.passes],
        proof={
            "fold_difference": permuted.difference,
            "lowered_graph": pruned.comparison,
            "verified_inputs": list(prepared.reference.verified),
            "unverified_inputs": prepared.reference.unverified,
        },
        seconds=work.seconds,
        needs=prepared.needs,
    )
