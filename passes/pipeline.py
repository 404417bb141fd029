"""The passes in their order, and the runner that checks each one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.edits import Move, moves_of
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import absorb_folds, copied, one_thread
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.lower import lower
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.passes.provenance import channel_unions
from permtriton.passes.verify_graph import check_channels, count_operators

Pass = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True)
class PassResult:
    name: str  # name of the pass
    graph_module: fx.GraphModule  # the rewritten graph; the next pass rewrites it again
    before: dict[str, int]  # operator -> number of nodes that call it, before the pass
    after: dict[str, int]  # the same after the pass

    @property
    def changes(self) -> dict[str, int]:
        """Operator -> change of the number of nodes that call it; only operators whose number changed."""
        names = sorted({*self.before, *self.after})
        counts = {name: self.after.get(name, 0) - self.before.get(name, 0) for name in names}
        return {name: count for name, count in counts.items() if count}


def permutation_passes(moves: Sequence[Move]) -> tuple[Pass, ...]:
    return (partial(insert_permutations, moves=moves), partial(fuse_permutations, moves=moves), cancel_permutations)


def pruning_passes(plan: Plan, importances: Mapping[str, ImportanceFactors]) -> tuple[Pass, ...]:
    """Returns the passes that turn a graph in its final order into one that multiplies packed N:M weights."""
    return partial(insert_masks, plan=plan, importances=importances), lower


# The passes of a compilation, in their order.
PASS_NAMES = ("insert_permutations", "fuse_permutations", "cancel_permutations", "insert_masks", "lower")


def run_with_stand_ins(
    plan: Plan,
    graph_module: fx.GraphModule,
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs all passes of a compilation with random permutations and masks by magnitude, without calibration.

    This shows what the passes do to a model, also on the meta device, where the model has no weights.
    """
    generator = torch.Generator().manual_seed(0)
    indices = {space.name: _random_index(space, generator) for space in plan.spaces if not space.frozen}
    device = next(graph_module.parameters()).device
    importances = {
        name: ImportanceFactors(1, torch.ones(site.channels, device=device)) for site, name in plan.linears()
    }
    permuted = run_passes(graph_module, permutation_passes(moves_of(plan, indices)), observe)
    return run_passes(absorb_folds(permuted), pruning_passes(plan, importances), observe)


def _random_index(space: ChannelSpace, generator: torch.Generator) -> Tensor:
    """Returns a random unit index, int64 ``[units]``, that permutes inside the segments of a space."""
    return torch.cat([start + torch.randperm(size, generator=generator) for start, size in space.spans])


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
        before = count_operators(graph_module)
        with one_thread():
            graph_module = apply(graph_module)
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
        check_channels(name, unions, channel_unions(graph_module))
        observe(PassResult(name, graph_module, before, count_operators(graph_module)))
    return graph_module
