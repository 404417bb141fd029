"""How the model is pruned: by masks, and by the parts of the weight update, one after another."""

from functools import partial
from typing import Any

from torch import Tensor

from permtriton.methods.distillation import distill
from permtriton.methods.objective import dense_objective, update_objective
from permtriton.methods.promises import check_loss, check_retained, total_importance
from permtriton.methods.reconstruction import reconstruct
from permtriton.methods.weights import mask_weights, update_weights
from permtriton.micro_batch import MicroBatch
from permtriton.model.plan import linear_module
from permtriton.running.state import StateFile
from permtriton.stages import Permuted, Prepared, Work


def mask(work: Work, prepared: Prepared, permuted: Permuted) -> None:
    """Prunes the model by masks of its importance, and checks that they keep what the order promised.

    Args:
        work: model, config and progress reporter.
        prepared: plan of the model.
        permuted: model with its channels in the new order.

    Raises:
        VerificationError: the masks retain another importance, or the loss is another one.
    """
    model, plan, pattern = work.model, prepared.plan, work.config.sparsity
    importances = work.importances(plan, permuted.statistics)
    mask_weights(model, plan, importances, pattern)
    check_retained(permuted.retained, total_importance(model, plan, importances))
    if permuted.objective is not None and permuted.promised_loss is not None:
        with prepared.running(model) as running:
            mean = partial(permuted.objective.on(running).mean, running, prepared.samples)
            found = MicroBatch(work.config.micro_batch_size).run(mean)
        check_loss(permuted.promised_loss, found, model.dtype)


def updated(work: Work, prepared: Prepared, permuted: Permuted) -> dict[str, Any]:
    """Prunes the model and runs the parts of the weight update; without one, the model stays dense.

    Args:
        work: model, config and progress reporter.
        prepared: plan of the model, and what was measured on it.
        permuted: model with its channels in the new order.

    Returns:
        Part of the weight update -> what it reports, in the order in which they ran.

    Raises:
        PermTritonError: a Hessian cannot be inverted, training fails, or a check failed.
    """
    model, config, plan, parts = work.model, work.config, prepared.plan, work.config.updates
    weights = {name: linear_module(model, name).get_parameter("weight").detach() for _, name in plan.linears()}
    dense: dict[str, Tensor] = {}
    if "reconstruct" in parts:
        for name, weight in weights.items():
            dense[name] = work.empty(weight.shape, dtype=weight.dtype).copy_(weight)
    kind = update_objective(config, model)
    objective = permuted.objective if permuted.objective and permuted.objective.kind == kind else None
    if "distill" in parts and objective is None:
        objective = dense_objective(model, kind, prepared.samples, prepared.batch)
    reports: dict[str, Any] = {}
    if "sparsegpt" in parts:
        with work.timed("sparsegpt"):
            update_weights(
                model, plan, permuted.statistics, prepared.samples, prepared.batch, config, work.progress, work.empty
            )
            reports["sparsegpt"] = {"mask": config.update_mask}
    elif parts:
        mask(work, prepared, permuted)
    if "reconstruct" in parts:
        state = work.state(StateFile, "reconstruct")
        with work.timed("reconstruct"):
            found = reconstruct(model, plan, dense, prepared.samples, config, work.progress, state, work.offload)
            reports["reconstruct"] = found.report()
    if "distill" in parts:
        state = work.state(StateFile, "distill")
        with work.timed("distill"):
            assert objective is not None
            trained = distill(model, plan, prepared.samples, objective, config, work.progress, state)
            reports["distill"] = trained.report()
    return reports
