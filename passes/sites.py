"""From channel provenance to the plan: sites, the channel spaces that order them, and what is left alone and why."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, fx, nn

from permtriton.errors import ModelError
from permtriton.passes.channels import one_thread
from permtriton.passes.provenance import LinearCall, Provenance
from permtriton.passes.unseen import Unseen, layer_of
from permtriton.plan import LINEAR_MODULES, Axis, ChannelSpace, Plan, Site
from permtriton.sparsity import NMPattern


@one_thread()
def find_sites(
    provenance: Provenance,
    model: nn.Module,
    hidden: fx.Node,
    pattern: NMPattern,
    *,
    skip_indivisible: bool = False,
) -> Plan:
    """Decides which linears are pruned, groups them into sites and finds each site's permutable channels.

    Args:
        provenance: of the exported model.
        model: the model itself, for its module types.
        hidden: graph node of the last hidden state; only linears that feed it are pruned.
        pattern: the sparsity pattern; input channels must be a multiple of its group.
        skip_indivisible: leave other linears dense instead of refusing the model.

    Raises:
        ModelError: a linear's input channels are not a multiple of the group, or nothing can be pruned.
    """
    skipped: dict[str, str] = {}
    by_source: dict[fx.Node, list[LinearCall]] = defaultdict(list)
    for call in _prunable(provenance, model, _ancestors(hidden), pattern, skip_indivisible, skipped):
        by_source[call.source].append(call)
    _list_the_rest(model, provenance, skipped)
    if not by_source:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise ModelError(f"no linear layer of this model can be pruned ({reasons or 'it has none'})")
    builder = _SpaceBuilder(provenance, pattern)
    sites = [builder.site(model, calls) for calls in by_source.values()]
    spaces = builder.finish(sites)
    hidden = builder.locate(provenance.hidden)
    unseen = Unseen(model, {parameter for parameter, _ in provenance.axes})
    for space in spaces:
        if not space.frozen:
            readers = [site for site in sites if site.space is space]
            space.frozen = unseen.reach([axis.parameter for axis in space.axes], readers)
    return Plan(sites, spaces, skipped, provenance.barriers, *hidden, unseen=tuple(unseen.sizes))


def _prunable(
    provenance: Provenance,
    model: nn.Module,
    feeding: set[fx.Node],
    pattern: NMPattern,
    skip_indivisible: bool,
    skipped: dict[str, str],
) -> Iterable[LinearCall]:
    seen: set[str] = set()
    for call in provenance.linears:
        owner, _, attribute = call.parameter.rpartition(".")
        module = model.get_submodule(owner)
        channels = provenance.axes[call.parameter, call.in_dim].size
        if isinstance(module, nn.Embedding):
            skipped.setdefault(call.parameter, "output head, tied to the embedding")
        elif not isinstance(module, LINEAR_MODULES) or attribute != "weight":
            skipped.setdefault(call.parameter, f"weight of a {type(module).__name__}, not of a linear layer")
        elif call.node not in feeding:
            skipped.setdefault(owner, "does not feed the last hidden state (output head or pooler)")
        elif channels % pattern.group:
            reason = f"its {channels} input channels are not a multiple of {pattern.group} ({pattern} sparsity)"
            if not skip_indivisible:
                raise ModelError(
                    f"{owner}: {reason}; choose another pattern, or leave it dense with --skip-indivisible"
                )
            skipped.setdefault(owner, reason)
        elif provenance.axes[call.parameter, 1 - call.in_dim].size == 1:
            skipped.setdefault(owner, "a single output: a gate, not a layer")
        elif owner not in seen:
            seen.add(owner)
            yield call


def _list_the_rest(model: nn.Module, provenance: Provenance, skipped: dict[str, str]) -> None:
    called = {call.parameter for call in provenance.linears}
    touched = {parameter for parameter, _ in provenance.axes}
    for name, module in model.named_modules():
        if isinstance(module, LINEAR_MODULES) and f"{name}.weight" not in called:
            tied = any(module.weight is p for n, p in model.named_parameters() if n in called)
            if not tied:
                unknown = "its weight is read by an operator that is not understood"
                unused = "not used when the model runs on token ids"
                skipped.setdefault(name, unknown if f"{name}.weight" in touched else unused)
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if parameter.ndim > 2:
                skipped.setdefault(parameter_name, f"{parameter.ndim}-dimensional weight of a {type(module).__name__}")


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


class _SpaceBuilder:
    """Groups the labels of site inputs into channel spaces, a label belonging to at most one."""

    def __init__(self, provenance: Provenance, pattern: NMPattern) -> None:
        self._provenance = provenance
        self._group = pattern.group
        labels = provenance.contexts.size
        self._space_of = np.full(labels, -1, np.int64)
        self._unit_of = np.full(labels, -1, np.int64)
        self._spaces: list[ChannelSpace] = []

    def site(self, model: nn.Module, calls: list[LinearCall]) -> Site:
        names = [call.parameter.rpartition(".")[0] for call in calls]
        labels = self._provenance.axes[calls[0].parameter, calls[0].in_dim]
        name = _common_name(names)
        problem = next((call.problem for call in calls if call.problem), "")
        space, units = self._space(name, labels, problem)
        runs = sum(call.parameter == calls[0].parameter for call in self._provenance.linears)
        layer = layer_of(model, names[0])
        site = Site(name, tuple(names), labels.size, torch.from_numpy(units), space, layer, runs)
        if not space.frozen:
            space.frozen = _arrangement_problem(site, self._group)
        return site

    def _space(self, name: str, labels: np.ndarray, problem: str) -> tuple[ChannelSpace, np.ndarray]:
        unique, first = np.unique(labels, return_index=True)
        unique = labels[np.sort(first)]
        owners = np.unique(self._space_of[unique])
        if owners.size == 1 and owners[0] >= 0 and self._spaces[owners[0]].units == unique.size:
            return self._spaces[owners[0]], self._unit_of[labels]
        for owner in owners[owners >= 0]:
            problem = self._spaces[owner].frozen = "linears read overlapping but different sets of its channels"
        contexts = self._provenance.contexts[unique]
        edges = np.flatnonzero(np.diff(contexts, prepend=contexts[:1] + 1, append=contexts[-1:] + 1))
        segments = tuple(int(size) for size in np.diff(edges))
        if not problem and max(segments) == 1:
            problem = self._provenance.reason(unique)
        uneven = [size for size in segments if size % self._group]
        if not problem and uneven:
            problem = f"channels may only move inside runs of {uneven[0]}, not a multiple of {self._group}"
        space = ChannelSpace(name, segments, (), problem)
        free = self._space_of[unique] < 0  # all, unless the sets overlap; then a later reader of these overlaps too
        self._space_of[unique[free]] = len(self._spaces)
        self._unit_of[unique[free]] = np.arange(unique.size)[free]
        self._spaces.append(space)
        order = np.argsort(unique)
        return space, order[np.searchsorted(unique, labels, sorter=order)]

    def finish(self, sites: list[Site]) -> list[ChannelSpace]:
        """Attaches every parameter dimension to its spaces and names the stream."""
        axes: list[list[Axis]] = [[] for _ in self._spaces]
        contracted = {(call.parameter, call.in_dim) for call in self._provenance.linears} - self._provenance.tables
        for (parameter, dim), labels in self._provenance.axes.items():
            spaces = self._space_of[labels]
            for number in np.unique(spaces[spaces >= 0]):
                units = torch.from_numpy(np.where(spaces == number, self._unit_of[labels], -1))
                roles = torch.from_numpy(np.unique(self._provenance.roles[parameter, dim], return_inverse=True)[1])
                axes[number].append(Axis(parameter, dim, units, roles, reads=(parameter, dim) in contracted))
        streams = 0
        for space, found in zip(self._spaces, axes, strict=True):
            space.axes = tuple(found)
            unlike = [axis for axis in found if not space.frozen and not axis.exchangeable(space.segments)]
            if unlike:
                space.frozen = f"{unlike[0].parameter} holds some of its channels in other roles than others"
            if sum(site.space is space for site in sites) > 1:
                streams += 1
                space.name = "stream" if streams == 1 else f"stream.{streams}"
        return self._spaces

    def locate(self, labels: np.ndarray) -> tuple[ChannelSpace | None, Tensor]:
        """Returns the space that orders all of ``labels``, and the unit at each; None where there is no such space."""
        owners = np.unique(self._space_of[labels])
        if owners.size != 1 or owners[0] < 0:
            return None, torch.empty(0, dtype=torch.int64)
        return self._spaces[owners[0]], torch.from_numpy(self._unit_of[labels])


def _uneven(units: Tensor, count: int) -> bool:
    counts = torch.bincount(units[units >= 0], minlength=count)
    return bool((counts != counts[0]).any())


def _arrangement_problem(site: Site, group: int) -> str:
    """Blocks need each run of units to sit at consecutive input channels, aligned to the sparsity group."""
    if _uneven(site.units, site.space.units):
        return f"{site.name} reads some of its channels more often than others"
    positions = torch.argsort(site.units, stable=True).view(site.space.units, -1)
    starts = torch.tensor(site.space.segments).cumsum(0) - torch.tensor(site.space.segments)
    follows = torch.ones(site.space.units, dtype=torch.bool)
    follows[starts] = False
    consecutive = (positions[1:] == positions[:-1] + 1).all(1)
    if not bool(consecutive[follows[1:]].all()) or bool((positions[starts] % group).any()):
        return f"{site.name} reads its channels interleaved, so blocks would not match the sparsity groups"
    return ""


def _common_name(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    split = [name.split(".") for name in names]
    shared = 0
    while len({tuple(parts[: shared + 1]) for parts in split}) == 1:
        shared += 1
    return ".".join([*split[0][:shared], "+".join(".".join(parts[shared:]) for parts in split)])
