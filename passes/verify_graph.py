"""What the runner checks after every pass: the structure of the graph always, its numbers where it has weights.

The structure is checked on channel ids: an exact rewriting joins the same channels as the graph before it, whatever
their order. So a permutation that is inserted and not undone, folded into one producer and not the other, or applied to
the wrong columns, shows at the first node that joins two channels that were apart.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.errors import VerificationError
from permtriton.passes.graph import NM_MASK, NORM_PERMUTE, PERMUTE, RUNS, index_value, is_index
from permtriton.passes.provenance import Unions, channel_unions
from permtriton.passes.verify import TOLERANCE, relative_difference
from permtriton.permutation import is_permutation

SMALL = 1 << 24  # parameters up to which graphs are compared in float64 on a CPU
BUG = ". Nothing was saved; this is a bug of permtriton, please report it with the output of permtriton inspect"


class Verifier:
    """Holds what a graph must still do after the next pass.

    Args:
        graph_module: before any pass.
        batches: token ids of the traced shape; none to check the structure alone.
    """

    def __init__(self, graph_module: fx.GraphModule, batches: Sequence[Tensor] = ()) -> None:
        self._batches = list(batches)
        self._remember(graph_module)
        self._unions: Unions = channel_unions(graph_module)
        self._outputs = [run(graph_module, batch) for batch in self._batches]

    def check(self, name: str, after: fx.GraphModule, *, exact: bool) -> float | None:
        """Checks what a pass returned, which the next pass is then compared with.

        Returns:
            The largest difference of the outputs relative to their size, for an inexact pass with all masks off; None
            where they were not compared.

        Raises:
            VerificationError: naming the pass and the node.
        """
        for problem in index_problems(after):
            raise VerificationError(f"pass {name}: {problem}" + BUG)
        unions = channel_unions(after)
        if unions.partition() != self._unions.partition():
            raise VerificationError(f"pass {name}: {_other_channels(self._unions, unions)}" + BUG)
        outputs = [run(after, batch) for batch in self._batches]
        if exact:
            difference = self._compare(name, after, self._outputs, outputs)
        else:  # without its masks, an approximate pass is exact too
            with torch.no_grad():
                expected = [_Recorder(after, graph=self._before, masks=False).run(b)[0] for b in self._batches]
                unmasked = [_Recorder(after, masks=False).run(b)[0] for b in self._batches]
            difference = self._compare(name, after, expected, unmasked)
        self._unions, self._outputs = unions, outputs
        self._remember(after)
        return difference

    def _remember(self, graph_module: fx.GraphModule) -> None:
        self._before = copy.deepcopy(graph_module.graph) if self._batches else graph_module.graph

    def _compare(
        self, name: str, after: fx.GraphModule, before: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> float | None:
        largest = None
        for batch, expected, got in zip(self._batches, before, outputs, strict=True):
            tolerance = TOLERANCE[got.dtype]
            difference = relative_difference(expected, got)
            if not difference <= tolerance:
                node = first_difference(self._before, after, batch, tolerance)
                raise VerificationError(
                    f"pass {name}: outputs differ by {difference:.1e} of their size, more than {tolerance:.0e}; the "
                    f"first node whose values differ is {node}, or one before it" + BUG
                )
            largest = max(largest or 0.0, difference)
        return largest


def _other_channels(before: Unions, after: Unions) -> str:
    """What the graph before a pass and the one after it do not join alike."""
    if before.parameters != after.parameters:
        return f"only one of the graphs before and after it reads {min(before.parameters ^ after.parameters)}"
    if node := after.first_new(before):
        return (
            f"node {node} joins channels that are different ones in the graph before it: a permutation is not undone, "
            "or folded in one place and not in another"
        )
    return f"nothing joins the channels any more that node {before.first_new(after)} joins in the graph before it"


def index_problems(graph_module: fx.GraphModule) -> list[str]:
    """Returns what is wrong with a graph's permutations: no bijection, across a head, or of another length."""
    found = []
    for node in graph_module.graph.nodes:
        if is_index(node):
            found += [f"index {node.name} {problem}" for problem in _problems_of(node)]
        elif node.target in (PERMUTE, NORM_PERMUTE):
            index = node.args[3 if node.target is NORM_PERMUTE else 1]
            dim = node.args[2] if node.target is PERMUTE and len(node.args) > 2 else -1
            size, length = node.args[0].meta["val"].shape[dim], index.meta["val"].numel()
            if size != length:
                found.append(f"node {node.name} gathers {size} channels with an index of {length}")
    return found


def _problems_of(node: fx.Node) -> list[str]:
    index = index_value(node)
    if not is_permutation(index):
        return ["is no permutation"]
    start, runs = 0, node.meta.get(RUNS) or ()
    for size in runs:
        part = index[start : start + size]
        if int(part.min()) != start or int(part.max()) != start + size - 1:
            return [f"moves channels out of the run {start} to {start + size - 1} (a head, or a block)"]
        start += size
    return []


def count_operators(graph_module: fx.GraphModule) -> dict[str, int]:
    """Returns how many nodes call each operator."""
    return dict(Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"))


@torch.no_grad()
def run(graph_module: fx.GraphModule, ids: Tensor, *, wide: bool = True) -> Tensor:
    """Returns a graph's first output on token ids, where ``wide`` in float64 if it is small, at least in float32."""
    return _Recorder(graph_module, wide=wide).run(ids)[0]


@torch.no_grad()
def first_difference(before: fx.Graph, after: fx.GraphModule, ids: Tensor, tolerance: float) -> str:
    """Returns the name of the first node that both graphs have and whose values differ, whatever their order.

    Args:
        before: an earlier graph of the same module.
        after: the module with its present graph.
        ids: token ids of the traced shape.
        tolerance: relative to a node's largest value.
    """
    recorders = [_Recorder(after, graph=before, record=True), _Recorder(after, record=True)]
    for recorder in recorders:
        recorder.run(ids)
    expected, got = recorders[0].seen, recorders[1].seen
    for name, value in expected.items():
        if name in got and not relative_difference(value, got[name]) <= tolerance:
            return name
    return "the output"


class _Recorder(fx.Interpreter):
    """Runs a graph, where ``wide`` in float64 if it is small, at least in float32; may keep each node's values, sorted.

    Rounding would hide small errors in narrow types, and send tokens to other experts.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        *,
        graph: fx.Graph | None = None,
        wide: bool = True,
        record: bool = False,
        masks: bool = True,
    ) -> None:
        super().__init__(graph_module, graph=graph)
        parameters = list(graph_module.parameters())
        small = sum(p.numel() for p in parameters) <= SMALL and all(p.device.type == "cpu" for p in parameters)
        self._narrow: set[torch.dtype] = set()
        if wide:
            self._narrow = {torch.float16, torch.bfloat16} | ({torch.float32} if small else set())
        self._dtype = torch.float64 if small else torch.float32
        self._record, self._masks = record, masks
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._record and n.op == "call_function" and isinstance(value, Tensor) and value.is_floating_point():
            self.seen[n.name] = value.double().flatten().sort().values
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to(self._widened(value.dtype)) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is NM_MASK and not self._masks:
            return args[0]
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._widened)
        return super().call_function(target, args, kwargs)

    def _widened(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in self._narrow else value
