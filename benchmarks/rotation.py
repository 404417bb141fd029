"""Does a rotation of the channels before pruning lower the KL that is left after the refit? For LLaMA-like models, 2:4.

The gains of the norms are folded into the linears that read them. Then the outputs of the dense model stay the same if
one orthogonal matrix R turns the residual stream (readers ``W R``, writers ``R^T W``) and one matrix per key-value head
turns its values (rows of v, columns of o), which is proved in float64 on a short text. R is searched with Adam by the
scores of `permtriton.methods.obs`, ``S = (W R)^2 / diag(R^T H^-1 R)``: first the entropy of each row's scores, then,
with the columns of R in the heuristic order, the share of the scores that 2:4 masks lose. Some linears and rows are
drawn per step. The turned model is compiled with ``heuristic,refit`` in layout ``portable`` and measured beside the
dense one. A rotation of some layers alone is impossible: all of them share one stream.

    python -m benchmarks.rotation demo --variants unfolded,folded,stream,heads,both --seeds 0,1,2
    python -m benchmarks.rotation MODEL --texts TEXTS --samples 8 --sequence-length 512 --windows 8

TEXTS is a folder with valid.txt, which calibrates, and test.txt, which is measured. The result file is written after
each variant; the same command continues where it was interrupted.
"""

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import permtriton
from permtriton import NMPattern
from permtriton.config import CalibrationConfig
from permtriton.data.samples import Samples
from permtriton.data.text import calibration_ids, evaluation_ids, vocabulary_of
from permtriton.demo import FOLDER
from permtriton.durable import replace_file
from permtriton.machine import device_name, versions
from permtriton.methods.fisher import fisher_information
from permtriton.methods.heuristic_order import MAX_ROWS, heuristic_index, heuristic_indices
from permtriton.methods.importance import importances_of
from permtriton.methods.obs import Curvature
from permtriton.methods.statistics import hessians
from permtriton.model.load import Source, load_original
from permtriton.model.plan import ChannelSpace
from permtriton.model_name import DEMO
from permtriton.planning import find_plan
from permtriton.progress import NoProgress
from permtriton.recipe import config_from
from permtriton.running.layer_inputs import from_model

PATTERN = NMPattern(2, 4)  # which `lost` has in its code
RESULTS = Path(__file__).resolve().parent / "results"
BATCH = 4  # sequences per forward pass
ENTROPY_RATE, LOSS_RATE = 0.01, 0.003
TOLERANCE = 1e-9  # of the turned model's outputs in float64, relative to the largest


@dataclass(frozen=True)
class Variant:
    """What is turned, and how the rotation is found.

    Attributes:
        stream: where the search of the stream's rotation starts: ``identity``, ``random`` or ``eigenvectors`` (of the
            mean Hessian); empty for no rotation.
        heads: whether the values of each key-value head are turned, before the stream is.
        entropy: whether the entropy is minimised.
        loss: whether the share that masks lose is minimised, after the entropy.
        fisher: whether rows count by the Fisher information of the outputs, not alike.
        fixed: whether what masks lose is compared with all scores before the rotation, not after it.
        folded: whether gains are folded.
    """

    stream: str = ""
    heads: bool = False
    entropy: bool = True
    loss: bool = True
    fisher: bool = False
    fixed: bool = False
    folded: bool = True


VARIANTS = {
    "unfolded": Variant(folded=False),
    "folded": Variant(),
    "heads": Variant(heads=True),
    "stream": Variant("identity"),
    "both": Variant("identity", heads=True),
    "random": Variant("random", entropy=False, loss=False),
    "eigenvectors": Variant("eigenvectors", entropy=False, loss=False),
    "stream-entropy": Variant("identity", loss=False),
    "stream-loss": Variant("identity", entropy=False),
    "stream-random-start": Variant("random"),
    "stream-eigenvector-start": Variant("eigenvectors"),
    "stream-fisher": Variant("identity", fisher=True),
    "stream-fixed": Variant("identity", fixed=True),
    "heads-fixed": Variant(heads=True, fixed=True),
    "both-fixed": Variant("identity", heads=True, fixed=True),
    "both-fisher": Variant("identity", heads=True, fisher=True, fixed=True),
}


@dataclass(frozen=True)
class Part:
    """Weights that read or write what is turned: one linear or several of one input, for one or more rotations.

    Attributes:
        weight: float32 ``[rotations, outputs, inputs]``.
        inverse: inverse Hessian of the inputs ``[rotations, inputs, inputs]`` where they are turned, else its diagonal
            ``[rotations, 1, inputs]``.
        reads: whether the inputs are turned, not the outputs.
        rows: how much each output counts, ``[outputs]``, or a scalar.
        scale: what the lost scores are compared with; 0 for all scores as they are now, see `totals`.
    """

    weight: Tensor
    inverse: Tensor
    reads: bool
    rows: Tensor
    scale: float = 0.0

    def drawn(self, most: int, generator: torch.Generator) -> "Part":
        """Returns the part with at most so many of its rows, or of its groups of inputs where these are not turned."""
        if self.reads:
            chosen = torch.randperm(self.weight.shape[1], generator=generator)[:most]
            return replace(self, weight=self.weight[:, chosen], rows=self.rows[chosen] if self.rows.ndim else self.rows)
        groups = torch.randperm(self.weight.shape[2] // PATTERN.group, generator=generator)[: most // PATTERN.group]
        chosen = (groups.unsqueeze(1) * PATTERN.group + torch.arange(PATTERN.group)).flatten()
        share = len(chosen) / self.weight.shape[2]
        return replace(
            self, weight=self.weight[:, :, chosen], inverse=self.inverse[:, :, chosen], scale=self.scale * share
        )

    def scores(self, rotation: Tensor) -> Tensor:
        """Returns the OBS scores of the weights once turned, ``[rotations, outputs, inputs]``."""
        if self.reads:
            diagonal = (rotation * (self.inverse @ rotation)).sum(1, keepdim=True)
            return (self.weight @ rotation).square() / diagonal
        return (rotation.mT @ self.weight).square() / self.inverse

    def totals(self, rotation: Tensor) -> Tensor:
        """Returns the mean over the rows of their scores' sum, weighted by ``rows``."""
        return (self.scores(rotation).sum(-1) * self.rows).mean()


def lost(scores: Tensor) -> Tensor:
    """Returns what 2:4 masks lose in each row: all but the two largest of every four scores."""
    a, b, c, d = scores.unflatten(-1, (-1, PATTERN.group)).unbind(-1)
    first, second = torch.maximum(a, b), torch.maximum(c, d)
    rest = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
    kept = torch.maximum(first, second) + torch.maximum(torch.minimum(first, second), rest)
    return scores.sum(-1) - kept.sum(-1)


def entropy(parts: Sequence[Part], rotation: Tensor) -> Tensor:
    """Returns the mean entropy of the rows' normalised scores, over the parts."""
    means = []
    for part in parts:
        scores = part.scores(rotation) + 1e-30
        share = scores / scores.sum(-1, keepdim=True)
        means.append((-(share * share.log()).sum(-1) * part.rows).mean() / part.rows.mean())
    return torch.stack(means).mean()


def share_lost(parts: Sequence[Part], rotation: Tensor, together: bool = False) -> Tensor:
    """Returns the share of the scores that masks lose, as the mean over the parts or of all parts together."""
    gone, total = [], []
    for part in parts:
        scores = part.scores(rotation)
        gone.append((lost(scores) * part.rows).mean())
        total.append(torch.tensor(part.scale) if part.scale else (scores.sum(-1) * part.rows).mean())
    losses, totals = torch.stack(gone), torch.stack(total)
    return losses.sum() / totals.sum() if together else (losses / totals).mean()


def orthogonal(free: Tensor) -> Tensor:
    """Returns the orthogonal factor of the QR decomposition whose other factor has a positive diagonal."""
    rotation, triangle = torch.linalg.qr(free)
    return rotation * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def search(parts: Sequence[Part], start: Tensor, variant: Variant, args: argparse.Namespace, seed: int) -> Tensor:
    """Returns the rotations found from ``start``, ``[rotations, size, size]``, with their columns in order."""
    generator = torch.Generator().manual_seed(seed)
    found = start
    if variant.entropy:
        found = descend(parts, found, entropy, args.entropy_steps, ENTROPY_RATE, args, generator)
    found = ordered(parts, found)
    if variant.loss:

        def measure(drawn: Sequence[Part], rotation: Tensor) -> Tensor:
            return share_lost(drawn, rotation, together=variant.fisher)

        found = descend(parts, found, measure, args.loss_steps, LOSS_RATE, args, generator)
    return found


def descend(parts, start, measure, steps, rate, args, generator) -> Tensor:  # type: ignore[no-untyped-def]
    """Minimises a measure of the rotations by Adam; each step draws some parts, and some rows of each."""
    free = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=rate)
    for _ in range(steps):
        chosen = torch.randperm(len(parts), generator=generator)[: args.parts].tolist()
        loss = measure([parts[number].drawn(args.rows, generator) for number in chosen], orthogonal(free))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return orthogonal(free.detach())


def ordered(parts: Sequence[Part], rotation: Tensor) -> Tensor:
    """Returns the rotations with their columns in the heuristic order of the weights that read them."""
    readers = [part for part in parts if part.reads]
    quota, columns = max(MAX_ROWS // len(readers), 1), []
    for part in readers:
        rows = torch.linspace(0, part.weight.shape[1] - 1, min(quota, part.weight.shape[1])).long()
        scores = replace(part, weight=part.weight[:, rows]).scores(rotation)
        columns.append((scores / scores.mean((1, 2), keepdim=True)).mT)
    size = rotation.shape[-1]
    space = ChannelSpace("rotation", (size,), ())
    found = [heuristic_index(space, each, PATTERN, lambda: None) for each in torch.cat(columns, 2)]
    return torch.stack([each[:, index] for each, index in zip(rotation, found, strict=True)])


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
            inverse = Curvature.of(sums.pop(site.name), site.name).inverse
            diagonals[site.name] = inverse.diagonal().clone()
            self.inverses[site.linears[0]] = diagonals[site.name] if "down" in site.name else inverse
        importances = importances_of(model, self.plan, "obs", diagonals)
        found = heuristic_indices(model, self.plan, self.plan.spaces, importances, None, PATTERN, NoProgress())
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

    def rows(self, names: Sequence[str], variant: Variant) -> Tensor:
        """Returns how much each output of linears counts, float32 ``[outputs]``, or one scalar for all."""
        if not variant.fisher:
            return torch.ones(())
        if not self._fisher:
            config = config_from({"samples": len(self.ids)})
            found = fisher_information(self.model, self.plan, "kl", Samples.of(self.ids), config, NoProgress())
            self._fisher = {name: each.row for name, each in found.items()}
        return torch.cat([self._fisher[name] for name in names])

    def stream_parts(self, variant: Variant) -> list[Part]:
        """Returns the parts that the stream's rotation turns."""
        parts = []
        for site in self.plan.sites:
            first, weights = site.linears[0], [weight_of(self.model, name) for name in site.linears]
            rows, inverse = self.rows(site.linears, variant), self.inverses[first]
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


def start_of(kind: str, parts: Sequence[Part], seed: int) -> Tensor:
    """Returns the rotations that a search starts from, ``[rotations, size, size]``."""
    readers = [part for part in parts if part.reads]
    count, _, size = readers[0].weight.shape
    if kind == "random":
        return orthogonal(torch.randn(count, size, size, generator=torch.Generator().manual_seed(seed)))
    if kind == "eigenvectors":
        found = [torch.linalg.inv(part.inverse) for part in readers]
        return torch.linalg.eigh(sum(each / each.diagonal(dim1=1, dim2=2).mean() for each in found))[1]
    return torch.eye(size).repeat(count, 1, 1)


def weight_of(model: nn.Module, linear: str) -> Tensor:
    return model.get_submodule(linear).get_parameter("weight").detach()


@torch.no_grad()
def fold_gains(model: PreTrainedModel) -> None:
    """Moves the gain of each norm into the linears that read it; an output head that is tied is untied first."""
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    for norm, readers in readers_of(model):
        for reader in readers:
            reader.weight.mul_(norm.weight)
        norm.weight.fill_(1)


def readers_of(model: PreTrainedModel) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Yields each norm of the stream and the linears that read it."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]
    yield model.model.norm, [model.lm_head]


@torch.no_grad()
def turn_stream(model: PreTrainedModel, rotation: Tensor) -> None:
    """Turns the residual stream of a model without gains."""
    rotation = rotation.to(model.dtype)
    for weight in [model.model.embed_tokens.weight, *(each.weight for _, own in readers_of(model) for each in own)]:
        weight.copy_(weight @ rotation)
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.copy_(rotation.T @ writer.weight)


@torch.no_grad()
def turn_heads(model: PreTrainedModel, rotations: Tensor) -> None:
    """Turns the values of each key-value head, ``[layers, heads, size, size]``."""
    for layer, own in zip(model.model.layers, rotations.to(model.dtype), strict=True):
        values, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        values.copy_(torch.block_diag(*own).T @ values)
        output.copy_(output @ per_query_head(own, model.config))


def per_query_head(own: Tensor, config: PretrainedConfig) -> Tensor:
    """Returns the rotation of the inputs of o: block by block that of the query head's values."""
    return torch.block_diag(*own.repeat_interleave(config.num_attention_heads // len(own), 0))


@contextmanager
def in_full_precision(model: PreTrainedModel) -> Iterator[None]:
    """Inside the context, norms do not round to float32, as those of transformers do whatever the model's dtype."""

    def forward(norm: nn.Module, hidden: Tensor) -> Tensor:
        return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    with patch.object(type(model.model.norm), "forward", forward):
        yield


class Experiment:
    """The dense model, and the texts of one seed.

    Attributes:
        dense: the model as it is, float32.
        ids: calibration sequences, int64 ``[samples, tokens]``.
        held_out: windows of held-out text, int64 ``[windows, tokens]``.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed = args, seed
        folder = FOLDER if args.model == DEMO else Path(args.model)
        texts = [str(args.texts / name) for name in ("valid.txt", "test.txt")] if args.texts else [DEMO, DEMO]
        self.dense, tokenizer = load_original(Source(str(folder)))
        vocabulary = vocabulary_of(self.dense)
        calibration = CalibrationConfig(texts[0], args.samples, args.sequence_length)
        self.ids = calibration_ids(calibration, tokenizer, vocabulary, seed)
        self.held_out = evaluation_ids(texts[1], tokenizer, vocabulary, 1024)[: args.windows]

    @cached_property
    def measured(self) -> Measured:
        model = copy.deepcopy(self.dense)
        fold_gains(model)
        return Measured(model, self.ids)

    def row(self, variant: Variant) -> dict[str, Any]:
        """Turns, compiles and measures a copy of the model, and returns the figures."""
        started = time.process_time()
        figures, rotations, stream = {}, None, None
        if variant.heads:
            rotations, figures["heads: share lost"] = self.found(self.measured.head_parts(), "identity", variant)
            rotations = rotations.unflatten(0, (self.dense.config.num_hidden_layers, -1))
        if variant.stream:
            measured = self.measured if rotations is None else self.measured.with_heads(rotations)
            parts = measured.stream_parts(variant)
            stream, figures["stream: share lost"] = self.found(parts, variant.stream, variant)
        searched = time.process_time()
        model, figures["difference"] = self.turned(variant, rotations, stream)
        compiled = permtriton.compile(
            model, recipe="heuristic,refit", data=self.ids, heuristic_row_weights="none", seed=self.seed
        )
        compiled_at = time.process_time()
        evaluated = compiled.evaluate(self.held_out, against=self.dense)
        errors = [part["end"] for step in compiled.report["steps"] if step["name"] == "refit" for part in step["parts"]]
        return {
            "kl": evaluated.kl,
            "perplexity": evaluated.perplexity,
            "dense_perplexity": evaluated.dense_perplexity,
            "refit_error": fmean(errors),
            **figures,
            "search_cpu_seconds": round(searched - started, 1),
            "compile_cpu_seconds": round(compiled_at - searched, 1),
        }

    def found(self, parts: Sequence[Part], kind: str, variant: Variant) -> tuple[Tensor, list[float]]:
        """Returns the rotations that a search finds, and the share of scores that masks lose before and after it.

        Before it, the channels have their heuristic order.
        """
        identity = start_of("identity", parts, self.seed)
        searched = parts
        if variant.fixed:
            with torch.no_grad():
                searched = [replace(each, scale=float(each.totals(identity))) for each in parts]
        rotations = search(searched, start_of(kind, parts, self.seed), variant, self.args, self.seed)
        with torch.no_grad():
            return rotations, [float(share_lost(parts, each)) for each in (ordered(parts, identity), rotations)]

    def turned(self, variant: Variant, heads: Tensor | None, stream: Tensor | None) -> tuple[PreTrainedModel, float]:
        """Returns the turned model, and how far its outputs are from the dense ones in float64, relative to these."""
        model = copy.deepcopy(self.dense).double()
        with torch.no_grad(), in_full_precision(model):
            expected = model(self.held_out[:1, :64]).logits
            if variant.folded:
                fold_gains(model)
            if heads is not None:
                turn_heads(model, torch.linalg.qr(heads.double())[0])
            if stream is not None:
                turn_stream(model, torch.linalg.qr(stream[0].double())[0])
            difference = float((model(self.held_out[:1, :64]).logits - expected).abs().max() / expected.abs().max())
        if difference > TOLERANCE:
            sys.exit(f"the turned model's outputs differ by {difference:.1e} of the dense ones: the rotation is wrong")
        return model.float(), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, or the folder of a LLaMA-like model")
    parser.add_argument("--texts", type=Path, help="folder with valid.txt and test.txt; without it, the demo's texts")
    parser.add_argument("--variants", default="unfolded,folded,heads,stream,both", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens, to measure on")
    parser.add_argument("--entropy-steps", type=int, default=150)
    parser.add_argument("--loss-steps", type=int, default=200)
    parser.add_argument("--parts", type=int, default=8, help="linears, or linears of one input, that a step draws")
    parser.add_argument("--rows", type=int, default=512, help="rows of each that a step draws")
    parser.add_argument("--output", type=Path, help="result file; benchmarks/results/rotation-MODEL.json without it")
    args = parser.parse_args()
    output = args.output or RESULTS / f"rotation-{Path(args.model).name}.json"
    settings = ("samples", "sequence_length", "windows", "entropy_steps", "loss_steps", "parts", "rows")
    report = {
        "model": Path(args.model).name,
        "settings": {name: getattr(args, name) for name in settings},
        "system": platform.platform(),
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "rows": json.loads(output.read_text(encoding="utf-8"))["rows"] if output.is_file() else [],
    }
    for seed in map(int, args.seeds.split(",")):
        experiment = None
        for name in args.variants.split(","):
            if any((row["variant"], row["seed"]) == (name, seed) for row in report["rows"]):
                continue
            experiment = experiment or Experiment(args, seed)
            row = {"variant": name, "seed": seed, **experiment.row(VARIANTS[name])}
            report["rows"].append(row)
            replace_file(output, lambda path: path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8"))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
