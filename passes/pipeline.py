"""The passes in their order, and the runner that checks each one.

After each pass, the graph must join the same channels as before, whatever their order. A permutation that is inserted
and not undone, folded into one producer and not into another, or applied to the wrong columns, shows at the first node
that joins two channels which were not joined before.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from permtriton.errors import VerificationError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.edits import Move, moves_of
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import absorb_folds, copied, one_thread
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.lower import lower
from permtriton.passes.plan import Plan
from permtriton.passes.provenance import Unions, channel_unions

Pass = Callable[[fx.GraphModule], fx.GraphModule]
BUG = ". Nothing was saved; this is a bug in permtriton, please report it with the output of permtriton inspect"


@dataclass(frozen=True)
class PassResult:
    name: str  # name of the pass
    graph_module: fx.GraphModule  # the rewritten graph; the next pass rewrites it again
    changes: dict[str, int]  # operator -> change of the number of nodes that call it, where that is not 0


def permutation_passes(moves: Sequence[Move]) -> tuple[Pass, ...]:
    return (partial(insert_permutations, moves=moves), partial(fuse_permutations, moves=moves), cancel_permutations)


def pruning_passes(plan: Plan, importances: Mapping[str, ImportanceFactors]) -> tuple[Pass, ...]:
    """Returns the passes that turn a graph in its final order into one that multiplies packed N:M weights."""
    return partial(insert_masks, plan=plan, importances=importances), lower


def run_with_stand_ins(
    plan: Plan,
    graph_module: fx.GraphModule,
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs all passes of a compilation with random permutations and masks by magnitude, without calibration.

    This shows what the passes do to a model, also on the meta device, where the model has no weights.
    """
    generator = torch.Generator().manual_seed(0)
    indices = {
        space.name: torch.cat([start + torch.randperm(size, generator=generator) for start, size in space.spans])
        for space in plan.spaces
        if not space.frozen
    }
    device = next(graph_module.parameters()).device
    importances = {
        name: ImportanceFactors(1, torch.ones(site.channels, device=device)) for site, name in plan.linears()
    }
    permuted = run_passes(graph_module, permutation_passes(moves_of(plan, indices)), observe)
    return run_passes(absorb_folds(permuted), pruning_passes(plan, importances), observe)


def run_passes(
    graph_module: fx.GraphModule,
    passes: Sequence[Pass],
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs passes on a copy of a graph. After each, removes dead nodes, lints, recompiles and compares channels.

    Returns:
        The graph after the last pass; its parameters are shared with ``graph_module``.
    """
    graph_module = copied(graph_module)
    graph_module.graph.eliminate_dead_code()
    unions = channel_unions(graph_module)
    for apply in passes:
        name = (apply.func if isinstance(apply, partial) else apply).__name__
        before = _count_operators(graph_module)
        with one_thread():
            graph_module = apply(graph_module)
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
        check_channels(name, unions, channel_unions(graph_module))
        after = _count_operators(graph_module)
        after.subtract(before)
        observe(PassResult(name, graph_module, {operator: n for operator, n in sorted(after.items()) if n}))
    return graph_module


def check_channels(name: str, before: Unions, after: Unions) -> None:
    """Checks that a graph joins the same channels after a pass, called ``name``, as before it."""
    if before.parameters != after.parameters:
        problem = f"only one of the graphs before and after it reads {min(before.parameters ^ after.parameters)}"
    elif node := after.first_new(before):
        problem = (
            f"node {node} joins channels that were not joined before the pass: a permutation is not undone, or folded "
            "into one parameter and not into another"
        )
    elif node := before.first_new(after):
        problem = f"the channels that node {node} joined before the pass are not joined any more"
    else:
        return
    raise VerificationError(f"pass {name}: {problem}{BUG}")


def _count_operators(graph_module: fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
