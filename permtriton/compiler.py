"""The pipeline: prepare -> permute -> prune -> report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from permtriton.checkpoint.names import stored_names
from permtriton.checkpoint.quantizer import attach
from permtriton.checkpoint.report import compilation_report, stages_report
from permtriton.checkpoint.save import CompiledModel, pruned_parameters
from permtriton.config import CompileConfig
from permtriton.errors import ConfigError
from permtriton.evaluation.held_out import Evaluation
from permtriton.forecast import Forecast, check_disk, make_forecast
from permtriton.kernels.importance import ImportanceFactors
from permtriton.model.apply import apply_edits
from permtriton.model.checks import check_pruned, check_same_outputs, model_outputs
from permtriton.model.edits import edits_of, moves_of
from permtriton.model.experts import unstacked_experts
from permtriton.model.forward import TOKENS_WITHOUT_LOGITS, check_length
from permtriton.model.load import check_original
from permtriton.model.plan import ChannelSpace, Plan
from permtriton.model.reference import Reference
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import Pass, PassResult, permutation_passes, pruning_passes, run_passes
from permtriton.passes.verify_graph import count_operators, run
from permtriton.permutation import compose, identity
from permtriton.planning import plan_model
from permtriton.progress import NoProgress, Progress
from permtriton.prune.fisher import fisher_information
from permtriton.prune.heuristic import heuristic_indices
from permtriton.prune.importance import importances_of
from permtriton.prune.learn import learn, learned_spaces
from permtriton.prune.objective import Objective, default_objective, dense_objective, order_objective
from permtriton.prune.promises import Retained, check_no_worse, check_retained, retained_importance
from permtriton.prune.resume import ResumeFile
from permtriton.prune.search import SearchFile, search
from permtriton.prune.statistics import reorder_statistics, site_statistics
from permtriton.prune.text import calibration_ids, check_ids, ids_hash
from permtriton.stages import Permuted, Prepared, Pruned, Work
from permtriton.updating import mask, updated


def compile(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Tensor | None = None,
    evaluation_windows: Tensor | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
    say_needs: bool = False,
) -> CompiledModel:
    """Permutes the channels of ``model`` and prunes it to N:M, in place.

    Args:
        model: dense model on the device to work on; it is set to eval mode.
        tokenizer: tokenizer of the calibration text; not needed if the text is already token ids.
        config: every option; None means the default recipe.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's calibration text.
        evaluation_windows: held-out sequences to evaluate dense and compiled models on, int64 ``[windows, tokens]``.
        progress: progress reporter.
        resume_path: path of the files that keep the state of long stages, each with its stage's name before the suffix
            (``state.learning.safetensors``); a later call with equal inputs continues from them, and one with others is
            refused until they are deleted.
        say_needs: whether to measure the model first and report how much memory, time and disk the work will take.

    Returns:
        The compiled model, which holds ``model`` itself.

    Raises:
        PermTritonError: bad input, too little memory or disk, or a failed check. The model may then be partly changed.
    """
    work = Work(model.eval(), config or CompileConfig(), progress or NoProgress(), resume_path)
    with unstacked_experts(model):
        prepared = prepare(work, tokenizer, ids, evaluation_windows, say_needs)
        permuted = permute(work, prepared)
        pruned = prune(work, prepared, permuted)
        report = _report(work, prepared, permuted, pruned)
    return CompiledModel(
        model, tokenizer, work.config, prepared.plan, permuted.indices, report, prepared.reference.ids, work.states
    )


def dry_run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Tensor | None = None,
    evaluation_windows: Tensor | None = None,
    resume_path: Path | None = None,
) -> tuple[Plan, Forecast]:
    """Returns what `compile` would do to a model and what it would need; the model stays as it is.

    Arguments and errors are those of `compile`. Too little memory is no error here, but then no time is measured.
    """
    work = Work(model.eval(), config or CompileConfig(), NoProgress(), resume_path)
    with unstacked_experts(model):
        ids, plan, _ = _planned(work, tokenizer, ids)
        return plan, make_forecast(model, plan, work.config, ids, evaluation_windows, resume_path, timed=True)


# -- prepare -----------------------------------------------------------------------------------------------------------


def prepare(
    work: Work,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Tensor | None,
    windows: Tensor | None,
    say_needs: bool = False,
) -> Prepared:
    """Reads the calibration text, traces the model, and measures the dense model.

    Args:
        work: model, config and progress reporter.
        tokenizer: tokenizer of the calibration text.
        ids: calibration sequences, int64 ``[samples, tokens]``, in place of the config's calibration text.
        windows: held-out sequences, int64 ``[windows, tokens]``, or None.
        say_needs: whether to report how much memory, time and disk the work will take.

    Raises:
        PermTritonError: bad input, the state of another run, a model that cannot be traced, or too little memory or
            disk.
    """
    model, config = work.model, work.config
    ids, plan, graph = _planned(work, tokenizer, ids)
    with work.timed("estimate"):
        forecast = make_forecast(model, plan, config, ids, windows, work.resume_path, timed=say_needs)
    if forecast.refused:
        raise ConfigError(forecast.refused)
    folder = work.resume_path and work.resume_path.resolve().parent
    if folder is not None:
        check_disk(forecast.disk, folder)
    if say_needs:
        work.progress.say(forecast.describe(model.device, folder))
    batch = max(TOKENS_WITHOUT_LOGITS // ids.shape[1], 1)
    reference = Reference(model, ids, plan.unseen)
    with work.timed("evaluate"):
        evaluation = None if windows is None else Evaluation(model, windows, work.progress)
    with work.timed("calibrate"):
        statistics = site_statistics(model, plan, config.importance, ids, batch, work.progress)
    return Prepared(ids, batch, plan, graph, reference, forecast.needs, statistics, evaluation)


def _planned(
    work: Work, tokenizer: PreTrainedTokenizerBase | None, ids: Tensor | None
) -> tuple[Tensor, Plan, fx.GraphModule]:
    """Reads the calibration text and traces the model; arguments as in `prepare`."""
    model, config = work.model, work.config
    check_original(model)
    with work.timed("calibration text"):
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        check_length(model, config.calibration.sequence_length if ids is None else ids.shape[-1])
        if ids is None:
            ids = calibration_ids(config.calibration, tokenizer, vocabulary, config.seed)
        ids = check_ids(ids, vocabulary).cpu()
    with work.timed("identify"):
        work.identify(ids)
    with work.timed("trace"):
        plan, graph = plan_model(model, config)
    stored_names(model, pruned_parameters(model, plan), original=config.layout == "portable")  # refused now, not later
    return ids, plan, graph


# -- permute -----------------------------------------------------------------------------------------------------------


def permute(work: Work, prepared: Prepared) -> Permuted:
    """Finds the permutations and writes them into the model: the heuristic ones first, then learned or searched ones.

    Args:
        work: model, config and progress reporter.
        prepared: plan of the model, and what was measured on it.

    Raises:
        PermTritonError: learning or searching fails, or an exact step changed the outputs.
    """
    config, plan = work.config, prepared.plan
    permuted = Permuted(_unmoved(plan), prepared.graph, prepared.statistics)
    if spaces := _base_spaces(plan, config):
        with work.timed("heuristic"):
            importances = work.importances(plan, permuted.statistics)
            rows = _row_weights(work, prepared)
            base = heuristic_indices(work.model, plan, spaces, importances, rows, config.sparsity, work.progress)
        permuted = _moved(work, prepared, permuted, base)
    if config.permutation == "learned":
        permuted = _learned(work, prepared, permuted)
    if config.permutation == "searched":
        permuted = _searched(work, prepared, permuted)
    if not permuted.retained:  # nothing was permuted
        dense = _retained(work, plan, permuted.statistics, {})
        permuted = replace(permuted, dense_order=dense, retained={name: each.chosen for name, each in dense.items()})
    return permuted


def _row_weights(work: Work, prepared: Prepared) -> dict[str, Tensor] | None:
    if work.config.row_weights == "none":
        return None
    kind = default_objective(work.model)
    found = fisher_information(work.model, prepared.plan, kind, prepared.ids, work.config, work.progress)
    return {name: fisher.row for name, fisher in found.items()}


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


def _learned(work: Work, prepared: Prepared, permuted: Permuted) -> Permuted:
    model, config = work.model, work.config
    resume = work.state(ResumeFile, "learning")
    with work.timed("learn"):
        objective = dense_objective(model, order_objective(config, model), prepared.ids, prepared.batch)
        importances = work.importances(prepared.plan, permuted.statistics)
        learned = learn(
            model, prepared.plan, importances, prepared.ids, objective, config, work.progress, resume,
            prepared.needs.keep_masked,
        )  # fmt: skip
    if config.learn.keep_epoch == "best":
        check_no_worse(learned.history[0].loss, learned.history[learned.kept].loss, "learning")
    moved = _moved(work, prepared, permuted, learned.indices, config.learn.block_size)
    return replace(moved, learned=learned, objective=_reordered(prepared.plan, objective, learned.indices))


def _searched(work: Work, prepared: Prepared, permuted: Permuted) -> Permuted:
    model, config = work.model, work.config
    state = work.state(SearchFile, "search")
    with work.timed("search"):
        objective = dense_objective(model, order_objective(config, model), prepared.ids, prepared.batch)
        importances = work.importances(prepared.plan, permuted.statistics)
        found = search(model, prepared.plan, importances, prepared.ids, objective, config, work.progress, state)
    check_no_worse(found.history[0].loss, found.loss, "the search")
    moved = _moved(work, prepared, permuted, found.indices)
    return replace(moved, searched=found, objective=_reordered(prepared.plan, objective, found.indices))


def _reordered(plan: Plan, objective: Objective, indices: Mapping[str, Tensor]) -> Objective:
    return objective.reordered(plan.hidden_order({**_unmoved(plan), **indices}))


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
    for space in prepared.plan.spaces:
        if space.name in indices:
            space.check(indices[space.name])
    promised = _retained(work, prepared.plan, permuted.statistics, indices, permuted.retained)
    moves = moves_of(prepared.plan, indices, block_size)
    graph, results = _run(permuted.graph, permutation_passes(moves), _batches(work, prepared))
    apply_edits(work.model, edits_of(moves))
    difference = prepared.reference.check(work.model, "after folding permutations")
    statistics = reorder_statistics(permuted.statistics, moves)
    retained = {name: each.present for name, each in _retained(work, prepared.plan, statistics, {}).items()}
    check_retained({name: each.chosen for name, each in promised.items()}, retained)
    return Permuted(
        {**permuted.indices, **{name: compose(permuted.indices[name], index) for name, index in indices.items()}},
        absorb_folds(graph),
        statistics,
        permuted.passes + results,
        max(permuted.difference, difference),
        permuted.dense_order or promised,
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
    batches, updates = _batches(work, prepared), updated(work, prepared, permuted)
    with work.timed("mask"):
        # An updated model is N:M already: masks by magnitude keep all of it.
        importances = _by_magnitude(work, plan) if updates else work.importances(plan, permuted.statistics)
        passes = pruning_passes(plan, importances, config.sparsity, exact=bool(updates))
        graph, results = _run(permuted.graph, passes, batches)
        expected = run(graph, batches[0], wide=False)
        if not updates:
            mask(work, prepared, permuted)
        comparison = _compare_lowered(model, graph, expected, batches[0])
    check_pruned(model, plan, config.sparsity)
    evaluation = {}
    if prepared.evaluation is not None:
        with work.timed("evaluate"):
            evaluation = prepared.evaluation.measured(model, plan.hidden_order(permuted.indices))
    if config.layout == "fused":
        attach(model, str(config.sparsity))  # so that save_pretrained also writes the gathers and the permuted norms
    return Pruned(results, updates, comparison, evaluation)


def _compare_lowered(model: PreTrainedModel, graph: fx.GraphModule, expected: Tensor, batch: Tensor) -> str:
    """Compares the pruned model with the output of the lowered graph; returns `Pruned.comparison`."""
    if model.dtype.itemsize < 4 and any("topk" in operator for operator in count_operators(graph)):
        return f"not compared: in {model.dtype} rounding sends tokens to other experts"
    check_same_outputs(expected.float().cpu(), model_outputs(model, batch), model.dtype, "after pruning")
    return "same outputs"


# -- helpers -----------------------------------------------------------------------------------------------------------


def _retained(
    work: Work,
    plan: Plan,
    statistics: Mapping[str, Tensor],
    indices: Mapping[str, Tensor],
    present: Mapping[str, float] | None = None,
) -> dict[str, Retained]:
    importances = work.importances(plan, statistics)
    return retained_importance(work.model, plan, importances, work.config.sparsity, indices, present)


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


def _report(work: Work, prepared: Prepared, permuted: Permuted, pruned: Pruned) -> dict[str, Any]:
    return compilation_report(
        work.model,
        work.config,
        prepared.plan,
        permuted.indices,
        calibration={"sha256": ids_hash(prepared.ids), "shape": list(prepared.ids.shape)},
        stages={
            **stages_report(permuted.learned, permuted.searched, pruned.updates),
            "retained_importance": permuted.importance,
        },
        evaluation=pruned.evaluation,
        passes=[*permuted.passes, *pruned.passes],
        proof={
            "fold_difference": permuted.difference,
            "lowered_graph": pruned.comparison,
            "verified_inputs": list(prepared.reference.verified),
            "unverified_inputs": prepared.reference.unverified,
        },
        seconds=work.seconds,
        needs=prepared.needs.report(),
    )
