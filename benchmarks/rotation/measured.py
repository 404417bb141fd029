"""What does the calibration text say of a model's linears, as a search of rotations needs it?"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.known_run import Known
from benchmarks.rotation.search import PATTERN, Part
from benchmarks.rotation.turn import per_query_head, turn_heads
from benchmarks.shared import find_plan
from permtriton import CompileConfig
from permtriton.data.samples import Samples
from permtriton.methods.measure.fisher import fisher_information
from permtriton.methods.measure.importance import importances_of
from permtriton.methods.measure.statistics import Curvature, hessians
from permtriton.methods.order.heuristic import Heuristic
from permtriton.recipe import config_from
from permtriton.running.layer_walk import from_model

BATCH = 4  # sequences per forward pass


class Measured:
    """A model with folded gains, and what the calibration text says of its linears.

    Attributes:
        model: the model, float32.
        inverses: first linear of each site -> inverse of its damped Hessian; only the diagonal of a down projection.
        orders: first linear of each site -> heuristic order of its channels.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.plan = find_plan(model, PATTERN)
        sums = hessians(model, from_model(model, self.plan.sites, Samples.of(ids), BATCH), lambda _: None)
        self.inverses, diagonals = {}, {}
        for site in self.plan.sites:
            inverse = Curvature(sums.pop(site.name), site.name).inverse
            diagonals[site.name] = inverse.diagonal().clone()
            self.inverses[site.linears[0]] = diagonals[site.name] if "down" in site.name else inverse
        importances = importances_of(model, self.plan, "obs", diagonals)
        known = Known(model, self.plan, Samples.of(ids), CompileConfig(), importances=importances)
        found = Heuristic().indices(known)
        self.orders = {site.linears[0]: site.expand(found[site.space.name]) for site in self.plan.sites}
        self._fisher: dict[str, Tensor] = {}

    def with_heads(self, rotations: Tensor) -> "Measured":
        """Returns the same of the model whose heads are turned: the values' order is then that of the rotations."""
        found = copy.copy(self)
        found.model, found.inverses, found.orders = copy.deepcopy(self.model), {**self.inverses}, {**self.orders}
        turn_heads(found.model, rotations)
        for number, own in enumerate(rotations.float()):
            name = f"model.layers.{number}.self_attn.o_proj"
            turn = per_query_head(own, self.model.config)
            found.inverses[name] = turn.T @ self.inverses[name] @ turn
            found.orders[name] = torch.arange(len(turn))
        return found

    def rows(self, names: Sequence[str], fisher: bool) -> Tensor:
        """Returns how much each output of linears counts, float32 ``[outputs]``, or one scalar for all."""
        if not fisher:
            return torch.ones(())
        if not self._fisher:
            config = config_from({"samples": len(self.ids)})
            found = fisher_information(Known(self.model, self.plan, Samples.of(self.ids), config), "kl")
            self._fisher = {name: each.row for name, each in found.items()}
        return torch.cat([self._fisher[name] for name in names])

    def stream_parts(self, fisher: bool) -> list[Part]:
        """Returns the parts that the stream's rotation turns; with ``fisher``, their rows count as `rows` says."""
        parts = []
        for site in self.plan.sites:
            first, weights = site.linears[0], [weight_of(self.model, name) for name in site.linears]
            rows, inverse = self.rows(site.linears, fisher), self.inverses[first]
            if site.space.name == "stream":
                parts.append(Part(torch.cat(weights)[None], inverse[None], True, rows))
                continue
            order, diagonal = self.orders[first], inverse if inverse.ndim == 1 else inverse.diagonal()
            parts.append(Part(weights[0][:, order][None], diagonal[order][None, None], False, rows.mean()))
        return parts

    def head_parts(self) -> list[Part]:
        """Returns the parts that the rotations of all key-value heads turn: columns of o per query head, rows of v."""
        config, one = self.model.config, torch.ones(())
        heads, copies = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        reading: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(copies)]
        writing: list[tuple[Tensor, Tensor]] = []
        for number in range(config.num_hidden_layers):
            path = f"model.layers.{number}.self_attn."
            weight, inverse = weight_of(self.model, path + "o_proj"), self.inverses[path + "o_proj"]
            for query, own in enumerate(torch.arange(len(inverse)).chunk(config.num_attention_heads)):
                reading[query % copies].append((weight[:, own], inverse[own][:, own]))
            order, diagonal = self.orders[path + "q_proj"], self.inverses[path + "q_proj"].diagonal()
            values = weight_of(self.model, path + "v_proj")[:, order].chunk(heads)
            writing += [(each, diagonal[order].unsqueeze(0)) for each in values]
        readers = [Part(*map(torch.stack, zip(*each, strict=True)), True, one) for each in reading]
        return [*readers, Part(*map(torch.stack, zip(*writing, strict=True)), False, one)]


def weight_of(model: nn.Module, linear: str) -> Tensor:
    return model.get_submodule(linear).get_parameter("weight").detach()
