"""The passes in their order, and the runner that checks each one.

After each pass, the graph must join the same channels as before, whatever their order. A permutation that is inserted
and not undone, folded into one producer and not into another, or applied to the wrong columns, shows at the first node
that joins two channels which were not joined before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import fx

from permtriton.errors import VerificationError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import copied, one_thread
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.lower import lower
from permtriton.passes.plan import Plan
from permtriton.passes.provenance import Unions, channel_unions
from permtriton.passes.weight_folds import Move

Pass = Callable[[fx.GraphModule], fx.GraphModule]
BUG = ". Nothing was saved; this is a bug in permtriton, please report it with the output of permtriton inspect"


def permutation_passes(moves: Sequence[Move]) -> tuple[Pass, ...]:
    return (partial(insert_permutations, moves=moves), partial(fuse_permutations, moves=moves), cancel_permutations)


def pruning_passes(plan: Plan, importances: Mapping[str, ImportanceFactors]) -> tuple[Pass, ...]:
    """Returns the passes that turn a graph in its final order into one that multiplies packed N:M weights."""
    return partial(insert_masks, plan=plan, importances=importances), lower


def run_passes(graph_module: fx.GraphModule, passes: Sequence[Pass]) -> fx.GraphModule:
    """Runs passes on a copy of a graph. After each, removes dead nodes, lints, recompiles and compares channels.

    Returns:
        The graph after the last pass; its parameters are shared with ``graph_module``.
    """
    graph_module = copied(graph_module)
    graph_module.graph.eliminate_dead_code()
    unions = channel_unions(graph_module)
    for apply in passes:
        name = (apply.func if isinstance(apply, partial) else apply).__name__
        with one_thread():
            graph_module = apply(graph_module)
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
        check_channels(name, unions, channel_unions(graph_module))
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
