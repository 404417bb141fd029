"""Reconstruction: the kept weights of a pruned model are trained layer by layer, to give each dense layer's output.

Two activations run through the layers: the dense model's, whose outputs are the targets, and the pruned model's, which
are the inputs. So each layer also makes up for the layers before it. Memory is that of one layer, and of its inputs and
targets on the CPU.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from permtriton.config import CommonConfig
from permtriton.data.samples import Samples
from permtriton.methods.train.kept_weights import KeptWeights, weights_of
from permtriton.methods.train.trainer import Course, Trained, Trainer
from permtriton.methods.train.training_step import LayerTraining
from permtriton.model.forward import cosine_loss
from permtriton.passes.plan import Plan, layer_names, linear_module
from permtriton.running import ranks
from permtriton.running.layer_calls import LayerCalls, find_chains, record_chain
from permtriton.running.onload import bring
from permtriton.running.state import StateFile
from permtriton.running.store import MEMORY, Store
from permtriton.util.progress import Advance, Progress


@dataclass
class Reconstructed:
    """The result of reconstruction.

    Attributes:
        parts: per trained part of a layer, in order: ``name`` of the layer, ``linears``, the held-out loss at ``start``
            and ``end``, ``history`` of the epochs, ``kept`` epoch and ``seconds``.
        left: name of a layer or linear that was not trained -> why.
    """

    parts: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Layer:
    """A layer with its pruned weights, by the names of their linears."""

    module: nn.Module
    weights: dict[str, nn.Parameter]
    parts: tuple[dict[str, nn.Parameter], ...]  # those to train, one part after the other


@torch.enable_grad()
def reconstruct(  # noqa: PLR0913
    model: PreTrainedModel,
    plan: Plan,
    dense_weights: Mapping[str, Tensor],
    samples: Samples,
    options: LayerTraining,
    config: CommonConfig,
    progress: Progress,
    state: StateFile | None = None,
    store: Store = MEMORY,
) -> Reconstructed:
    """Trains the kept weights of the pruned linears layer by layer; nothing else of the model changes.

    A tenth of the sequences, at most 24, is held out. For each layer, the weights of the epoch with the lowest loss on
    it are kept, which may be those before training. With ``window`` mlp, the linears in the submodule that holds the
    layer's first linear (the attention) are trained first, and the others after them; the target is the layer's output
    for both.

    What cannot be trained this way stays as it is, and is reported: linears outside layers, layers that run several
    times, weights that several layers share.

    Args:
        model: pruned model; its weights change in place.
        dense_weights: name of each pruned linear -> its weight before pruning, in the present order of channels.
        state: file that keeps the state between layers, to continue from and to write to; None keeps no state. Its
            inputs must cover the pruned weights, or what they follow from.

    Raises:
        CalibrationError: a loss or a gradient is not finite.
        OutputError: the state belongs to another run, is damaged, or cannot be written.
    """
    layers, left = _layers(model, plan, options)
    weights = weights_of(model, [name for _, name in plan.linears()])
    modules = {name: layer.module for name, layer in layers.items()}
    chains, problems = ranks.on_first(lambda: find_chains(model, modules, samples[:1], weights.values()))
    result = Reconstructed(left={**left, **problems})
    for name, reason in result.left.items():
        progress.say(f"reconstruct: {name} keeps its weights: {reason}")
    parts = [(name, part) for chain in chains for name in chain for part in layers[name].parts]
    finished = _load(state, parts, result) if state else {}
    if finished:
        progress.say(f"reconstruct: continuing after {result.parts[-1]['name']} of an interrupted run")
    steps = Course.of(len(samples), samples.tokens, options, config.seed).steps
    with progress.stage("reconstruct", len(parts) * steps) as advance:
        advance(len(result.parts) * steps)
        for name, problem in _problems(model, layers, chains, samples, weights, dense_weights, options, config, store):
            for part in layers[name].parts:
                if not part.keys() <= finished.keys():
                    bring(layers[name].module)
                    kept = KeptWeights(part, options.optimizer)
                    result.parts.append({"name": name, **problem.train(model, kept, list(part), name, advance)})
                    finished |= {key: store.moved(values) for key, values in kept.snapshot().items()}
                    if state is not None:
                        state.write(finished, {"parts": json.dumps(result.parts)})
    return result


def _problems(  # noqa: PLR0913
    model: PreTrainedModel,
    layers: Mapping[str, _Layer],
    chains: Sequence[Sequence[str]],
    samples: Samples,
    weights: Mapping[str, nn.Parameter],
    dense_weights: Mapping[str, Tensor],
    options: LayerTraining,
    config: CommonConfig,
    store: Store,
) -> Iterator[tuple[str, "_Problem"]]:
    """Yields each layer's name and problem, in order; the next one's inputs follow from the weights at that time."""
    for chain in chains:
        modules = {name: layers[name].module for name in chain}
        inside = {linear for name in chain for linear in layers[name].weights}  # whose values no argument depends on
        with _swapped({name: each for name, each in weights.items() if name not in inside}, dense_weights, store):
            dense_calls, target = record_chain(model, modules, samples, store)
        calls, hidden = record_chain(model, modules, samples, store)
        for name in chain:
            with _swapped(layers[name].weights, dense_weights, store):
                dense_calls[name].try_together(target)
                target = _outputs(dense_calls[name], target, config, store)
            calls[name].try_together(hidden)
            yield name, _Problem(calls[name], hidden, target, options, config)
            if name != chain[-1]:
                hidden = _outputs(calls[name], hidden, config, store)


def _outputs(layer: LayerCalls, hidden: Tensor, config: CommonConfig, store: Store) -> Tensor:
    """Returns a layer's output for all sequences, of which each rank runs its share."""
    share = ranks.own_rows(hidden.shape[0])
    return ranks.join(layer.run(hidden, config.micro_batch_size, share, store), hidden.shape[0])


@dataclass(frozen=True)
class _Problem:
    """A layer's calls with its inputs and targets, ``[sequences, tokens, hidden]`` each, on the CPU."""

    calls: LayerCalls
    hidden: Tensor
    target: Tensor
    options: LayerTraining
    config: CommonConfig

    def loss(self, rows: Tensor) -> Tensor:
        """Returns the mean loss over the tokens of some sequences, float32 ``[]``."""
        output = self.calls(self.hidden[rows], rows)
        target = self.target[rows].to(output.device, non_blocking=True)
        kind = self.options.loss
        return cosine_loss(output, target) if kind == "cosine" else squared_loss(output, target)

    def train(
        self, model: nn.Module, kept: KeptWeights, linears: list[str], name: str, advance: Advance
    ) -> dict[str, Any]:
        """Trains some linears of the layer called ``name`` and returns their entry in the report."""
        started, trained = time.perf_counter(), Trained()
        with kept.trainable(model):
            sequences, tokens = self.hidden.shape[:2]
            course = Course.of(sequences, tokens, self.options, self.config.seed)
            trainer = Trainer(kept, model, self.loss, course, self.config, name)
            trainer.fit(trained, advance)
        return {
            "linears": linears,
            "start": trained.history[0].held_out,
            "end": trained.history[trained.kept].held_out,
            **trained.report(),
            "seconds": time.perf_counter() - started,
        }


def squared_loss(hidden: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens of ``|hidden - target|^2 / |target|^2``, float32 ``[]``.

    Args:
        hidden: ``[sequences, tokens, hidden]``.
        target: dense layer's output, of the same shape.
    """
    target = target.float()
    sizes = target.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((hidden.float() - target).square().sum(-1) / sizes).mean()


@contextmanager
def _swapped(weights: Mapping[str, nn.Parameter], others: Mapping[str, Tensor], store: Store) -> Iterator[None]:
    """Inside the context, the weights have the values of ``others``; all is done in place.

    Args:
        store: where their own values are meanwhile; never on a GPU.
    """
    before = {name: store.moved(weight.detach().to("cpu", copy=True)) for name, weight in weights.items()}
    try:
        _copy(weights, others)
        yield
    finally:
        _copy(weights, before)


@torch.no_grad()
def _copy(weights: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])


def _layers(model: nn.Module, plan: Plan, options: LayerTraining) -> tuple[dict[str, _Layer], dict[str, str]]:
    """Returns name -> layer in execution order, and name -> reason of the linears that no layer can train."""
    layer_of = layer_names(model, plan)
    owners: dict[int, set[str]] = {}  # id of a parameter -> the layers that use it; "" for what is outside of layers
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(layer_of.get(module, ""))
    linears: dict[str, list[str]] = {name: [] for name in layer_of.values()}
    left: dict[str, str] = {}
    for _, name in plan.linears():
        module = linear_module(model, name)
        users = owners[id(module.get_parameter("weight"))]
        if users == {""}:
            left[name] = "it stands outside the layers"
        elif len(users) > 1:
            left[name] = "its weight is used elsewhere, too"
        if module in layer_of:
            linears[layer_of[module]].append(name)
    layers = {}
    for name, own in linears.items():
        weights = weights_of(model, own)
        trained = {linear: weight for linear, weight in weights.items() if linear not in left}
        module = model.get_submodule(name)
        layers[name] = _Layer(module, weights, _parts(name, module, trained, options))
    return layers, left


def _parts(
    name: str, layer: nn.Module, weights: dict[str, nn.Parameter], options: LayerTraining
) -> tuple[dict[str, nn.Parameter], ...]:
    parts: dict[bool, dict[str, nn.Parameter]] = {}
    first = ""
    for linear, weight in weights.items():
        path = linear.removeprefix(f"{name}.").split(".")
        listed = isinstance(layer.get_submodule(path[0]), nn.ModuleList)  # T5's attention and MLP are in a list
        child = ".".join(path[: 1 + listed])
        first = first or child
        parts.setdefault(options.window == "mlp" and child != first, {})[linear] = weight
    return tuple(parts.values())


def _load(
    state: StateFile, parts: Sequence[tuple[str, dict[str, nn.Parameter]]], result: Reconstructed
) -> dict[str, Tensor]:
    """Restores the finished layers and returns their kept weights by linear; empty where there is no state.

    Raises:
        OutputError: the state belongs to another run, or is damaged.
    """
    stored = state.read()
    if stored is None:
        return {}
    tensors, texts = stored
    result.parts = json.loads(texts["parts"])
    weights = {linear: weight for _, part in parts[: len(result.parts)] for linear, weight in part.items()}
    KeptWeights(weights).write(tensors)
    return tensors
