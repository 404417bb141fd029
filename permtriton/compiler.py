"""The pipeline: prepare -> permute -> prune -> report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from transformers import PreTrainedModel

from permtriton.checkpoint.quantizer import attach
from permtriton.checkpoint.report import compilation_report, stages_report
from permtriton.checkpoint.save import CompiledModel
from permtriton.config import CompileConfig
from permtriton.data.media import Processor
from permtriton.data.samples import Inputs, Samples
from permtriton.forecast import Forecast, make_forecast
from permtriton.memory import Devices
from permtriton.methods.fisher import fisher_information
from permtriton.methods.heuristic_order import heuristic_indices
from permtriton.methods.importance import magnitudes
from permtriton.methods.learning import learn, learned_spaces
from permtriton.methods.learning_state import ResumeFile
from permtriton.methods.objective import Objective, default_objective, dense_objective, order_objective
from permtriton.methods.promises import Retained, check_no_worse, check_retained, retained_importance
from permtriton.methods.statistics import reorder_statistics
from permtriton.methods.swap_search import SearchFile, search
from permtriton.model.apply import apply_edits
from permtriton.model.checks import check_pruned, check_same_outputs, model_outputs
from permtriton.model.edits import edits_of, moves_of
from permtriton.model.experts import unstacked_experts
from permtriton.model.plan import ChannelSpace, Plan
from permtriton.model.shared import shared_linears
from permtriton.model.trace import OTHER_VALUES
from permtriton.offload import Offload, working
from permtriton.passes.graph import absorb_folds
from permtriton.passes.pipeline import Pass, PassResult, permutation_passes, pruning_passes, run_passes
from permtriton.passes.verify_graph import count_operators, run
from permtriton.permutation import compose, identity
from permtriton.preparing import held_out_samples, planned, prepare
from permtriton.progress import NoProgress, Progress
from permtriton.running.sharding import twin_of
from permtriton.stages import Permuted, Prepared, Pruned, Work
from permtriton.updating import mask, updated


def compile(
    model: PreTrainedModel,
    tokenizer: Processor | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Inputs | None = None,
    evaluation_windows: Inputs | None = None,
    progress: Progress | None = None,
    resume_path: Path | None = None,
    say_needs: bool = False,
    device: torch.device | None = None,
    spread: bool | None = None,
    offload: Offload | None = None,
) -> CompiledModel:
    """Permutes the channels of ``model`` and prunes it to N:M, in place.

    Args:
        model: dense model on the device to work on; it is set to eval mode.
        tokenizer: tokenizer of the calibration text, not needed if the text is already token ids; or the processor of
            images or sound. It is saved with the model.
        config: every option; None means the default recipe.
        ids: calibration samples in place of the config's: token ids, int64 ``[samples, tokens]``, or a mapping of the
            arguments of the model's ``forward`` to tensors with one row per sample, such as ``{"pixel_values": ...}``.
        evaluation_windows: held-out samples to evaluate dense and compiled models on: token ids, int64
            ``[windows, tokens]``, or a mapping as for ``ids``.
        progress: progress reporter.
        resume_path: path of the files that keep the state of long stages, each with its stage's name before the suffix
            (``state.learning.safetensors``); a later call with equal inputs continues from them, and one with others is
            refused until they are deleted.
        say_needs: whether to measure the model first and report how much memory, time and disk the work will take.
        device: device that the model, which is on the CPU, shall run on; None where it is.
        spread: whether the weights of its layers are spread over the ranks of ``torch.distributed`` while it runs, see
            `permtriton.running.sharding`; None spreads what does not fit ``device``.
        offload: folder whose disk takes the place of memory, for a model on the CPU that does not fit there; its
            parameters stay in files of that folder as long as they are used.

    Returns:
        The compiled model, which holds ``model`` itself.

    Raises:
        PermTritonError: bad input, too little memory or disk, or a failed check. The model may then be partly changed.
    """
    work = Work(model.eval(), config or CompileConfig(), progress or NoProgress(), resume_path, offload=offload)
    with working(offload, model, work.config, device), unstacked_experts(model), shared_linears(model):
        prepared = prepare(work, tokenizer, ids, evaluation_windows, say_needs, device, spread)
        permuted = permute(work, prepared)
        pruned = prune(work, prepared, permuted)
        report = _report(work, prepared, permuted, pruned)
    return CompiledModel(
        model, tokenizer, work.config, prepared.plan, permuted.indices, report, prepared.reference.samples, work.states,
        offload,
    )  # fmt: skip


def dry_run(
    model: PreTrainedModel,
    tokenizer: Processor | None = None,
    config: CompileConfig | None = None,
    *,
    ids: Inputs | None = None,
    evaluation_windows: Inputs | None = None,
    resume_path: Path | None = None,
    devices: Devices | None = None,
    offload: Offload | None = None,
) -> tuple[Plan, Forecast]:
    """Returns what `compile` would do to a model and what it would need; the model stays as it is.

    Arguments and errors are those of `compile`, and ``devices``, for which the estimate is made; None means the one
    that the model is on. Too little memory is no error here, but then no time is measured.
    """
    work = Work(model.eval(), config or CompileConfig(), NoProgress(), resume_path, offload=offload)
    with working(offload, model, work.config), unstacked_experts(model), shared_linears(model):
        samples, plan, _ = planned(work, tokenizer, ids)
        held_out = held_out_samples(model, evaluation_windows)
        devices = devices or Devices.of(model.device, offloaded=offload is not None)
        return plan, make_forecast(
            model, plan, work.config, samples, held_out, resume_path, timed=True, devices=devices
        )


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
    with prepared.running(work.model) as model:
        found = fisher_information(
            model, prepared.plan, kind, prepared.samples, work.config, work.progress, work.offload
        )
    return {name: fisher.row.to(work.model.device) for name, fisher in found.items()}


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
        with prepared.running(model) as dense:
            objective = dense_objective(dense, order_objective(config, model), prepared.samples, prepared.batch)
        importances = work.importances(prepared.plan, permuted.statistics)
        masked = model if prepared.spread_on is None else twin_of(model)  # `learn` spreads the masked twin
        learned = learn(
            masked, prepared.plan, importances, prepared.samples, objective.on(masked), config, work.progress, resume,
            prepared.needs.keep_masked, prepared.spread_on,
        )  # fmt: skip
    if config.learn.keep_epoch == "best":
        check_no_worse(learned.history[0].loss, learned.history[learned.kept].loss, "learning")
    moved = _moved(work, prepared, permuted, learned.indices, config.learn.block_size)
    return replace(moved, learned=learned, objective=_reordered(prepared.plan, objective, learned.indices))


def _searched(work: Work, prepared: Prepared, permuted: Permuted) -> Permuted:
    model, config = work.model, work.config
    state = work.state(SearchFile, "search")
    with work.timed("search"):
        importances = work.importances(prepared.plan, permuted.statistics)
        with prepared.running(model) as dense:
            objective = dense_objective(dense, order_objective(config, model), prepared.samples, prepared.batch)
            found = search(dense, prepared.plan, importances, prepared.samples, objective, config, work.progress, state)
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
        importances = magnitudes(model, plan) if updates else work.importances(plan, permuted.statistics)
        passes = pruning_passes(plan, importances, config.sparsity, exact=bool(updates))
        graph, results = _run(permuted.graph, passes, batches)
        expected = run(graph, batches[0], wide=False)
        if not updates:
            mask(work, prepared, permuted)
        comparison = _compare_lowered(model, prepared, graph, expected, batches[0])
    check_pruned(model, plan, config.sparsity)
    evaluation = {}
    if prepared.evaluation is not None:
        with work.timed("evaluate"), prepared.running(model) as runs:
            evaluation = prepared.evaluation.measured(runs, plan.hidden_order(permuted.indices))
    if config.layout == "fused":
        attach(model, str(config.sparsity))  # so that save_pretrained also writes the gathers and the permuted norms
    return Pruned(results, updates, comparison, evaluation)


def _compare_lowered(
    model: PreTrainedModel, prepared: Prepared, graph: fx.GraphModule, expected: Tensor, batch: Samples
) -> str:
    """Compares the pruned model with the output of the lowered graph; returns `Pruned.comparison`."""
    if OTHER_VALUES in prepared.graph.meta:
        return "not compared: the graph takes all rows where the model selects some by their values"
    if model.dtype.itemsize < 4 and any("topk" in operator for operator in count_operators(graph)):
        return f"not compared: in {model.dtype} rounding sends tokens to other experts"
    check_same_outputs(expected.float().cpu(), lambda: model_outputs(model, batch), model, "after pruning")
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


def _run(
    graph: fx.GraphModule, passes: Sequence[Pass], batches: Sequence[Samples]
) -> tuple[fx.GraphModule, tuple[PassResult, ...]]:
    results: list[PassResult] = []
    return run_passes(graph, passes, batches, results.append), tuple(results)


def _batches(work: Work, prepared: Prepared) -> list[Samples]:
    """Returns single samples of the traced shapes, on which passes are verified."""
    given, taken = prepared.reference.samples, {}
    for node in prepared.graph.graph.nodes:
        if node.op == "placeholder":
            rows = given.inputs[str(node.target)]
            if given.is_text:
                tokens = node.meta["val"].shape[1]
                rows = rows.repeat(1, math.ceil(tokens / rows.shape[1]))[:, :tokens]  # which may be fewer than traced
            taken[str(node.target)] = rows
    return list(Samples(taken).to(work.model.device, work.model.dtype).split(1))


def _report(work: Work, prepared: Prepared, permuted: Permuted, pruned: Pruned) -> dict[str, Any]:
    return compilation_report(
        work.model,
        work.config,
        prepared.plan,
        permuted.indices,
        calibration={"sha256": prepared.samples.sha256, "shape": [len(prepared.samples), prepared.samples.tokens]},
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
