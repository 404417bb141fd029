"""The checks of passes: after each one, the graph must join the same channels as before, whatever their order.

A permutation that is inserted and not undone, folded into one producer and not into another, or applied to the wrong
columns, is found at the first node that joins two channels which were not joined before.
"""

from collections import Counter

from torch import fx

from permtriton.errors import VerificationError
from permtriton.passes.provenance import Unions

BUG = ". Nothing was saved; this is a bug in permtriton, please report it with the output of permtriton inspect"


def check_channels(name: str, before: Unions, after: Unions) -> None:
    """Checks that a graph joins the same channels after a pass, called ``name``, as before it."""
    if after.partition() != before.partition():
        raise VerificationError(f"pass {name}: {_other_channels(before, after)}{BUG}")


def _other_channels(before: Unions, after: Unions) -> str:
    """Returns how the channels that a graph joins after a pass differ from those joined before it."""
    if before.parameters != after.parameters:
        return f"only one of the graphs before and after it reads {min(before.parameters ^ after.parameters)}"
    if node := after.first_new(before):
        return (
            f"node {node} joins channels that were not joined before the pass: a permutation is not undone, or folded "
            "into one parameter and not into another"
        )
    return f"the channels that node {before.first_new(after)} joined before the pass are not joined any more"


def count_operators(graph_module: fx.GraphModule) -> dict[str, int]:
    """Returns operator -> number of nodes that call it."""
    return dict(Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"))
