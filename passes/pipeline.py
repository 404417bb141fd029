"""The passes in their order, and the runner that proves each one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from permtriton.data.samples import Inputs
from permtriton.errors import VerificationError
from permtriton.kernels.importance import ImportanceFactors
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.edits import Move, moves_of
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import absorb_folds, copied, one_thread
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.lower import lower
from permtriton.passes.plan import ChannelSpace, Plan
from permtriton.passes.verify_graph import Verifier, count_operators


@dataclass(frozen=True)
class Pass:
    """A step of the compiler.

    Attributes:
        run: Plain function that rewrites a graph module and returns it.
        exact: Whether the graph must give the same outputs as before.
    """

    run: Callable[[fx.GraphModule], fx.GraphModule]
    exact: bool = True

    @property
    def name(self) -> str:
        """The function's name."""
        function = self.run.func if isinstance(self.run, partial) else self.run
        return function.__name__


@dataclass(frozen=True)
class PassResult:
    """The result of one pass.

    Attributes:
        name: Name of the pass.
        graph_module: The rewritten graph; the next pass rewrites it again.
        before: Operator -> number of nodes that call it, before the pass.
        after: The same after the pass.
        difference: Largest difference of the outputs relative to their size from those before the passes that were
            verified with it, of which it is the last; None where they were not compared.
    """

    name: str
    graph_module: fx.GraphModule
    before: dict[str, int]
    after: dict[str, int]
    difference: float | None

    @property
    def changes(self) -> dict[str, int]:
        """Operator -> change of the number of nodes that call it; only operators whose number changed."""
        names = sorted({*self.before, *self.after})
        counts = {name: self.after.get(name, 0) - self.before.get(name, 0) for name in names}
        return {name: count for name, count in counts.items() if count}


def permutation_passes(moves: Sequence[Move]) -> tuple[Pass, ...]:
    """Returns the exact passes, which reorder channels and change nothing else."""
    return (
        Pass(partial(insert_permutations, moves=moves)),
        Pass(partial(fuse_permutations, moves=moves)),
        Pass(cancel_permutations),
    )


def pruning_passes(
    plan: Plan, importances: Mapping[str, ImportanceFactors], *, exact: bool = False
) -> tuple[Pass, ...]:
    """Returns the passes from a graph in its final order to one that multiplies packed N:M weights.

    Args:
        exact: Whether the weights are N:M already, so that the masks change nothing.
    """
    return (
        Pass(partial(insert_masks, plan=plan, importances=importances), exact=exact),
        Pass(lower),
    )


# The passes of a compilation, in their order.
PASS_NAMES = ("insert_permutations", "fuse_permutations", "cancel_permutations", "insert_masks", "lower")


def run_with_stand_ins(
    plan: Plan,
    graph_module: fx.GraphModule,
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs all passes of a compilation with random permutations and masks by magnitude, without calibration.

    This shows what the passes do to a model, also on the meta device, where the model has no weights.

    Returns:
        The lowered graph.

    Raises:
        VerificationError: A pass broke the graph.
    """
    generator = torch.Generator().manual_seed(0)
    indices = {space.name: _random_index(space, generator) for space in plan.spaces if not space.frozen}
    device = next(graph_module.parameters()).device
    importances = {
        name: ImportanceFactors(1, torch.ones(site.channels, device=device)) for site, name in plan.linears()
    }
    permuted = run_passes(graph_module, permutation_passes(moves_of(plan, indices)), observe=observe)
    return run_passes(absorb_folds(permuted), pruning_passes(plan, importances), observe=observe)


def _random_index(space: ChannelSpace, generator: torch.Generator) -> Tensor:
    """Returns a random unit index, int64 ``[units]``, that permutes inside the segments of a space."""
    return torch.cat([start + torch.randperm(size, generator=generator) for start, size in space.spans])


def run_passes(
    graph_module: fx.GraphModule,
    passes: Sequence[Pass],
    batches: Sequence[Inputs] = (),
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs passes on a copy of a graph. After each, removes dead nodes, lints and recompiles.

    Exact passes that follow one another are verified together. Where they are wrong, they run again, each verified
    alone, so that the error names the one that is.

    Args:
        graph_module: The graph to start from; unchanged on return.
        passes: Passes, such as those from `permutation_passes`.
        batches: Samples of the traced shapes, on which exact passes must give the same outputs. If
            there are none (on the meta device), only the structure is verified.

    Returns:
        The graph after the last pass; its parameters are shared with ``graph_module``.

    Raises:
        VerificationError: A pass broke the graph; the message names the pass and the node.
    """
    for together in _verified_together(passes):
        try:
            after = _verified(graph_module, together, batches, observe)
        except VerificationError:
            for alone in together if len(together) > 1 else ():
                graph_module = _verified(graph_module, [alone], batches, lambda result: None)
            raise
        graph_module = after
    return graph_module


def _verified_together(passes: Sequence[Pass]) -> list[list[Pass]]:
    parts: list[list[Pass]] = []
    for each in passes:
        if parts and each.exact and parts[-1][-1].exact:
            parts[-1].append(each)
        else:
            parts.append([each])
    return parts


def _verified(
    graph_module: fx.GraphModule,
    passes: Sequence[Pass],
    batches: Sequence[Inputs],
    observe: Callable[[PassResult], None],
) -> fx.GraphModule:
    graph_module = copied(graph_module)
    graph_module.graph.eliminate_dead_code()
    verifier = Verifier(graph_module, batches)
    for each in passes:
        before = count_operators(graph_module)
        with one_thread():
            graph_module = each.run(graph_module)
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
        difference = verifier.check(each.name, graph_module, exact=each.exact) if each is passes[-1] else None
        observe(PassResult(each.name, graph_module, before, count_operators(graph_module), difference))
    return graph_module
