"""The rows of sparse products, of a learning step and of whole models, on LLaMA-2-7B shapes with random weights."""

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu.bench import Bench, Prepare, brief, ratio
from benchmarks.gpu.goals import GOALS, Goal, goal
from benchmarks.gpu.norm_alone import rms_norm_alone
from benchmarks.gpu.table import OURS
from benchmarks.shared import PATTERN, step_seconds
from permtriton import find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.kernels import cusparselt
from permtriton.kernels.packing import unpack
from permtriton.kernels.tools.case import Case, Inputs, Random, larger_half
from permtriton.kernels.tools.cases.nm_mask import nm_mask_backward_case, nm_mask_case
from permtriton.kernels.tools.cases.norm_permute import norm_permute_case
from permtriton.kernels.tools.cases.sparse_linear import sparse_linear_case
from permtriton.kernels.tools.timing import Timing, captured, measure, relative_error
from permtriton.machine import peak_memory
from permtriton.model.forward import hidden_states
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.model.plan import Plan

SHAPES_7B = [(11008, 4096), (4096, 11008), (4096, 4096)]
SAME_MODEL = 5e-2  # bfloat16 through 32 layers, sums in another order
MASKLESS = "sdpa_without_mask"
HIDDEN = 4096  # channels of the residual stream
NORM_AND_BARE, OF_BARE = "our RMSNorm alone, then cuSPARSELt", "of bare cuSPARSELt without permutation"
DENSE, BARE, SEMI_STRUCTURED = "dense", "cuSPARSELt", "torch's semi-structured linear"


def decode(bench: Bench) -> None:
    """The packed product with few tokens against cuBLAS and cuSPARSELt."""
    for tokens in (1, 16, 4, 64):  # those with goals first
        row = f"sparse_linear, {tokens} tokens"
        figure = partial(goal, row) if row in GOALS else Goal
        for out_features, in_features in bench.pick(SHAPES_7B, [(64, 128)]):
            case = sparse_linear_case(
                tokens, out_features, in_features, bench.pick(torch.bfloat16, torch.float32), bench.device
            )
            bench.compare(row, case, _peers(in_features),
                          lambda times, figure=figure: [
                figure("times faster than cuBLAS dense", ratio(times, DENSE)),
                Goal("times faster than cuSPARSELt", ratio(times, BARE)),
            ], seconds=1.5, alike=(DENSE, BARE, SEMI_STRUCTURED))  # fmt: skip


def prefill(bench: Bench) -> None:
    """Many tokens against cuBLAS and bare cuSPARSELt, with the input permuted in each of the three ways there are.

    A folded permutation is in the weight's order already: the product alone. One after a norm is written by the norm:
    norm and product, against the norm alone and the product. What is left is gathered first, and is only reported.
    """
    dtype, gains = bench.pick(torch.bfloat16, torch.float32), []
    for tokens in bench.pick([2048, 8192], [32]):
        for out_features, in_features in bench.pick(SHAPES_7B, [(64, 128)]):
            shape = (tokens, out_features, in_features, dtype, bench.device)
            case, peers = sparse_linear_case(*shape), _peers(in_features)
            times = bench.compare(f"2:4 prefill, {tokens} tokens", case, peers, _prefill_goals, 1.5, alike=tuple(peers))
            gains.append(ratio(times, DENSE))
            if in_features == HIDDEN or bench.rehearse:  # the inputs of q, k, v, gate and up come from a norm
                bench.compare(f"2:4 prefill after a norm, {tokens} tokens", _after_norm_case(*shape),
                              {NORM_AND_BARE: _norm_and_bare(in_features)}, _after_norm_goals, 1.0)  # fmt: skip
            bench.compare(
                f"2:4 prefill with a gather, {tokens} tokens", sparse_linear_case(*shape, gather=True),
                {BARE: peers[BARE]}, lambda times: [Goal(OF_BARE, ratio(times, BARE))], 1.0,
            )  # fmt: skip
    mean = math.exp(statistics.fmean(map(math.log, gains)))
    bench.add("2:4 prefill", "geometric mean of all shapes", {}, [Goal("times faster than cuBLAS dense", mean)],
              note="hoped for: 1.5")  # fmt: skip


def _prefill_goals(times: Mapping[str, Timing]) -> list[Goal]:
    return [
        goal("2:4 prefill", OF_BARE, ratio(times, BARE)),
        goal("2:4 prefill", "times faster than cuBLAS dense", ratio(times, DENSE)),
    ]


def _after_norm_goals(times: Mapping[str, Timing]) -> list[Goal]:
    return [goal("2:4 prefill", OF_BARE, ratio(times, NORM_AND_BARE))]


def _after_norm_case(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """RMSNorm that writes a permuted order, then a linear with a packed weight in that order."""
    norm = norm_permute_case(tokens, in_features, dtype, device)
    sparse = sparse_linear_case(tokens, out_features, in_features, dtype, device)

    def make(seed: int) -> Inputs:
        return *norm.make(seed), *sparse.make(seed)[1:]

    def run(*inputs: Any) -> Tensor:
        return sparse.run(norm.run(*inputs[:4]), *inputs[4:])

    def reference(*inputs: Any) -> Tensor:
        return sparse.reference(norm.reference(*inputs[:4]).to(dtype), *inputs[4:])

    return dataclasses.replace(
        sparse, op="RMSNorm + sparse_linear", make=make, run=run, reference=reference,
        limit=norm.limit + sparse.limit, bytes=norm.bytes + sparse.bytes, tables=(*norm.tables, *sparse.tables),
    )  # fmt: skip


def _norm_and_bare(in_features: int) -> Prepare:
    """The norm without a permutation, then cuSPARSELt's product."""

    def prepare(inputs: Inputs) -> Callable[[], object]:
        x, scale, weight = inputs[0], inputs[1], unpack(inputs[4], inputs[5], in_features, PATTERN)
        compressed, out_features = cusparselt.compress(weight), weight.shape[0]
        return lambda: cusparselt.product(rms_norm_alone(x, scale, 1e-5), compressed, None, out_features)

    return prepare


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


def semi_structured(bench: Bench) -> None:
    """Whether cuSPARSELt's product can be captured in a CUDA graph, and whether its values lie where ours do."""
    out_features, in_features = bench.pick((4096, 4096), (64, 128))
    dtype = torch.bfloat16
    if not cusparselt.supports(dtype, out_features, in_features, bench.device):
        bench.report("cuSPARSELt", "not there, or not for such a weight")
        return
    weight = Random(0, bench.device).two_of_four(out_features, in_features, dtype)
    fewer = weight.clone()
    fewer[:, ::5] = 0.0
    for what, dense in (("two weights in each group", weight), ("fewer in some groups", fewer)):
        layer = nn.Linear(in_features, out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(dense)
        packed = SparseLinear.from_linear(layer).pack(PATTERN).compress()
        compressed = packed.weight_compressed
        assert compressed is not None
        same = compressed.data_ptr() == packed.weight_values.data_ptr()
        found = "where ours are" if same else "elsewhere: such a layer keeps both forms, 18/16 of the dense memory"
        bench.report(f"cuSPARSELt's values, {what}", found, same=same)
    x = Random(1, bench.device).normal(2048, in_features, dtype=dtype)
    compressed = cusparselt.compress(weight)
    product = partial(cusparselt.product, x, compressed, None, out_features)
    try:
        replay, (out,) = captured([product], bench.device)
        replay()
    except Exception as error:
        bench.report("cuSPARSELt's product in a CUDA graph", f"cannot be captured: {brief(error)}", captured=False)
        return
    wrong = relative_error(out, linear(x, weight))
    found = "is captured, and replays the product" if wrong < SAME_MODEL else f"is captured, but is {wrong:.3g} off"
    bench.report("cuSPARSELt's product in a CUDA graph", found, wrong < SAME_MODEL, captured=True)


def learning_step(bench: Bench) -> None:
    """One learning step against a dense forward and backward pass with weight gradients, at two micro-batch sizes."""
    for out_features, in_features in bench.pick(SHAPES_7B, [(64, 128)]):  # with --tune, while memory is free
        for case in (nm_mask_case, nm_mask_backward_case):
            bench.tuned(case(out_features, in_features, bench.pick(torch.bfloat16, torch.float32), bench.device))
    model = llama(bench, bench.pick(32, 1))
    tokens = bench.pick(1024, 32)
    plan = find_plan(model, PATTERN)
    ids = torch.randint(0, model.config.vocab_size, (bench.pick(16, 2), tokens))
    target = hidden_states(model, Samples.of(ids), bench.pick(2, 2))
    for micro_batch in bench.pick((CompileConfig().micro_batch_size, 16), (1, 2)):
        size = f"{model.config.num_hidden_layers} layers, {ids.shape[0]} x {tokens} tokens, {micro_batch} at once"
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            times = _step_times(bench, model, plan, ids, target, micro_batch)
        except torch.OutOfMemoryError as error:
            bench.leave_out(f"learning step, {size}", error)
            torch.cuda.empty_cache()
            continue
        cost = goal("learning step", "times a dense forward + backward", 1 / ratio(times, "dense forward + backward"))
        peak = peak_memory(model.device)
        bench.add("learning step", size, times, [cost], peak_memory_bytes=peak, note="activation checkpointing in both")


def _step_times(
    bench: Bench, model: PreTrainedModel, plan: Plan, ids: Tensor, target: Tensor, micro_batch: int
) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {"dense forward + backward": [], OURS: []}
    for repeat, pair in enumerate(step_seconds(model, plan, ids, target, micro_batch)):
        for name, seconds in zip(samples, pair, strict=True):
            samples[name].append(seconds)
        if repeat + 1 == bench.pick(5, 2) or (repeat > 2 and bench.seconds_left < 60):
            break
    return {name: Timing(tuple(found[1:]), "host") for name, found in samples.items()}


def inference(bench: Bench) -> None:
    """Sparse against dense: one layer, then a whole model, packed at 2:4 with every permutation folded."""
    for what, layers in (("a layer", 1), ("a model", bench.pick(32, 1))):
        if bench.seconds_left < bench.pick(30, 0):
            bench.leave_out(f"inference, {what}", "no time was left")
            continue
        dense = without_mask(llama(bench, layers))
        sparse = packed(bench, dense)
        for tokens in bench.pick([1, 16, 512, 2048], [1, 16]):
            ids = torch.randint(0, dense.config.vocab_size, (1, tokens), device=bench.device)
            with torch.no_grad():
                runs = {OURS: [_forward(sparse, ids)], DENSE: [_forward(dense, ids)]}
                times = measure(runs, bench.device, 2.0)
                if len({timing.how for timing in times.values()}) > 1:  # launches in one of them only
                    times = measure(runs, bench.device, 2.0, streamed=runs)
            faster = Goal("times faster than dense", ratio(times, DENSE))
            note = "no goal is set; the layer row is embeddings, one layer, norm and head"
            bench.add(f"inference, {what}", f"{layers} layers, {tokens} tokens", times, [faster], note=note)
        del dense, sparse


def without_mask(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model, with an attention that never gets a mask, whether or not a graph is captured.

    With "sdpa", some versions of transformers make a mask during a capture only: of two models of which one can be
    captured, each would have another attention.
    """
    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    model.set_attn_implementation(MASKLESS)
    return model


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
        module.weight.copy_(larger_half(module.weight))
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
