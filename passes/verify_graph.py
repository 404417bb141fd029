"""The checks of passes: the structure of the graph always, its outputs where it has weights.

The structure is checked on channel ids: after passes, the graph must join the same channels as before it, whatever
their order. A permutation that is inserted and not undone, folded into one producer and not into another, or applied to
the wrong columns, is found at the first node that joins two channels which were not joined before.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from permtriton.data.samples import Inputs, Samples
from permtriton.errors import VerificationError
from permtriton.model.checks import TOLERANCE, allowed_difference, relative_difference, with_rounding
from permtriton.passes.graph import NM_MASK, WEIGHT_PRODUCTS
from permtriton.passes.provenance import Unions, channel_unions

SMALL = 1 << 24  # graphs with up to this many parameters are compared in float64 on a CPU
BUG = ". Nothing was saved; this is a bug of permtriton, please report it with the output of permtriton inspect"


class Verifier:
    """Compares a graph after passes with the graph before them.

    Args:
        batches: Samples of the traced shapes; none to check only the structure.
    """

    def __init__(self, graph_module: fx.GraphModule, batches: Sequence[Inputs] = ()) -> None:
        self._batches = list(batches)
        self._before = copy.deepcopy(graph_module.graph) if self._batches else graph_module.graph
        self._unions: Unions = channel_unions(graph_module)
        self._outputs = [run(graph_module, batch) for batch in self._batches]

    def check(self, name: str, after: fx.GraphModule, *, exact: bool) -> float | None:
        """Checks the graph that passes returned.

        Args:
            exact: Whether the outputs must be the same; otherwise they must be the same with all masks off.

        Returns:
            The largest difference of the outputs relative to their size; None where they were not compared.

        Raises:
            VerificationError: The graph is wrong; the message names the pass and the node.
        """
        self._check_channels(name, after)
        outputs = [run(after, batch) for batch in self._batches]
        if exact:
            return self._compare(name, after, self._outputs, outputs, masks=True)
        with torch.no_grad():
            expected = [_Recorder(after, graph=self._before, masks=False).outputs(b)[0] for b in self._batches]
            unmasked = [_Recorder(after, masks=False).outputs(b)[0] for b in self._batches]
        return self._compare(name, after, expected, unmasked, masks=False)

    def _check_channels(self, name: str, after: fx.GraphModule) -> None:
        unions = channel_unions(after)
        if unions.partition() != self._unions.partition():
            raise VerificationError(f"pass {name}: {_other_channels(self._unions, unions)}" + BUG)

    def _compare(
        self, name: str, after: fx.GraphModule, before: Sequence[Tensor], outputs: Sequence[Tensor], *, masks: bool
    ) -> float | None:
        """Returns the largest difference of the outputs, or None where there are none."""
        largest = None
        for batch, expected, got in zip(self._batches, before, outputs, strict=True):
            difference, tolerance = relative_difference(expected, got), TOLERANCE[got.dtype]
            if not difference <= tolerance:
                with torch.no_grad():
                    rounded = _Recorder(after, masks=masks, rounded=True).outputs(batch)[0]
                tolerance = allowed_difference(got.dtype, relative_difference(got, rounded))
            if not difference <= tolerance:  # NaN, too, is refused
                node = first_difference(self._before, after, batch, tolerance)
                raise VerificationError(
                    f"pass {name}: outputs differ by {difference:.1e} of their size, more than {tolerance:.0e}; the "
                    f"first node whose values differ is {node}, or one before it" + BUG
                )
            largest = max(largest or 0.0, difference)
        return largest


def _other_channels(before: Unions, after: Unions) -> str:
    """Returns how the channels that a graph joins after a pass differ from those before it."""
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


@torch.no_grad()
def run(graph_module: fx.GraphModule, batch: Inputs, *, wide: bool = True) -> Tensor:
    """Returns a graph's first output.

    Args:
        wide: Whether to run a small graph on a CPU in float64, and others in float32 where their dtype is narrower.
    """
    return _Recorder(graph_module, wide=wide).outputs(batch)[0]


@torch.no_grad()
def first_difference(before: fx.Graph, after: fx.GraphModule, batch: Inputs, tolerance: float) -> str:
    """Returns the name of the first node that both graphs have and whose values differ, apart from their order.

    Args:
        tolerance: Largest difference relative to a node's largest value.
    """
    recorders = [_Recorder(after, graph=before, record=True), _Recorder(after, record=True)]
    for recorder in recorders:
        recorder.outputs(batch)
    expected, got = recorders[0].seen, recorders[1].seen
    for name, value in expected.items():
        if name in got and not relative_difference(value, got[name]) <= tolerance:
            return name
    return "the output"


class _Recorder(fx.Interpreter):
    """Runs a graph in a wide dtype, since rounding would hide small errors and send tokens to other experts.

    Args:
        graph: The graph to run; None runs that of the module.
        wide: Whether to run a small graph on a CPU in float64, and others in float32 where their dtype is narrower.
        record: Whether to record the values of each node.
        masks: Whether to apply the N:M masks.
        rounded: Whether to round products anew, as sums in another order would be.

    Attributes:
        seen: Node name -> its values, float64, sorted: a permutation does not change them.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        *,
        graph: fx.Graph | None = None,
        wide: bool = True,
        record: bool = False,
        masks: bool = True,
        rounded: bool = False,
    ) -> None:
        super().__init__(graph_module, graph=graph)
        parameters = list(graph_module.parameters())
        small = sum(p.numel() for p in parameters) <= SMALL and all(p.device.type == "cpu" for p in parameters)
        self._narrow: set[torch.dtype] = set()
        if wide:
            self._narrow = {torch.float16, torch.bfloat16} | ({torch.float32} if small else set())
        self._dtype = torch.float64 if small else torch.float32
        self._record, self._masks = record, masks
        self._generator = torch.Generator().manual_seed(0) if rounded else None
        self.seen: dict[str, Tensor] = {}

    def outputs(self, batch: Inputs) -> Any:
        """Runs the graph; its placeholders are called as the arguments of the model's ``forward``."""
        given = Samples.of(batch).inputs
        return self.run(*[given[str(node.target)] for node in self.graph.nodes if node.op == "placeholder"])

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor) and value.is_floating_point():
            if self._generator is not None and n.target in WEIGHT_PRODUCTS:
                value = with_rounding(value, self._generator)
            if self._record:
                self.seen[n.name] = value.double().flatten().sort().values
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is NM_MASK and not self._masks:
            return args[0]
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._widened)
        return super().call_function(target, args, kwargs)

    def _widened(self, value: Any) -> Any:
        """Widens a tensor where it is used, so that one parameter is wide at a time, and dtypes among arguments."""
        if isinstance(value, Tensor) and value.dtype in self._narrow:
            return value.to(self._dtype)
        return self._dtype if isinstance(value, torch.dtype) and value in self._narrow else value
