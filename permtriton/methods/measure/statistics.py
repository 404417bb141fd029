"""Statistics of the input channels of every site, measured on the calibration text."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from permtriton.config import ImportanceMethod
from permtriton.errors import CalibrationError
from permtriton.methods.measure.importance import inverts_hessians, reads_activations
from permtriton.model.experts import SECOND, RoutedExperts, expert_of, measured_experts, stacked_name
from permtriton.model.modules import as_multiplied
from permtriton.passes.plan import Site, linear_module, weight_in_out
from permtriton.passes.weight_folds import Move
from permtriton.running.layer_walk import LayerInputs, LayerWalk
from permtriton.running.mixed_precision import products_of
from permtriton.util import ranks
from permtriton.util.hooks import hooked
from permtriton.util.progress import Advance, Progress
from permtriton.util.store import MEMORY, Store

DAMPING = 0.01  # added to the diagonal of a Hessian, as a fraction of its mean; as SparseGPT publishes
SMALL_GAIN = 0.1  # added to a norm's squared gains, as a share of their mean
GRAM_COLUMNS = 256  # least number of columns per product; with fewer, products lose more time than symmetry saves


def damped(hessian: Tensor) -> Tensor:
    """Returns ``H`` with 1% of its mean diagonal added to the diagonal.

    For a channel that was never active, the sum is this damping, so its weights score lowest at any scale of inputs.
    """
    hessian = hessian.clone()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    return hessian


class Curvature:
    """The Hessian of a site's inputs, and what follows from it, computed once for all linears that read the site.

    Attributes:
        hessian: the Hessian, float32 ``[channels, channels]``.
        site: name of the site.
        damped: the damped Hessian, of the same shape.
        dead: bool ``[channels]``, True where a channel was never active.
    """

    def __init__(self, hessian: Tensor, site: str = "a layer") -> None:
        self.hessian, self.site = hessian, site
        self.damped, self.dead = damped(hessian), hessian.diagonal() == 0

    @cached_property
    def inverse(self) -> Tensor:
        """The inverse of the damped Hessian, float32 ``[channels, channels]``."""
        return torch.cholesky_inverse(self._cholesky(self.damped))

    @cached_property
    def factor(self) -> Tensor:
        """The upper Cholesky factor of the inverse."""
        return self._cholesky(self.inverse, upper=True)

    def inverse_diagonal(self) -> Tensor:
        """Returns the diagonal of the inverse, float32 ``[channels]`` on the CPU: the denominators of the OBS score."""
        return self.inverse.diagonal().clone().cpu()  # a view would keep the whole inverse

    def _cholesky(self, matrix: Tensor, upper: bool = False) -> Tensor:
        try:
            return torch.linalg.cholesky(matrix, upper=upper)
        except torch.linalg.LinAlgError as error:
            raise CalibrationError(
                f"{self.site}: the Hessian of its inputs cannot be inverted: raise `samples=`, or choose another "
                "`importance=` and prune with the step mask"
            ) from error


def site_statistics(walk: LayerWalk, method: ImportanceMethod, progress: Progress) -> dict[str, Tensor]:
    """Returns site name -> the statistic that an importance needs of the site's input, float32 ``[channels]``.

    The statistic is ``diag(H^-1)`` for ``obs``, ones for ``magnitude``, else ``||X_j||``.
    """
    if not reads_activations(method):
        return {site.name: torch.ones(site.channels, device=walk.model.device) for site in walk.plan.sites}
    if not inverts_hessians(method):
        return channel_norms(walk, progress)
    return obs_statistics(walk, progress)[0]


def obs_statistics(
    walk: LayerWalk, progress: Progress, measure: Callable[[Site, Curvature], Any] = lambda *_: None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns site name -> ``diag(H^-1)`` in the dense model, and site name -> what ``measure`` returns.

    The Hessians are measured layer by layer. ``measure`` is called with a site and the curvature of its inputs, on the
    rank that the site is assigned to, and what it returns is sent to all ranks.
    """
    diagonals, results = dict[str, Tensor](), dict[str, Any]()

    def measure_site(pair: tuple[Site, Tensor]) -> tuple[Tensor, Any]:
        curvature = Curvature(pair[1], pair[0].name)
        return curvature.inverse_diagonal(), measure(pair[0], curvature)

    num_sequences = ranks.own_rows(len(walk.samples)).numel()
    with progress.stage("calibrate", num_sequences * len(walk.plan.layers())) as advance:
        for layer in walk.walk_dense():
            hessian_by_site = hessians(walk.model, layer, advance)
            pairs = [(site, hessian_by_site[site.name]) for site in layer.sites]
            for site, (diagonal, result) in zip(layer.sites, ranks.deal(pairs, measure_site), strict=True):
                check_finite(site.name, diagonal)
                diagonals[site.name], results[site.name] = diagonal.to(walk.model.device), result
    return diagonals, results


def reorder_statistics(statistics: Mapping[str, Tensor], moves: Sequence[Move]) -> dict[str, Tensor]:
    orders = {gather.site: gather.index for move in moves for gather in move.gathers}
    return {
        name: statistic[orders[name].to(statistic.device)] if name in orders else statistic
        for name, statistic in statistics.items()
    }


class _EverySiteSeen(Exception):
    """Ends a forward pass early: every site's input has been seen, so the remaining layers need not run."""


@torch.no_grad()
def watch_inputs(
    model: PreTrainedModel, layer: LayerInputs, consume: Callable[[Site, Tensor, Tensor | None], None], advance: Advance
) -> None:
    """Runs a layer and passes each site's input to ``consume`` as soon as it is computed; stores nothing.

    Since no expert sees every token, the input that all experts of a layer read is taken where it enters the experts'
    module. An expert's intermediate channels are taken at the expert, which may see no token at all.

    Args:
        consume: called whenever a site's linears run, with the site, its input ``[sequences, tokens, channels]`` (of an
            expert ``[tokens, channels]``) and, where the plan knows it, the residual stream that the linear's output is
            added to, ``[sequences, tokens, out_features]``.
        advance: called with the number of sequences of each forward pass.
    """
    pending: dict[str, int] = {}  # site name -> calls of its linears still to come in this forward pass
    residuals: dict[str, Tensor] = {}  # site name -> residual stream that the output of its linear is added to

    def record(site: Site, reader: nn.Module, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        consume(site, as_multiplied(reader, inputs[0]), residuals.pop(site.name, None))

    def count(name: str, *_: object) -> None:
        pending[name] -= 1
        if layer.may_stop_early and max(pending.values()) <= 0:
            raise _EverySiteSeen

    def keep_residual(name: str, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        residuals[name] = next(iter((*args, *kwargs.values())))

    def hooks() -> Iterator[RemovableHandle]:
        for site in layer.sites:
            if site.residual:
                stream_reader = model.get_submodule(site.residual.reader)
                yield stream_reader.register_forward_pre_hook(partial(keep_residual, site.name), with_kwargs=True)
            reader, expert = linear_module(model, site.linears[0]), expert_of(model, site.linears[0])
            recorder, counter = partial(record, site, reader), partial(count, site.name)
            if expert is None:
                yield reader.register_forward_pre_hook(recorder)
                yield reader.register_forward_pre_hook(counter)
            else:
                experts, reads_every_token = expert
                yield (experts if reads_every_token else reader).register_forward_pre_hook(recorder)
                yield experts.register_forward_hook(counter)

    with hooked(hooks()), measured_experts(model):
        for rows in layer.parts:
            pending |= {site.name: site.num_calls for site in layer.sites}
            with suppress(_EverySiteSeen):
                layer.run(rows)
            advance(rows.shape[0])


def tokens_of_experts(model: nn.Module, positions: int) -> dict[str, list[int]]:
    """Returns experts module -> number of calibration tokens routed to each expert, over all ranks.

    Statistics must have been measured. In all samples, a layer reads ``positions`` tokens, to which counts are scaled,
    because a layer may have run on all samples several times.
    """
    counts = {name: experts.sent for name, experts in model.named_modules() if isinstance(experts, RoutedExperts)}
    token_counts = {name: count for name, count in counts.items() if count is not None}
    ranks.add_up(token_counts.values())
    return {name: (count[:-1] * positions // count[-1]).tolist() for name, count in token_counts.items()}


def undersampled_warning(model: nn.Module, tokens: Mapping[str, Sequence[int]]) -> str:
    """Returns a warning if experts received fewer tokens than they have channels; empty if there are none."""
    undersampled = {}
    for name, counts in tokens.items():
        channels = weight_in_out(model.get_submodule(f"{name}.0.{SECOND}")).shape[0]
        undersampled.update({f"{name}.{number}": count for number, count in enumerate(counts) if count < channels})
    if not undersampled:
        return ""
    rarest = min(undersampled, key=lambda name: undersampled[name])
    return (
        f"{len(undersampled)} of {sum(map(len, tokens.values()))} experts received fewer calibration tokens than they "
        f"have intermediate channels ({rarest}: {undersampled[rarest]:,}), so that their statistics are unreliable: "
        "raise `samples=`, or set `calibrate_all_experts=true`"
    )


def channel_norms(walk: LayerWalk, progress: Progress) -> dict[str, Tensor]:
    """Returns site name -> ``||X_j||``, float32 ``[channels]``, as `permtriton.methods.measure.importance` defines it.

    A site whose input is all zeros or empty (an expert that no token is sent to) gets ones, so that its weights are
    scored by their size alone; ``progress`` reports it.
    """
    model, count = walk.model, len(walk.samples)
    sums = {s.name: torch.zeros(s.channels, dtype=torch.float64, device=model.device) for s in walk.plan.sites}

    def consume(site: Site, inputs: Tensor, _residual: Tensor | None) -> None:
        for sequence in _sequences(inputs):
            sums[site.name] += sequence.square().sum(0, dtype=torch.float64)

    with progress.stage("calibrate", ranks.own_rows(count).numel()) as advance:
        for layer in walk.walk_once():
            watch_inputs(model, layer, consume, advance)
    ranks.add_up(sums.values())
    for name, total in sums.items():
        check_finite(name, total)
        if not bool(total.any()):
            total.fill_(count)
            progress.say(f"{name}: its input is all zeros or empty; its weights are scored by their magnitude alone")
    return {name: (total / count).sqrt().float() for name, total in sums.items()}


def hessians(model: PreTrainedModel, layer: LayerInputs, advance: Advance) -> dict[str, Tensor]:
    """Returns site name -> ``X^T X`` over the tokens of all ranks, float32 ``[channels, channels]``.

    A site whose input is all zeros or empty (an expert that no token is sent to) gets the identity: its weights are
    then scored by their size alone, and no update changes them.
    """
    sums = _zeros(model, layer.sites)

    def consume(site: Site, inputs: Tensor, _residual: Tensor | None) -> None:
        with products_of(inputs.dtype, inputs.device):
            for sequence in _sequences(inputs):
                _add_gram(sums[site.name], sequence)

    watch_inputs(model, layer, consume, advance)
    return _finished(sums)


@dataclass(frozen=True)
class Moments:
    """Second moments of a site's input: ``X_p`` in the model as pruned so far, and ``X_d`` in the dense model."""

    hessian: Tensor  # ``X_p^T X_p``, float32 ``[channels, channels]``, as `hessians` returns it
    # ``(X_d - X_p)^T X_p``, of the same shape; None where routing to experts may give the linear
    # other tokens in the two models
    shift: Tensor | None
    # ``(R_d - R_p)^T X_p``, float32 ``[out_features, channels]``, with ``R`` the residual stream that the linear's
    # output is added to, and the difference taken back through a norm by `output_change`; None where the plan does not
    # know the stream, or ``shift`` is None
    residual_shift: Tensor | None = None


# Site name -> the site's input, and its residual stream if known, else None, for each part of the sequences.
SiteInputs = Mapping[str, deque[tuple[Tensor, Tensor | None]]]


def dense_inputs(model: PreTrainedModel, layer: LayerInputs, advance: Advance, store: Store = MEMORY) -> SiteInputs:
    """Returns the dense model's inputs of the sites that read every token, hence the same tokens in both models."""
    site_inputs: SiteInputs = {site.name: deque() for site in layer.sites if reads_every_token(model, site)}

    def keep(site: Site, inputs: Tensor, residual: Tensor | None) -> None:
        if site.name in site_inputs:
            # Copies, because the model may change its activations in place.
            site_inputs[site.name].append((store.copied(inputs), None if residual is None else store.copied(residual)))

    watch_inputs(model, layer, keep, advance)
    return site_inputs


def moments(model: PreTrainedModel, layer: LayerInputs, dense: SiteInputs, advance: Advance) -> dict[str, Moments]:
    """Returns site name -> the moments of its input in the pruned model, over the tokens of all ranks.

    ``dense`` is what `dense_inputs` returned for the same parts; entries that were read are removed from ``dense``.
    """
    sums = _zeros(model, layer.sites)
    compared = [site for site in layer.sites if site.name in dense]
    shifts = _zeros(model, compared)
    residual_shifts = {
        site.name: _sum(model, weight_in_out(linear_module(model, site.linears[0])).shape[1], site.channels)
        for site in compared
        if site.residual
    }

    def consume(site: Site, inputs: Tensor, residual: Tensor | None) -> None:
        dense_input, dense_residual = dense[site.name].popleft() if site.name in shifts else (None, None)
        for row, sequence in enumerate(_sequences(inputs)):
            _add_gram(sums[site.name], sequence)
            if dense_input is not None:
                shifts[site.name] += _sequences(dense_input)[row].to(sequence).sub_(sequence).T @ sequence
            if residual is not None and dense_residual is not None:
                residual_error = _sequences(dense_residual)[row].to(sequence).sub_(_sequences(residual)[row])
                residual_shifts[site.name] += output_change(model, site, residual_error, sequence).T @ sequence

    watch_inputs(model, layer, consume, advance)
    if left := [site.name for site in compared if dense[site.name]]:
        raise CalibrationError(f"{left[0]} ran more often in the dense model than in the pruned one: its depth varies")
    ranks.add_up([*shifts.values(), *residual_shifts.values()])
    shift, residual_shift = ({k: v.float() for k, v in totals.items()} for totals in (shifts, residual_shifts))
    return {name: Moments(h, shift.get(name), residual_shift.get(name)) for name, h in _finished(sums).items()}


def output_change(model: nn.Module, site: Site, stream_change: Tensor, inputs: Tensor) -> Tensor:
    """Returns the change of a linear's output that changes what is added to the residual stream by ``stream_change``.

    A norm that the output passes multiplies the change by gain / rms, to first order, with rms the root mean square of
    the token's present output. The change is therefore multiplied by rms / gain; by less at small gains, because a
    large change of the output would also change rms.
    """
    residual = site.residual
    assert residual is not None
    stream_change = stream_change / residual.factor
    if residual.norm is None:
        return stream_change
    variant = residual.norm.variant
    linear, norm = linear_module(model, site.linears[0]), model.get_submodule(residual.norm.module)
    output = inputs @ weight_in_out(linear).to(inputs)
    if (bias := linear._parameters.get("bias")) is not None:
        output += bias
    if variant.kind == "layer":
        output -= output.mean(-1, keepdim=True)
    rms = output.square().mean(-1, keepdim=True).add_(variant.eps).sqrt_()
    gain = norm.get_parameter("weight").float() + variant.offset
    return stream_change * rms * (gain / (gain.square() + SMALL_GAIN * gain.square().mean()))


def reads_every_token(model: nn.Module, site: Site) -> bool:
    name = site.linears[0]
    if (expert := expert_of(model, name)) is not None:
        return expert[1]
    return not site.is_routed and stacked_name(model, name) is None


def _zeros(model: PreTrainedModel, sites: Iterable[Site]) -> dict[str, Tensor]:
    return {site.name: _sum(model, site.channels, site.channels) for site in sites}


def _sum(model: PreTrainedModel, rows: int, columns: int) -> Tensor:
    """Returns zeros, float64 ``[rows, columns]``, to which the products of single sequences are added.

    In float64, the order of the additions, which follows from micro-batches and ranks, hardly ever changes the sum
    after rounding to float32.
    """
    return torch.zeros(rows, columns, dtype=torch.float64, device=model.device)


def _sequences(inputs: Tensor) -> Tensor:
    """Returns activations as float32 ``[sequences, tokens, channels]``, whose products are computed per sequence.

    An expert's activations count as one sequence, in float64: ranks and micro-batches decide which tokens the expert
    sees together, and in float64 that hardly ever changes the sums.
    """
    return inputs.float().flatten(1, -2) if inputs.ndim > 2 else inputs.double().unsqueeze(0)


def _add_gram(total: Tensor, inputs: Tensor) -> None:
    """Adds ``X^T X`` to ``total``, except for blocks below the diagonal (nearly half), which follow by symmetry."""
    width = max(GRAM_COLUMNS, -(-len(total) // 8))
    for start in range(0, len(total), width):
        total[start : start + width, start:] += inputs[:, start : start + width].T @ inputs[:, start:]


def _finished(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds up sums of `_add_gram` over ranks; returns full float32 matrices, the identity where all inputs are 0."""
    ranks.add_up(sums.values())
    hessian_by_site = {}
    for name, total in sums.items():
        hessian_by_site[name] = hessian = total.float()
        hessian.triu_().add_(hessian.triu(1).T)
        check_finite(name, hessian.diagonal())
        if not bool(hessian.diagonal().any()):
            hessian.fill_diagonal_(1)
    return hessian_by_site


def check_finite(name: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise CalibrationError(
            f"{name}: {int((~values.isfinite()).sum())} of {values.numel()} input channels are NaN or infinite on the "
            "calibration text: the model overflows in this dtype (try `dtype=float32`) or its weights are damaged"
        )
