"""The rows of sparse products, of a learning step and of whole models, on LLaMA-2-7B shapes with random weights."""

import copy
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu.bench import Bench, Prepare, brief
from benchmarks.gpu.kernels import rms_norm_alone
from benchmarks.gpu.table import OURS, SHAPES_7B
from benchmarks.shared import PATTERN, step_seconds
from permtriton import find_plan
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.kernels import cusparselt
from permtriton.kernels.packing import unpack
from permtriton.kernels.tools.case import Case, Inputs, Random, larger_half
from permtriton.kernels.tools.cases.norm_permute import norm_permute_case
from permtriton.kernels.tools.cases.sparse_linear import sparse_linear_case
from permtriton.kernels.tools.timing import Timing, captured, measure, relative_error
from permtriton.model.forward import hidden_states
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.recipe import config_from
from permtriton.util.machine import peak_memory

SAME_MODEL = 5e-2  # bfloat16 through 32 layers, sums in another order
MASKLESS = "sdpa_without_mask"
HIDDEN = 4096  # channels of the residual stream
DENSE, BARE = "cuBLAS, dense", "cuSPARSELt"


def decode(bench: Bench) -> None:
    """The packed product with few tokens against cuBLAS and cuSPARSELt."""
    for tokens in (1, 16, 4, 64):  # those with goals first
        for rows, channels in bench.pick(SHAPES_7B, [(64, 128)]):
            case = sparse_linear_case(tokens, rows, channels, bench.dtype, bench.device)
            name = f"sparse_linear, {tokens} token{'s' * (tokens > 1)}"
            bench.compare(name, case, _peers(channels), seconds=1.5)


def prefill(bench: Bench) -> None:
    """Many tokens against cuBLAS and bare cuSPARSELt, with the input permuted in each of the three ways there are.

    A folded permutation is in the weight's order already: the product alone. One after a norm is written by the norm:
    norm and product, against the norm alone and the product. What is left is gathered first.
    """
    for tokens in bench.pick([2048, 8192], [32]):
        for rows, channels in bench.pick(SHAPES_7B, [(64, 128)]):
            shape = (tokens, rows, channels, bench.dtype, bench.device)
            peers = _peers(channels)
            bench.compare(f"2:4 prefill, {tokens} tokens", sparse_linear_case(*shape), peers, seconds=1.5)
            if channels == HIDDEN or bench.tiny:  # the inputs of q, k, v, gate and up come from a norm
                after: dict[str, Prepare] = {BARE: partial(_norm_and_bare, channels)}
                name = f"2:4 prefill after a norm, {tokens} tokens"
                bench.compare(name, _after_norm_case(*shape), after, seconds=1.0, unlike=after)
            gather = sparse_linear_case(*shape, gather=True)
            bench.compare(
                f"gather, then prefill, {tokens} tokens", gather, {BARE: peers[BARE]}, seconds=1.0, unlike=[BARE]
            )


def _after_norm_case(tokens: int, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Case:
    """RMSNorm that writes a permuted order, then a linear with a packed weight in that order."""
    norm = norm_permute_case(tokens, channels, dtype, device)
    sparse = sparse_linear_case(tokens, rows, channels, dtype, device)
    return dataclasses.replace(
        sparse, op="RMSNorm + sparse_linear",
        make=lambda seed: (*norm.make(seed), *sparse.make(seed)[1:]),
        run=lambda *inputs: sparse.run(norm.run(*inputs[:4]), *inputs[4:]),
        reference=lambda *inputs: sparse.reference(norm.reference(*inputs[:4]).to(dtype), *inputs[4:]),
        limit=norm.limit + sparse.limit, bytes=norm.bytes + sparse.bytes, tables=(*norm.tables, *sparse.tables),
    )  # fmt: skip


def _norm_and_bare(channels: int, inputs: Inputs) -> Callable[[], Tensor]:
    x, scale, weight = inputs[0], inputs[1], unpack(inputs[4], inputs[5], channels, PATTERN)
    compressed = cusparselt.compress(weight)
    return lambda: cusparselt.product(rms_norm_alone(x, scale, 1e-5), compressed, None, weight.shape[0])


def _peers(channels: int) -> dict[str, Prepare]:
    """Dense and cuSPARSELt products of the same weight and the same input, without the permutation."""

    def dense(inputs: Inputs) -> Callable[[], Tensor]:
        return partial(linear, inputs[0], unpack(inputs[1], inputs[2], channels, PATTERN))

    def bare(inputs: Inputs) -> Callable[[], Tensor]:
        compressed = cusparselt.compress(unpack(inputs[1], inputs[2], channels, PATTERN))
        return partial(cusparselt.product, inputs[0], compressed, None, inputs[1].shape[0])

    def semi_structured(inputs: Inputs) -> Callable[[], Tensor]:
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT

        weight = unpack(inputs[1], inputs[2], channels, PATTERN)
        return partial(linear, inputs[0], SparseSemiStructuredTensorCUSPARSELT.from_dense(weight))

    return {DENSE: dense, BARE: bare, "torch's semi-structured linear": semi_structured}


def semi_structured(bench: Bench) -> None:
    """Whether cuSPARSELt's values lie where ours do, and whether its product can be captured in a CUDA graph."""
    rows, channels = bench.pick((4096, 4096), (64, 128))
    if not cusparselt.supports(torch.bfloat16, rows, channels, bench.device):
        bench.find("cuSPARSELt", "not there, or not for such a weight")
        return
    weight = Random(0, bench.device).two_of_four(rows, channels, torch.bfloat16)
    fewer = weight.clone()
    fewer[:, ::5] = 0.0
    for what, dense in (("two weights in each group", weight), ("fewer in some groups", fewer)):
        layer = nn.Linear(channels, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(dense)
        packed = SparseLinear.from_linear(layer).pack(PATTERN).compress()
        assert packed.weight_compressed is not None
        same = packed.weight_compressed.data_ptr() == packed.weight_values.data_ptr()
        found = "where ours are" if same else "elsewhere: such a layer keeps both forms, 18/16 of the dense memory"
        bench.find(f"cuSPARSELt's values, {what}", found)
    x = Random(1, bench.device).normal(2048, channels, dtype=torch.bfloat16)
    product = partial(cusparselt.product, x, cusparselt.compress(weight), None, rows)
    try:
        replay, (out,) = captured([product], bench.device)
        replay()
    except Exception as error:
        bench.find("cuSPARSELt's product in a CUDA graph", f"cannot be captured: {brief(error)}")
        return
    wrong = relative_error(out, linear(x, weight))
    bench.find("cuSPARSELt's product in a CUDA graph", f"is captured, {wrong:.2g} off", wrong < SAME_MODEL)


def learning_step(bench: Bench) -> None:
    """One learning step against a dense forward and backward pass with weight gradients, at two micro-batch sizes."""
    model = llama(bench, bench.pick(32, 1))
    tokens, plan = bench.pick(1024, 32), find_plan(model, PATTERN)
    ids = torch.randint(0, model.config.vocab_size, (bench.pick(16, 2), tokens))
    target = hidden_states(model, Samples.of(ids), 2)
    for micro_batch in bench.pick((4, 16), (1, 2)):
        size = f"{model.config.num_hidden_layers} layers, {ids.shape[0]} x {tokens} tokens, {micro_batch} at once"
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            pairs = list(islice(step_seconds(model, plan, ids, target, micro_batch), bench.pick(5, 2)))[1:]
        except torch.OutOfMemoryError as error:
            bench.fail(f"learning step, {size}", error)
            torch.cuda.empty_cache()
            continue
        dense, ours = (Timing(samples, "host") for samples in zip(*pairs, strict=True))
        times = {OURS: ours, "a dense forward and backward pass": dense}
        bench.add("learning step", size, times, peak_memory_bytes=peak_memory(model.device))


def compilation(bench: Bench) -> None:
    """Compiles two layers with the default recipe, packs them, and compares their logits with those before packing."""
    model = llama(bench, bench.pick(2, 1))
    ids = torch.randint(0, model.config.vocab_size, bench.pick((128, 1024), (8, 32)))
    started = time.perf_counter()
    report = compile_model(model, None, config_from(), ids=ids).report
    took = time.perf_counter() - started
    parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())
    bench.find("permtriton.compile", f"{took:.1f} s: {parts}", seconds=report["seconds"])
    pack(bench, model)
    bench.find("packed, its logits", "are those from before it was packed")


def inference(bench: Bench) -> None:
    """Sparse against dense: one layer and a whole model, packed at 2:4; then generating text."""
    for layers in bench.pick((1, 32), (1,)):
        dense = without_mask(llama(bench, layers))
        sparse = copy.deepcopy(dense)
        for _, module in inner_linears(sparse):
            module.weight.data = larger_half(module.weight.data)
        pack(bench, sparse)
        for tokens in bench.pick([1, 16, 512, 2048], [1, 16]):
            ids = torch.randint(0, dense.config.vocab_size, (1, tokens), device=bench.device)
            with torch.no_grad():
                runs = {OURS: [_forward(sparse, ids)], DENSE: [_forward(dense, ids)]}
                times = measure(runs, bench.device, 2.0)
                if len({timing.how for timing in times.values()}) > 1:  # launches in one of them only
                    times = measure(runs, bench.device, 2.0, streamed=runs)
            bench.add("forward pass of a model", f"{layers} layers, {tokens} tokens", times)
        new = bench.pick(64, 4)
        prompt = torch.randint(0, dense.config.vocab_size, (1, 16), device=bench.device)
        runs = {OURS: [_generate(sparse, prompt, new)], DENSE: [_generate(dense, prompt, new)]}
        times = measure(runs, bench.device, 2.0, repeats=3, streamed=runs)
        speed = {"tokens a second": new / times[OURS].quantile(0.5)}
        bench.add("generating text, eager", f"{layers} layers, {new} tokens after 16", times, speed)


def without_mask(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model, with an attention that never gets a mask, whether or not a graph is captured.

    With "sdpa", some versions of transformers make a mask during a capture only: of two models of which one can be
    captured, each would have another attention.
    """
    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    model.set_attn_implementation(MASKLESS)
    return model


def inner_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Returns the linears inside the layers, with their names."""
    return [(name, module) for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and ".layers." in f".{name}"]  # fmt: skip


@torch.no_grad()
def pack(bench: Bench, model: PreTrainedModel) -> None:
    """Packs the linears inside the layers of a pruned model at 2:4, in place.

    Raises:
        AssertionError: packed it computes something else than before it was packed.
    """
    batches = [torch.randint(0, model.config.vocab_size, (1, tokens), device=bench.device) for tokens in (1, 65)]
    expected = [_forward(model, ids)() for ids in batches]
    for name, module in inner_linears(model):
        replace_module(model, name, SparseLinear.from_linear(module).pack(PATTERN).compress())
    for ids, logits in zip(batches, expected, strict=True):
        if (error := relative_error(_forward(model, ids)(), logits)) > SAME_MODEL:
            raise AssertionError(f"packed, {ids.shape[1]} tokens: the logits are {error:.3g} from those before")


def llama(bench: Bench, layers: int) -> PreTrainedModel:
    """Returns a model of LLaMA-2-7B's shapes with random weights, or of tiny ones."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = dict(
        zip(names, bench.pick((32000, 4096, 11008, 32, 32), (256, 64, 128, 4, 4)), strict=True)
    )
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, dtype=bench.dtype, **sizes)
    with bench.device:
        return LlamaForCausalLM._from_config(config).eval().requires_grad_(False)


def _forward(model: PreTrainedModel, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, use_cache=False).logits


def _generate(model: Any, ids: Tensor, new: int) -> Callable[[], Tensor]:
    return lambda: model.generate(ids, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0)
