"""The passes in their order, and the runner that proves each one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, fx

from permtriton.importance import Importance
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.channels import one_thread
from permtriton.passes.fuse_permutations import fuse_permutations
from permtriton.passes.graph import copied
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.insert_relaxation import insert_relaxation
from permtriton.passes.lower import lower
from permtriton.passes.verify_graph import Verifier, count_operators
from permtriton.plan import ChannelSpace, Plan
from permtriton.relaxation import Relaxation
from permtriton.sparsity import NMPattern


@dataclass(frozen=True)
class Pass:
    """A step of the compiler.

    Attributes:
        run: a plain function from graph module to graph module; it rewrites the one that it is given.
        exact: whether the outputs must stay as they were.
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
    """What the runner saw of one pass.

    Attributes:
        name: of the pass.
        graph_module: what it returned; the next pass rewrites it.
        before: nodes by operator before it.
        after: and after it.
        difference: largest relative difference of the outputs, where they were compared.
    """

    name: str
    graph_module: fx.GraphModule
    before: dict[str, int]
    after: dict[str, int]
    difference: float | None

    @property
    def changes(self) -> dict[str, int]:
        """Operator -> how many more of them there are; only those that changed."""
        names = sorted({*self.before, *self.after})
        counts = {name: self.after.get(name, 0) - self.before.get(name, 0) for name in names}
        return {name: count for name, count in counts.items() if count}


def permutation_passes(plan: Plan, indices: Mapping[str, Tensor], block_size: int | None = None) -> tuple[Pass, ...]:
    """The exact passes that reorder channels, inside blocks where their size is given, and change nothing else."""
    return (
        Pass(partial(insert_permutations, plan=plan, indices=indices, block_size=block_size)),
        Pass(partial(fuse_permutations, plan=plan, indices=indices)),
        Pass(cancel_permutations),
    )


def all_passes(
    plan: Plan, indices: Mapping[str, Tensor], importances: Mapping[str, Importance], pattern: NMPattern
) -> tuple[Pass, ...]:
    """The whole compiler: from the traced model to one that multiplies packed N:M weights."""
    return (
        Pass(partial(insert_permutations, plan=plan, indices=indices)),
        Pass(partial(insert_masks, plan=plan, importances=importances, pattern=pattern), exact=False),
        Pass(partial(fuse_permutations, plan=plan, indices=indices)),
        Pass(cancel_permutations),
        Pass(lower),
    )


def learning_passes(
    plan: Plan,
    spaces: Sequence[ChannelSpace],
    relaxation: Relaxation,
    tau: float,
    importances: Mapping[str, Importance],
    pattern: NMPattern,
) -> tuple[Pass, ...]:
    """From the model in base order to the graph that learns: its masks' order comes from logits."""
    relaxed = partial(insert_relaxation, plan=plan, spaces=spaces, relaxation=relaxation, tau=tau)
    return (
        Pass(partial(insert_masks, plan=plan, importances=importances, pattern=pattern), exact=False),
        Pass(relaxed, exact=False),
        Pass(lower),
    )


# In the order of `all_passes`.
PASS_NAMES = ("insert_permutations", "insert_masks", "fuse_permutations", "cancel_permutations", "lower")


def stand_in_passes(plan: Plan, graph_module: fx.GraphModule, pattern: NMPattern, seed: int = 0) -> tuple[Pass, ...]:
    """The whole compiler with random permutations and masks by magnitude, for a model that nothing was learned for."""
    generator = torch.Generator().manual_seed(seed)
    indices = {}
    for space in plan.spaces:
        if not space.frozen:
            starts = [0, *accumulate(space.segments)]
            parts = [
                start + torch.randperm(n, generator=generator) for start, n in zip(starts, space.segments, strict=False)
            ]
            indices[space.name] = torch.cat(parts)
    device = next(graph_module.parameters()).device
    importances = {name: Importance(1, torch.ones(site.channels, device=device)) for site, name in plan.linears()}
    return all_passes(plan, indices, importances, pattern)


def run_passes(
    graph_module: fx.GraphModule,
    passes: Sequence[Pass],
    batches: Sequence[Tensor] = (),
    observe: Callable[[PassResult], None] = lambda result: None,
) -> fx.GraphModule:
    """Runs passes one after another: dead nodes removed, linted, recompiled, counted and verified after each.

    Args:
        graph_module: the traced model.
        passes: as from `all_passes`.
        batches: token ids ``[1, tokens]`` of the traced length, on which exact passes must give the same outputs; where
            there are none (a model without weights) the structure alone is verified.
        observe: told of each pass.

    Returns:
        The last graph, a copy; parameters are shared with the first.

    Raises:
        VerificationError: a pass broke the graph; it names the pass and the node.
    """
    graph_module = copied(graph_module)
    graph_module.graph.eliminate_dead_code()
    verifier = Verifier(graph_module, batches)
    for step in passes:
        before = count_operators(graph_module)
        with one_thread():
            graph_module = step.run(graph_module)
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
        difference = verifier.check(step.name, graph_module, exact=step.exact)
        observe(PassResult(step.name, graph_module, before, count_operators(graph_module), difference))
    return graph_module
