"""The rows of sparse products, of a learning step and of whole models, on LLaMA-2-7B shapes with random weights."""

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.gpu.bench import Bench, Prepare, ratio
from benchmarks.gpu.goals import Goal, goal
from benchmarks.gpu.table import OURS
from permtriton import NMPattern, find_plan
from permtriton.config import CompileConfig, LearnConfig
from permtriton.kernels import cusparselt
from permtriton.kernels.packing import unpack
from permtriton.kernels.sparse_linear import sparse_linear_case
from permtriton.kernels.tools import cases
from permtriton.kernels.tools.cases import Inputs
from permtriton.kernels.tools.timing import Timing, measure, relative_error
from permtriton.machine import peak_memory
from permtriton.model.forward import hidden_states, last_hidden_state
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.model.plan import Plan, layer_modules, linear_module, weight_in_out
from permtriton.prune.importance import importance_of
from permtriton.prune.learn import Trainer, learned_spaces
from permtriton.prune.masked_model import checkpointed, masked_model
from permtriton.prune.objective import Objective
from permtriton.prune.relaxation import Relaxation

SHAPES_7B = [(11008, 4096), (4096, 11008), (4096, 4096)]
PATTERN = NMPattern(2, 4)
SAME_MODEL = 5e-2  # bfloat16 through 32 layers, sums in another order
DENSE, BARE, SEMI_STRUCTURED = "dense", "cuSPARSELt", "torch's semi-structured linear"


def decode(bench: Bench) -> None:
    """The packed product with 1 and 16 tokens against cuBLAS and cuSPARSELt."""
    for tokens in (1, 16):
        row = f"sparse_linear, {tokens} tokens"
        for out_features, in_features in bench.pick(SHAPES_7B, [(64, 128)]):
            case = sparse_linear_case(
                tokens, out_features, in_features, bench.pick(torch.bfloat16, torch.float32), bench.device
            )
            bench.compare(row, case, _peers(in_features),
                          lambda times, row=row: [
                goal(row, "times faster than cuBLAS dense", ratio(times, DENSE)),
                Goal("times faster than cuSPARSELt", ratio(times, BARE)),
            ], seconds=1.5, alike=(DENSE, BARE, SEMI_STRUCTURED))  # fmt: skip


def prefill(bench: Bench) -> None:
    """Many tokens, including the permutation of the input, against cuBLAS and bare cuSPARSELt without it."""
    gains = []
    for tokens in bench.pick([2048, 8192], [32]):
        for out_features, in_features in bench.pick(SHAPES_7B, [(64, 128)]):
            dtype = bench.pick(torch.bfloat16, torch.float32)
            case = sparse_linear_case(tokens, out_features, in_features, dtype, bench.device, gather=True)
            times = bench.compare(f"2:4 prefill, {tokens} tokens", case, _peers(in_features), _prefill_goals, 2.0)
            gains.append(ratio(times, DENSE))
    mean = math.exp(statistics.fmean(map(math.log, gains)))
    bench.add("2:4 prefill", "geometric mean of all shapes", {}, [Goal("times faster than cuBLAS dense", mean)],
              note="hoped for: 1.5")  # fmt: skip


def _prefill_goals(times: Mapping[str, Timing]) -> list[Goal]:
    return [
        goal("2:4 prefill", "of bare cuSPARSELt without permutation", ratio(times, BARE)),
        goal("2:4 prefill", "times faster than cuBLAS dense", ratio(times, DENSE)),
    ]


def _peers(in_features: int) -> dict[str, Prepare]:
    """Dense and cuSPARSELt products of the same weight and the same input, without the permutation."""

    def weight_of(inputs: Inputs) -> Tensor:
        return unpack(inputs[1], inputs[2], in_features, PATTERN)

    def dense(inputs: Inputs) -> Callable[[], object]:
        weight = weight_of(inputs)
        return lambda: linear(inputs[0], weight)

    def bare(inputs: Inputs) -> Callable[[], object]:
        compressed, out_features = cusparselt.compress(weight_of(inputs)), inputs[1].shape[0]
        return lambda: cusparselt.product(inputs[0], compressed, None, out_features)

    def semi_structured(inputs: Inputs) -> Callable[[], object]:
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

        weight = SparseSemiStructuredTensorCUSPARSELT.from_dense(weight_of(inputs))
        return lambda: linear(inputs[0], weight)

    return {DENSE: dense, BARE: bare, SEMI_STRUCTURED: semi_structured}


def learning_step(bench: Bench) -> None:
    """One learning step against a dense forward and backward pass with weight gradients."""
    model = llama(bench, bench.pick(32, 1))
    tokens = bench.pick(1024, 32)
    plan = find_plan(model, PATTERN)
    ids = torch.randint(0, model.config.vocab_size, (bench.pick(16, 2), tokens))
    target = hidden_states(model, ids, bench.pick(2, 2))
    for micro_batch in bench.pick((16, 8, 4, 2, 1), (2,)):
        try:
            times = _step_times(bench, model, plan, ids, target, micro_batch)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        cost = goal("learning step", "times a dense forward + backward", 1 / ratio(times, "dense forward + backward"))
        layers = model.config.num_hidden_layers
        size = f"{layers} layers, {ids.shape[0]} x {tokens} tokens, {micro_batch} sequences at once"
        peak = peak_memory(model.device)
        bench.add("learning step", size, times, [cost], peak_memory_bytes=peak, note="activation checkpointing in both")
        return
    raise MemoryError("not even one sequence at once fits into the GPU's memory")


def _step_times(
    bench: Bench, model: PreTrainedModel, plan: Plan, ids: Tensor, target: Tensor, micro_batch: int
) -> dict[str, Timing]:
    layers = layer_modules(model, plan)
    rows = torch.arange(ids.shape[0])

    def dense() -> None:
        model.requires_grad_(False)
        for _, name in plan.linears():
            linear_module(model, name).weight.requires_grad_(True)
        with checkpointed(layers):
            for part in rows.split(micro_batch):
                last_hidden_state(model, ids[part]).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)

    importances = {
        name: importance_of("wanda", weight_in_out(linear_module(model, name)), torch.rand(site.channels) + 0.5)
        for site, name in plan.linears()
    }
    importances = {
        name: dataclasses.replace(found, scale=found.scale.to(bench.device)) for name, found in importances.items()
    }
    learn = LearnConfig(batch_size=ids.shape[0], epochs=1000)
    config = CompileConfig(sparsity=PATTERN, micro_batch_size=micro_batch, learn=learn)
    relaxation = Relaxation(learned_spaces(plan, config.learn), config.learn, 0, model.device)
    optimizer = torch.optim.AdamW(relaxation.parameters(), lr=config.learn.learning_rate)
    samples: dict[str, list[float]] = {OURS: [], "dense forward + backward": []}
    for repeat in range(bench.pick(5, 2)):  # the first of each warms up
        if repeat > 3 and bench.seconds_left < 60:
            break
        samples["dense forward + backward"].append(_seconds(bench, dense))
        with masked_model(model, plan, importances, relaxation, config) as masks:
            trainer = Trainer(model, masks, relaxation, optimizer, ids, Objective("cosine", target), config)
            step = _step(trainer, rows, repeat)
            step()  # the allocator settles after the weights were transposed
            samples[OURS].append(_seconds(bench, step))
    return {name: Timing(tuple(found[1:]), "host") for name, found in samples.items()}


def _step(trainer: Trainer, rows: Tensor, number: int) -> Callable[[], object]:
    return lambda: trainer.step(rows, number)


def inference(bench: Bench) -> None:
    """Sparse against dense: one layer, then a whole model, packed at 2:4 with every permutation folded."""
    for what, layers in (("a layer", 1), ("a model", bench.pick(32, 1))):
        if bench.seconds_left < bench.pick(30, 0):
            bench.leave_out(f"inference, {what}", "no time was left")
            continue
        dense = llama(bench, layers)
        sparse = packed(bench, dense)
        for tokens in bench.pick([1, 16, 512, 2048], [1, 16]):
            ids = torch.randint(0, dense.config.vocab_size, (1, tokens), device=bench.device)
            with torch.no_grad():
                times = measure({OURS: [_forward(sparse, ids)], DENSE: [_forward(dense, ids)]}, bench.device, 2.0)
            faster = Goal("times faster than dense", ratio(times, DENSE))
            note = "no goal is set; the layer row is embeddings, one layer, norm and head"
            bench.add(f"inference, {what}", f"{layers} layers, {tokens} tokens", times, [faster], note=note)
        del dense, sparse


@torch.no_grad()
def packed(bench: Bench, dense: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy whose linears inside the layers are pruned by magnitude and packed at 2:4.

    Raises:
        AssertionError: packed it computes something else than before it was packed.
    """
    sparse = copy.deepcopy(dense)
    linears = {name: module for name, module in sparse.named_modules()
               if isinstance(module, nn.Linear) and ".layers." in f".{name}"}  # fmt: skip
    for module in linears.values():
        module.weight.copy_(cases.larger_half(module.weight))
    batches = [torch.randint(0, dense.config.vocab_size, (1, tokens), device=bench.device) for tokens in (1, 65)]
    expected = [_forward(sparse, ids)() for ids in batches]
    for name, module in linears.items():
        replace_module(sparse, name, SparseLinear.from_linear(module).pack(PATTERN).compress())
    for ids, logits in zip(batches, expected, strict=True):
        if (error := relative_error(_forward(sparse, ids)(), logits)) > SAME_MODEL:
            raise AssertionError(f"packed, {ids.shape[1]} tokens: the logits are {error:.3g} from those before")
    return sparse


def llama(bench: Bench, layers: int) -> PreTrainedModel:
    """Returns a model of LLaMA-2-7B's shapes with random weights; of tiny ones in a rehearsal."""
    sizes: dict[str, Any] = bench.pick(
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
         "num_key_value_heads": 32},
        {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 4},
    )  # fmt: skip
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, use_cache=False, **sizes)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=bench.pick(torch.bfloat16, torch.float32))
    return model.to(bench.device).eval().requires_grad_(False)


def _forward(model: PreTrainedModel, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, use_cache=False).logits


def _seconds(bench: Bench, run: Callable[[], object]) -> float:
    if not bench.rehearse:
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if not bench.rehearse:
        torch.cuda.synchronize()
    return time.perf_counter() - started
