"""The rows of sparse products, of decoding, of a learning step and of whole models, with random weights."""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu import table
from benchmarks.gpu.bench import Bench, Prepare, ran_as
from benchmarks.gpu.kernels import permute, rms_norm_alone
from benchmarks.gpu.table import BARE, DECODING, DENSE, FEW, LAYER, LAYER_8B, MANY, MORE, OURS, PREFILL, product_name
from benchmarks.gpu.timing import Timing, measure
from benchmarks.shared import PATTERN, step_seconds
from permtriton.data.samples import Samples
from permtriton.kernels import cusparselt
from permtriton.kernels.autotune import choices
from permtriton.kernels.launch import Config
from permtriton.kernels.packing import unpack
from permtriton.kernels.tools.case import Arguments, Case, larger_half, relative_error
from permtriton.kernels.tools.cases import norm_permute_case, sparse_linear_case
from permtriton.methods.planning import plan_model
from permtriton.model.forward import hidden_states
from permtriton.model.modules import SparseLinear, replace_module
from permtriton.recipe import config_from
from permtriton.util.machine import peak_memory

SAME_MODEL = 5e-2  # bfloat16 through 32 layers, sums in another order
MASKLESS = "sdpa_without_mask"
HIDDEN = 4096  # channels of the residual stream
TINY_LAYER = {(64, 64): 2, (64, 128): 1}
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES = {"7B": (32000, 4096, 11008, 32, 32), "8B": (128256, 4096, 14336, 32, 8), "1B": (128256, 2048, 8192, 32, 8),
         "tiny": (256, 64, 128, 4, 4)}  # fmt: skip
CONTEXT = 512  # tokens that a decoded one attends to


def few_tokens(bench: Bench) -> None:
    """The packed product with 1 to 1024 tokens against cuBLAS and cuSPARSELt, shape by shape and for a layer."""
    _products(bench, (*FEW, *MORE), bench.pick(LAYER_8B, TINY_LAYER), LAYER)


def merged(bench: Bench) -> None:
    """The same, of a layer whose q, k, v and gate, up are one product each, on both sides, as engines have them."""
    _products(bench, (*FEW, 256, 1024), bench.pick(table.MERGED_8B, TINY_LAYER), table.MERGED)


def _products(bench: Bench, counts: Sequence[int], layer: dict[tuple[int, int], int], total: str) -> None:
    for tokens in bench.pick(counts, (1, 16)):
        name = product_name(tokens)
        for rows, channels in layer:
            case = sparse_linear_case(tokens, rows, channels, bench.dtype)
            how: dict[str, Any] = {"seconds": 1.0, "reads": tokens in FEW, "label": f"{rows}x{channels}"}
            bench.compare(name, case, _peers(channels), **how)
        weighted(bench, name, layer, total)


def table_3(bench: Bench) -> None:
    """The paper's Table 3: the linears of LLaMA-2-7B with 2048 tokens, dense, 2:4, and 2:4 with a permutation.

    Then what its kernel is compared with: the permutation alone.
    """
    for label, (rows, channels) in bench.pick(table.TABLE_3, {"tiny": (64, 128)}).items():
        shape = (bench.pick(2048, 32), rows, channels, bench.dtype)
        for gather, name in ((False, "Table 3, 2:4"), (True, "Table 3, 2:4 and permutation")):
            peers = {DENSE: _peers(channels)[DENSE]}
            unlike = [DENSE] if gather else []
            how: dict[str, Any] = {"seconds": 0.5, "unlike": unlike, "label": f"{label} {rows}x{channels}"}
            bench.compare(name, sparse_linear_case(*shape, gather=gather), peers, **how)
    permute(bench, ((2048, 4096), (2048, 11008)))


def weighted(bench: Bench, name: str, layer: dict[tuple[int, int], int], total: str) -> None:
    """Adds up the times of a layer's linears, if all of them were measured."""
    found = {result["case"]: result for result in bench.record["results"] if result["name"] == name}
    labels = {f"{rows}x{channels}": count for (rows, channels), count in layer.items()}
    parts = [(found[label], count) for label, count in labels.items() if label in found]
    if total in found or len(parts) < len(layer):
        return
    times = {
        of: Timing((sum(count * result["times"][of]["p50_us"] for result, count in parts) / 1e6,), "sum")
        for of in parts[0][0]["times"] if all(of in result["times"] for result, _ in parts)
    }  # fmt: skip
    floor = sum(count * result["floor_us"] for result, count in parts) / 1e6
    ran = {of: sorted({one for result, _ in parts for one in result[of]}) for of in ("rejected", "routes")}
    bench.add(name, total, times, floor=floor, **ran)


def prefill(bench: Bench) -> None:
    """Many tokens against cuBLAS and bare cuSPARSELt, with the input permuted in each of the three ways there are.

    A folded permutation is in the weight's order already: the product alone. One after a norm is written by the norm:
    norm and product, against the norm alone and the product. What is left is gathered first.
    """
    for tokens in bench.pick(MANY, (32,)):
        for rows, channels in bench.pick(list(LAYER_8B), [(64, 128)]):
            shape = (tokens, rows, channels, bench.dtype)
            peers, label = _peers(channels), f"{rows}x{channels}"
            bench.compare(f"{PREFILL}, {tokens} tokens", sparse_linear_case(*shape), peers, seconds=1.0, label=label)
    tokens, rows, channels = bench.pick((4096, 14336, HIDDEN), (32, 64, 128))
    shape, label = (tokens, rows, channels, bench.dtype), f"{rows}x{channels}"
    after: dict[str, Prepare] = {BARE: partial(_norm_and_bare, channels)}
    name = f"after a norm, then prefill, {tokens} tokens"
    bench.compare(name, _after_norm_case(*shape), after, seconds=1.0, unlike=after, label=label)
    gather, bare = sparse_linear_case(*shape, gather=True), {BARE: _peers(channels)[BARE]}
    bench.compare(f"gather, then prefill, {tokens} tokens", gather, bare, seconds=1.0, unlike=[BARE], label=label)


def _after_norm_case(tokens: int, rows: int, channels: int, dtype: torch.dtype) -> Case:
    """RMSNorm that writes a permuted order, then a linear with a packed weight in that order."""
    norm = norm_permute_case(tokens, channels, dtype)
    sparse = sparse_linear_case(tokens, rows, channels, dtype)
    return dataclasses.replace(
        sparse, op="RMSNorm + sparse_linear",
        inputs=lambda random: (*norm.inputs(random), *sparse.inputs(random)[1:]),
        run=lambda *inputs: sparse.run(norm.run(*inputs[:5]), *inputs[5:]),
        reference=lambda *inputs: sparse.reference(norm.reference(*inputs[:5]).to(dtype), *inputs[5:]),
        limit=norm.limit + sparse.limit, bytes=norm.bytes + sparse.bytes, tables={**norm.tables, **sparse.tables},
    )  # fmt: skip


def _norm_and_bare(channels: int, inputs: Arguments) -> Callable[[], Tensor]:
    x, scale, weight = inputs[0], inputs[1], unpack(inputs[5], inputs[6], channels, PATTERN)
    compressed = cusparselt.compress(weight)
    return lambda: cusparselt.product(rms_norm_alone(x, scale, 1e-5), compressed, None, weight.shape[0])


def _peers(channels: int) -> dict[str, Prepare]:
    """Dense and cuSPARSELt products of the same weight and the same input, without the permutation."""

    def dense(inputs: Arguments) -> Callable[[], Tensor]:
        return partial(linear, inputs[0], unpack(inputs[1], inputs[2], channels, PATTERN))

    found: list[Config] = []  # what the library's search chose, once for all inputs

    def bare(inputs: Arguments, search: bool = False) -> Callable[[], Tensor]:
        compressed = cusparselt.compress(unpack(inputs[1], inputs[2], channels, PATTERN))
        if search and not found:
            found.append(cusparselt.searched(inputs[0], compressed, None, inputs[1].shape[0]))
        config = found[0] if search else cusparselt.CONFIGS[0]
        return partial(cusparselt.product, inputs[0], compressed, None, inputs[1].shape[0], config)

    def of_torch(inputs: Arguments, backend: str) -> Callable[[], Tensor]:
        kind: Any = getattr(torch.sparse, f"SparseSemiStructuredTensor{backend}")
        return partial(linear, inputs[0], kind.from_dense(unpack(inputs[1], inputs[2], channels, PATTERN)))

    return {DENSE: dense, BARE: bare, f"{BARE}, tuned": partial(bare, search=True),
            "torch's semi-structured linear": partial(of_torch, backend="CUSPARSELT"),
            "the same by CUTLASS": partial(of_torch, backend="CUTLASS")}  # fmt: skip


class _FullLayer(StaticLayer):
    """A cache of which the last place is written again in each step: any number of steps can be replayed."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.last = torch.tensor([self.max_cache_len - 1], device=key_states.device)
        self.keys.index_copy_(2, self.last, key_states)
        self.values.index_copy_(2, self.last, value_states)
        return self.keys, self.values


def decoding(bench: Bench) -> None:
    """A step of decoding with a full static cache, captured in a CUDA graph: milliseconds per token, dense and packed.

    What eager `generate` takes is mostly Python. Every step attends to all places of the cache, without a mask.
    """
    _decoding(bench, DECODING, bench.pick(32, 1))


def decoding_compiled(bench: Bench) -> None:
    """The same of a model of fewer layers, both under ``torch.compile``, whose kernels stand in the graph."""
    _decoding(bench, table.COMPILED, bench.pick(8, 1), compiled=True)


def _decoding(bench: Bench, name: str, layers: int, compiled: bool = False) -> None:
    context = bench.pick(CONTEXT, 8)
    dense, sparse = dense_and_packed(bench, "8B", layers)
    if compiled:
        backend = bench.pick("inductor", "eager")  # on a CPU, inductor takes a minute
        torch._dynamo.reset()  # of what a process has compiled before, its limits count
        dense.compile(fullgraph=True, dynamic=False, backend=backend)
        sparse.compile(fullgraph=True, dynamic=False, backend=backend)
    for batch in bench.pick((1, 64, 16) if compiled else (1, 16, 64), (1, 4)):
        case = f"batch {batch}, {context} tokens of context"
        if not bench.begins(f"{name}: {case}"):
            continue
        ids = torch.randint(0, dense.config.vocab_size, (batch, 1), device=bench.device)
        with torch.no_grad():
            steps = {OURS: [one_step(sparse, ids, context)], DENSE: [one_step(dense, ids, context)]}
            with choices() as ran:
                for (step,) in steps.values():
                    step()
            times = measure(steps, bench.device, 3.0)
        if bench.device.type == "cuda" and {timing.how for timing in times.values()} != {"graph"}:
            raise AssertionError("a step of decoding could not be captured in a CUDA graph")
        moved = [bytes_of_a_step(model, batch * context) for model in (sparse, dense)]
        figures = {"milliseconds per step": 1e3 * times[OURS].quantile(0.5),
                   "of the dense model's bytes": moved[0] / moved[1]}  # fmt: skip
        floor = moved[0] / bench.ceilings["read_gb_s"] / 1e9
        bench.add(name, case, times, figures, floor, bytes=moved[0], **ran_as(ran))


def bytes_of_a_step(model: PreTrainedModel, places: int) -> int:
    """Returns the bytes of weights and of the cache that a step of decoding reads.

    Of the embeddings it reads a row per token, and the form of cuSPARSELt, which shares the kept values with the packed
    one, is for many tokens.

    Args:
        model: the model.
        places: of the cache, in all sequences together.
    """
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    skipped = () if tied else (model.get_input_embeddings().weight,)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = sum(
        tensor.nbytes
        for name, tensor in tensors
        if not name.endswith("weight_compressed") and not any(tensor is one for one in skipped)
    )
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # a key and a value
    return weights + places * numbers * model.dtype.itemsize


def one_step(model: Any, ids: Tensor, context: int) -> Callable[[], Tensor]:
    """Returns a call that decodes one token per row of ``ids``, the last of ``context``."""
    cache = StaticCache(config=model.config, max_cache_len=context)
    cache.layers = [_FullLayer(context) for _ in cache.layers]
    place = torch.full_like(ids, context - 1)
    return lambda: model(input_ids=ids, past_key_values=cache, position_ids=place, use_cache=True).logits


def learning_step(bench: Bench) -> None:
    """One learning step against a dense forward and backward pass with weight gradients, at two micro-batch sizes."""
    model = llama(bench, "7B", bench.pick(32, 1))
    tokens, plan = bench.pick(1024, 32), plan_model(model, config_from())[0]
    ids = torch.randint(0, model.config.vocab_size, (bench.pick(16, 2), tokens))
    target = hidden_states(model, Samples.of(ids), 2)
    for micro_batch in bench.pick((4, 16), (1, 2)):
        size = f"{model.config.num_hidden_layers} layers, {ids.shape[0]} x {tokens} tokens, {micro_batch} at once"
        if not bench.begins(f"learning step: {size}"):
            continue
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with choices() as ran:
                pairs = list(islice(step_seconds(model, plan, ids, target, micro_batch), bench.pick(5, 2)))[1:]
        except torch.OutOfMemoryError as error:
            bench.fail(f"learning step: {size}", error)
            torch.cuda.empty_cache()
            continue
        dense, ours = (Timing(samples, "host") for samples in zip(*pairs, strict=True))
        times = {OURS: ours, "a dense forward and backward pass": dense}
        bench.add("learning step", size, times, peak_memory_bytes=peak_memory(model.device), **ran_as(ran))


def compilation(bench: Bench, recipe: str) -> None:
    """Compiles a model of the 1B shape, packs it, and compares its logits with those before packing."""
    model = llama(bench, "1B", bench.pick(16, 1))
    _compile(bench, model, recipe, bench.pick((64, 1024), (8, 32)))
    pack(bench, model)
    bench.find(f"packed, {recipe}, its logits", "are those from before it was packed")


def compiled_layers(bench: Bench) -> None:
    """Compiles four layers of the 8B shape by the default recipe, and says which operators took the GPU's time."""
    model = llama(bench, "8B", bench.pick(4, 1))
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (bench.device.type == "cuda")
    with profile(activities=kinds, acc_events=True) as profiled:
        _compile(bench, model, "default", bench.pick((64, 2048), (8, 32)))
    order = "self_device_time_total" if bench.device.type == "cuda" else "self_cpu_time_total"
    slowest = sorted(profiled.key_averages(), key=lambda event: -getattr(event, order))[:20]
    lines = [f"{event.key[:80]} {getattr(event, order) / 1e6:.2f} s ({event.count})" for event in slowest]
    bench.find("the operators that took most of it", "; ".join(lines))


def _compile(bench: Bench, model: PreTrainedModel, recipe: str, size: tuple[int, int]) -> None:
    from permtriton.driver.pipeline import compile_model  # needs pydantic, which a GPU's machine may lack

    ids = torch.randint(0, model.config.vocab_size, size)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    report = compile_model(model, None, config_from(recipe=recipe), ids=ids).report
    took = time.perf_counter() - started
    parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())
    peak = peak_memory(bench.device)
    weights = sum(weight.nbytes for weight in model.parameters())
    found = f"{took:.1f} s, {peak / 2**30:.1f} GiB at most, weights {weights / 2**30:.1f} GiB: {parts}"
    shape = f"{model.config.num_hidden_layers} layers, {ids.shape[0]} x {ids.shape[1]} tokens"
    bench.find(f"permtriton.compile, {recipe}, {shape}", found, seconds=report["seconds"], peak_memory_bytes=peak)


def inference(bench: Bench) -> None:
    """Sparse against dense: one layer and a whole model, packed at 2:4; then generating text."""
    for layers in bench.pick((1, 32), (1,)):
        dense, sparse = dense_and_packed(bench, "7B", layers)
        for tokens in bench.pick([512, 2048], [1, 16]):
            case = f"{layers} layers, {tokens} tokens"
            if not bench.begins(f"forward pass of a model: {case}"):
                continue
            ids = torch.randint(0, dense.config.vocab_size, (1, tokens), device=bench.device)
            with torch.no_grad(), choices() as ran:
                runs = {OURS: [_forward(sparse, ids)], DENSE: [_forward(dense, ids)]}
                times = measure(runs, bench.device, 2.0)
                if len({timing.how for timing in times.values()}) > 1:  # launches in one of them only
                    times = measure(runs, bench.device, 2.0, streamed=runs)
            bench.add("forward pass of a model", case, times, **ran_as(ran))
        new = bench.pick(16, 4)  # a call runs a dozen times
        case = f"{layers} layers, {new} tokens after 16"
        if bench.begins(f"generating text, eager: {case}"):
            prompt = torch.randint(0, dense.config.vocab_size, (1, 16), device=bench.device)
            runs = {OURS: [_generate(sparse, prompt, new)], DENSE: [_generate(dense, prompt, new)]}
            times = measure(runs, bench.device, 2.0, repeats=3, streamed=runs)
            speed = {"tokens a second": new / times[OURS].quantile(0.5)}
            bench.add("generating text, eager", case, times, speed)


def dense_and_packed(bench: Bench, size: str, layers: int) -> Sequence[PreTrainedModel]:
    """Returns a dense model, and one whose linears inside the layers are packed 2:4; their attention takes no mask."""
    dense = without_mask(llama(bench, size, layers))
    sparse = copy.deepcopy(dense)
    for _, module in inner_linears(sparse):
        module.weight.data = larger_half(module.weight.data)
    pack(bench, sparse)
    return dense, sparse


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


def llama(bench: Bench, size: str, layers: int) -> PreTrainedModel:
    """Returns a model of the shapes of LLaMA-2-7B, LLaMA-3-8B or a 1B model with random weights, or of tiny ones."""
    sizes: dict[str, Any] = dict(zip(NAMES, SIZES[bench.pick(size, "tiny")], strict=True))
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096, dtype=bench.dtype, **sizes)
    with bench.device:
        return LlamaForCausalLM._from_config(config).eval().requires_grad_(False)


def _forward(model: PreTrainedModel, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, use_cache=False).logits


def _generate(model: Any, ids: Tensor, new: int) -> Callable[[], Tensor]:
    return lambda: model.generate(ids, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0)
