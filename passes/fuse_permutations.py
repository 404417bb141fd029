"""Moves every permutation as far upstream as channel provenance allows, as the plan's layout has decided:

1. *fold*: into the rows, biases, norm vectors and embedding columns that produce the channels, and the columns of all
   other linears that read them. Nothing is left to do at run time.
2. *in the norm*: the norm before the site writes its channels in the site's order.
3. *gather*: the permutation stays before the linears, because a barrier or a residual stream is upstream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from permtriton.passes.graph import (
    NORM_PERMUTE,
    PERMUTE,
    SITE,
    Constants,
    argument,
    call_before,
    input_dim,
    norm_input,
    parameter_nodes,
    products,
    source_of,
    tail,
    wrap,
)
from permtriton.plan import ChannelSpace, Norm, Plan, Site

DECISIONS = "permtriton_decisions"  # key in the graph module's meta


@dataclass(frozen=True)
class Decision:
    """Where one space's permutation went.

    Attributes:
        space: its name.
        sites: the sites that it orders.
        where: in words.
    """

    space: str
    sites: tuple[str, ...]
    where: str


def fuse_permutations(graph_module: fx.GraphModule, *, plan: Plan, indices: Mapping[str, Tensor]) -> fx.GraphModule:
    """Folds or fuses the permutations that `insert_permutations` put there, and notes each decision.

    Args:
        graph_module: the graph with permutations inserted.
        plan: of the model; its axes and norms say what provenance allows.
        indices: the unit indices that were inserted.

    Returns:
        The graph; ``meta["permtriton_decisions"]`` holds a `Decision` for every space of the plan.
    """
    constants, parameters = Constants(graph_module), parameter_nodes(graph_module)
    inserted: dict[str, list[fx.Node]] = {site.name: [] for site in plan.sites}
    for node in graph_module.graph.nodes:
        if SITE in node.meta:
            inserted[node.meta[SITE]].append(node)
    decisions = []
    for space in plan.spaces:
        sites = plan.sites_of(space)
        index = indices.get(space.name)
        permuted = [node for site in sites for node in inserted[site.name]]
        if space.frozen or index is None:
            where = f"no permutation: {space.frozen or 'it keeps its order'}"
        elif not space.at_run_time:
            where = _fold(parameters, constants, space, sites, index, permuted)
        elif sites[0].norm is not None:
            where = _into_norm(parameters, constants, sites[0], sites[0].norm, index, permuted)
        else:
            where = f"a gather before {', '.join(sites[0].linears)}: what else reads its channels keeps their order"
        decisions.append(Decision(space.name, tuple(site.name for site in sites), where))
    graph_module.meta[DECISIONS] = decisions
    return graph_module


def _fold(
    parameters: Mapping[str, fx.Node],
    constants: Constants,
    space: ChannelSpace,
    sites: list[Site],
    index: Tensor,
    permuted: list[fx.Node],
) -> str:
    columns = {f"{name}.weight" for site in sites for name in site.linears}
    folded = 0
    for axis in space.axes:
        node = parameters.get(axis.parameter)
        if node is None or (axis.reads and axis.parameter in columns):
            continue
        whole = axis.units.numel() == space.units and _in_order(axis.units)
        order = constants.index(axis.expand(index), space.segments if whole else None)
        wrap(tail(node), PERMUTE, (order, axis.dim), node.meta["val"])
        folded += 1
    for node in permuted:
        node.replace_all_uses_with(argument(node, 0))
    return f"folded into {folded} parameters"


def _in_order(units: Tensor) -> bool:
    return bool((units >= 0).all()) and bool((units.diff() >= 0).all())


def _into_norm(
    parameters: Mapping[str, fx.Node],
    constants: Constants,
    site: Site,
    norm: Norm,
    index: Tensor,
    permuted: list[fx.Node],
) -> str:
    order = constants.index(site.expand(index), [site.channels])
    source = source_of(argument(permuted[0], 0))
    readers = 0
    for axis in site.space.axes:
        if axis.parameter in {f"{name}.weight" for name in site.linears}:
            continue
        weight = parameters[axis.parameter]
        assert axis.dim == input_dim(weight)
        wrap(tail(weight), PERMUTE, (order, axis.dim))
        readers += len(list(products(weight)))
    if source.target is NORM_PERMUTE:
        wrap(source, PERMUTE, (order,))
    else:
        vectors = (parameters.get(f"{norm.module}.{vector}") for vector in ("weight", "bias"))
        arguments = (norm_input(source, norm.module), *vectors, order, norm.eps, norm.offset, norm.kind)
        source.replace_all_uses_with(call_before(source, NORM_PERMUTE, arguments, source.meta["val"]))
    for node in permuted:
        node.replace_all_uses_with(argument(node, 0))
    return f"in the norm {norm.module}" + (f", with the columns of {readers} other readers" if readers else "")
