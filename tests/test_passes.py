"""Every pass on every architecture: graphs stay valid, outputs stay, what is left is counted, what breaks is named."""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from permtriton.config import LearnConfig
from permtriton.errors import VerificationError
from permtriton.experts import unstack_experts
from permtriton.forward import cosine_loss, last_hidden_state
from permtriton.importance import Importance
from permtriton.kernels import norm_permute
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.learn import Trainer, learned_spaces, masked_model
from permtriton.passes import drawing
from permtriton.passes.cancel_permutations import cancel_permutations
from permtriton.passes.fold import fold
from permtriton.passes.fuse_permutations import DECISIONS, fuse_permutations
from permtriton.passes.graph import (
    NM_MASK,
    NORM_PERMUTE,
    PACK,
    PERMUTE,
    SITE,
    SPARSE_LINEAR,
    Constants,
    absorb,
    copied,
    index_value,
    module_path,
    parameter_node,
    wrap,
)
from permtriton.passes.insert_masks import insert_masks
from permtriton.passes.insert_permutations import insert_permutations
from permtriton.passes.insert_relaxation import insert_relaxation
from permtriton.passes.layout import separate
from permtriton.passes.lower import lower
from permtriton.passes.pipeline import (
    PASS_NAMES,
    Pass,
    PassResult,
    all_passes,
    permutation_passes,
    run_passes,
    stand_in_passes,
)
from permtriton.passes.provenance import propagate
from permtriton.passes.sites import find_sites
from permtriton.passes.verify_graph import relative_difference, run
from permtriton.permutation import compose, identity, inverse
from permtriton.plan import Plan, linear_module, weight_in_out
from permtriton.relaxation import Relaxation
from permtriton.sparsity import NMPattern
from permtriton.trace import Traced, trace

from . import zoo
from .test_fold import float32_means_float64

PATTERN = NMPattern(2, 4)
LAYOUTS = ("portable", "fused", "free")
NAMES = [*zoo.ARCHITECTURES, *zoo.MIXTURES]
CASES = [
    (name, layout) for name in NAMES for layout in LAYOUTS if layout != "free" or name not in ("qwen3_moe", "olmoe")
]
every_case = pytest.mark.parametrize(("name", "layout"), CASES)
BATCH = zoo.token_ids(1, 4)


def built(name: str) -> PreTrainedModel:
    if name in zoo.ARCHITECTURES:
        return zoo.build(name)
    model = zoo.build_mixture(name)
    unstack_experts(model)
    return model


@functools.cache
def traced(name: str) -> tuple[PreTrainedModel, Traced, Plan]:
    model = built(name)
    found = trace(model)
    provenance = propagate(found.graph_module, found.outputs, found.hidden)
    return model, found, find_sites(provenance, model, found.hidden_node, PATTERN)


def planned(name: str, layout: str) -> tuple[PreTrainedModel, Plan, fx.GraphModule]:
    """A model that must not be changed, a plan of its own, and its graph."""
    model, found, plan = traced(name)
    plan = copy.deepcopy(plan)
    if layout != "portable":
        plan = separate(plan, found.graph_module, model, o_proj="free" if layout == "free" else "tied")
    return model, plan, found.graph_module


def private(name: str, layout: str) -> tuple[PreTrainedModel, Plan, fx.GraphModule]:
    """A model that may be changed, with a graph over its own parameters."""
    model = built(name)
    graph_module = copied(traced(name)[1].graph_module)
    for parameter, value in model.named_parameters():
        if parameter_node(graph_module, parameter) is not None:
            owner, _, attribute = parameter.rpartition(".")
            graph_module.get_submodule(owner).register_parameter(attribute, value)
    return model, planned(name, layout)[1], graph_module


def random_importances(plan: Plan, model: nn.Module, seed: int = 0) -> dict[str, Importance]:
    """Every form of score by turns: scale alone, squared weights, sums of a row and a column factor."""
    generator = torch.Generator().manual_seed(seed)

    def factor(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    found = {}
    for number, (site, name) in enumerate(plan.linears()):
        more = (factor(weight_in_out(linear_module(model, name)).shape[1]), factor(site.channels))
        found[name] = Importance(1 + number % 2, factor(site.channels), *(more if number % 3 == 0 else ()))
    return found


@torch.no_grad()
def mask(model: nn.Module, plan: Plan, indices: dict[str, Tensor], importances: dict[str, Importance]) -> None:
    """Zeroes what the importances, given in the order before ``indices`` were folded, do not keep."""
    for site, name in plan.linears():
        order = site.expand(indices[site.space.name]) if site.space.name in indices else identity(site.channels)
        given, weight = importances[name], weight_in_out(linear_module(model, name))
        column = None if given.column is None else given.column[order]
        scores = Importance(given.power, given.scale[order], given.row, column)
        if given.row is not None:
            rows = row_order(plan, indices, name, weight.shape[1])
            scores = Importance(given.power, given.scale[order], given.row[rows], column)
        weight.masked_fill_(~top_n_mask(scores.scores(weight), PATTERN.kept, PATTERN.group), 0)


def row_order(plan: Plan, indices: dict[str, Tensor], name: str, rows: int) -> Tensor:
    """The order that folding ``indices`` gives the rows of a linear's weight."""
    order = identity(rows)
    for space in plan.spaces:
        for axis in space.axes:
            if axis.parameter == f"{name}.weight" and not axis.reads and space.name in indices:
                order = compose(order, axis.expand(indices[space.name]))
    return order


@dataclass
class Compiled:
    """What the whole compiler made of a model, and what each pass did on the way."""

    model: PreTrainedModel
    plan: Plan
    indices: dict[str, Tensor]
    importances: dict[str, Importance]
    source: str
    source_after: str
    graph_module: fx.GraphModule
    results: list[PassResult] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # before the first pass, and after each
    printed: list[str] = field(default_factory=list)


def told(graph_module: fx.GraphModule) -> str:
    return f"{graph_module.graph}{[(name, id(p)) for name, p in graph_module.named_parameters()]}{graph_module.meta}"


@functools.cache
def compiled(name: str, layout: str) -> Compiled:
    model, plan, graph_module = planned(name, layout)
    indices, importances = zoo.random_indices(plan), random_importances(plan, model)
    source, dense = told(graph_module), run(graph_module, BATCH)
    found = Compiled(model, plan, indices, importances, source, "", graph_module, outputs=[dense])

    def observe(result: PassResult) -> None:
        result.graph_module.graph.lint()
        found.results.append(result)
        found.outputs.append(run(result.graph_module, BATCH))
        found.printed.append(result.graph_module.print_readable(print_output=False))
        assert len(drawing.listing(result.graph_module)) == len(result.graph_module.graph.nodes)

    found.graph_module = run_passes(graph_module, all_passes(plan, indices, importances, PATTERN), [BATCH], observe)
    found.source_after = told(graph_module)
    return found


# -- every pass on every architecture ----------------------------------------------------------------------------------


@every_case
def test_every_graph_is_valid_runs_and_prints(name, layout):
    case = compiled(name, layout)
    assert tuple(result.name for result in case.results) == PASS_NAMES
    assert all(bool(output.isfinite().all()) for output in case.outputs)
    for result, text in zip(case.results, case.printed, strict=True):
        assert "def forward(self, input_ids" in text, result.name
    words = ("permute", "nm_mask", "permute", "permute", "sparse_linear")
    assert all(f"permtriton.{word}" in text for word, text in zip(words, case.printed, strict=True))
    with torch.no_grad():
        by_code = case.graph_module(BATCH)[0]
    assert relative_difference(case.outputs[-1], by_code) < 1e-4, "the generated code is the graph"


@every_case
def test_exact_passes_leave_the_outputs(name, layout):
    case = compiled(name, layout)
    # The RMS norm's operator computes in float32 whatever its input is.
    tolerance = 1e-5 if any(site.norm and site.norm.kind != "layer" for site in case.plan.sites) else 1e-12
    for number, result in enumerate(case.results):
        difference = relative_difference(case.outputs[number], case.outputs[number + 1])
        if result.name == "insert_masks":
            assert difference > 1e-2, "the masks do something"
            assert result.difference is None
        else:
            assert difference <= tolerance, result.name
            assert result.difference == difference, result.name


@every_case
def test_the_traced_graph_is_left_alone(name, layout):
    case = compiled(name, layout)
    assert case.source == case.source_after


@dataclass(frozen=True)
class Counts:
    """What is left of the permutations in one layer, and outside all layers.

    Attributes:
        folded: parameters that are permuted, once each along rows or columns.
        outside: those of no layer.
        norms: that write a permuted order.
        gathers: inside ``sparse_linear``.
    """

    folded: int
    norms: int = 0
    gathers: int = 0
    outside: int = 0


# q, k, v, gate, up, o and down: 7 by their columns; v, gate and up by their rows; in the stream o and down, too.
LLAMA = (7, Counts(14, outside=3), Counts(10, norms=2), Counts(9, norms=2, gathers=1))
EXPERTS = {  # 4 + 2 a expert; the router's columns move with the norm
    "portable": Counts(4 + 10 + 1 + 5 + 1 + 5 + 2 + 1, outside=3),
    "fused": Counts(4 + 10 + 1 + 5 + 1, norms=2),
    "free": Counts(4 + 10 + 5 + 1, norms=2, gathers=1),
}
EXPECTED: dict[str, tuple[int, Counts, Counts, Counts]] = {
    "llama": LLAMA,
    "llama_tied": (7, Counts(14, outside=2), *LLAMA[2:]),
    "llama_eager": (7, Counts(19, outside=3), Counts(13, norms=2), Counts(11, norms=2, gathers=1)),
    "mistral": LLAMA,
    "qwen2": (7, Counts(15, outside=3), Counts(11, norms=2), Counts(9, norms=2, gathers=1)),
    "qwen3": LLAMA,
    "phi3": (4, Counts(10, outside=3), Counts(6, norms=2), Counts(5, norms=2, gathers=1)),
    "gemma2": (7, Counts(16, outside=2), *LLAMA[2:]),
    "opt": (6, Counts(18, outside=4), Counts(10, norms=2), Counts(8, norms=2, gathers=1)),
    "gpt_neox": (4, Counts(16, outside=4), Counts(8, norms=2), Counts(6, norms=2, gathers=1)),
    "olmo2": (7, Counts(14, outside=3), Counts(10, gathers=5), Counts(9, gathers=6)),
    "gpt2": (4, Counts(16, outside=4), Counts(8, norms=2), Counts(8, norms=2)),  # a Conv1D gathers nothing
    "bert_mlm": (6, Counts(18, outside=10), Counts(10, gathers=4), Counts(8, gathers=5)),
    "bert": (6, Counts(6), Counts(10, gathers=4), Counts(8, gathers=5)),  # the stream is an output
    "mixtral": (14, *EXPERTS.values()),
    "qwen3_moe": (14, *EXPERTS.values()),
    "olmoe": (14, *EXPERTS.values()),
    "qwen2_moe": (17, Counts(16), Counts(28, norms=2), Counts(26, norms=2, gathers=1)),
    "gpt_oss": (4, Counts(3), Counts(6, norms=1), Counts(4, norms=1, gathers=1)),
}


def counted(graph_module: fx.GraphModule) -> dict[str, int]:
    nodes = list(graph_module.graph.nodes)
    sparse = [node for node in nodes if node.target is SPARSE_LINEAR]
    return {
        "folded": sum(node.target is PERMUTE and SITE not in node.meta for node in nodes),
        "activations": sum(node.target is PERMUTE and SITE in node.meta for node in nodes),
        "norms": sum(node.target is NORM_PERMUTE for node in nodes),
        "gathers": sum(node.args[4] is not None for node in sparse),
        "sparse": len(sparse),
        "packs": sum(node.target is PACK for node in nodes),
        "masks": sum(node.target is NM_MASK for node in nodes),
    }


def test_every_architecture_has_its_counts():
    assert list(EXPECTED) == [*zoo.ARCHITECTURES, "mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss"]
    assert set(EXPECTED) == set(NAMES)


@every_case
def test_expected_fold_counts(name, layout):
    case = compiled(name, layout)
    linears, counts = EXPECTED[name][0], EXPECTED[name][1 + LAYOUTS.index(layout)]
    sparse = zoo.LAYERS * linears
    assert counted(case.graph_module) == {
        "folded": zoo.LAYERS * counts.folded + counts.outside,
        "activations": 0,
        "norms": zoo.LAYERS * counts.norms,
        "gathers": zoo.LAYERS * counts.gathers,
        "sparse": sparse,
        "packs": sparse,
        "masks": sparse,
    }


@every_case
def test_node_counts_are_told(name, layout):
    case = compiled(name, layout)
    for earlier, later in zip(case.results, case.results[1:], strict=False):
        assert earlier.after == later.before
    inserted, masked = case.results[0].changes, case.results[1].changes
    sites = [site for site in case.plan.sites if not site.space.frozen]
    linears = sum(len(site.linears) for site in sites)
    assert inserted["permtriton.permute.default"] == linears + len(sites)
    assert set(inserted) == {"permtriton.permute.default"}
    assert masked["permtriton.nm_mask.default"] == len(list(case.plan.linears()))


# -- graph and modules -------------------------------------------------------------------------------------------------


@every_case
def test_the_lowered_graph_is_what_the_modules_compute(name, layout):
    """Folding and masking the modules, and the graph, are two ways to the same model."""
    case = compiled(name, layout)
    model = built(name)
    dense = zoo.outputs(model, BATCH)[0]
    fold(model, case.plan, case.indices)
    assert relative_difference(dense, zoo.outputs(model, BATCH)[0]) < 1e-4, "without masks it is the dense model"
    mask(model, case.plan, case.indices, case.importances)
    masked = zoo.outputs(model, BATCH)[0]
    assert relative_difference(dense, masked) > 1e-2
    assert relative_difference(run(case.graph_module, BATCH, wide=False), masked) < 1e-4
    for _, linear in case.plan.linears():
        kept = (weight_in_out(linear_module(model, linear)).t() != 0).unflatten(1, (-1, 4)).sum(-1)
        assert bool((kept == 2).all()), linear


@pytest.mark.parametrize("layout", ["fused", "free"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss"])  # torch has no such product in float64
def test_run_time_permutations_are_exact_in_float64(name, layout, monkeypatch):
    monkeypatch.setattr(norm_permute.norm_reference, "__defaults__", (None, torch.float64))
    model, plan = built(name).double(), planned(name, layout)[1]
    ids = zoo.token_ids(2, 8)
    with float32_means_float64():
        before = zoo.outputs(model, ids)
        fold(model, plan, zoo.random_indices(plan, 3))
        after = zoo.outputs(model, ids)
    assert before[0].dtype == torch.float64
    assert zoo.difference(before, after) < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt2", "mixtral"])
def test_two_rounds_compose(name, layout):
    """The base order, then what was learned on top: norms and gathers that permute already take the rest on."""
    model, plan, graph_module = private(name, layout)
    expected = run(graph_module, BATCH)
    counts = []
    for seed in (0, 50):
        indices = zoo.random_indices(plan, seed)
        graph_module = run_passes(graph_module, permutation_passes(plan, indices), [BATCH])
        fold(model, plan, indices)
        graph_module = absorb(graph_module)
        counts.append(counted(graph_module))
        assert relative_difference(expected, run(graph_module, BATCH)) < 1e-5
        assert relative_difference(expected, zoo.outputs(model, BATCH)[0]) < 1e-4
    assert counts[0] == counts[1]
    assert counts[0]["folded"] == 0


def test_a_model_on_meta_gets_the_same_graph():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = zoo.ARCHITECTURES["llama"]().eval()
    found = trace(model)
    provenance = propagate(found.graph_module, found.outputs, found.hidden)
    plan = find_sites(provenance, model, found.hidden_node, PATTERN)
    plan = separate(plan, found.graph_module, model)
    results: list[PassResult] = []
    empty = run_passes(found.graph_module, stand_in_passes(plan, found.graph_module, PATTERN), observe=results.append)
    assert {result.difference for result in results} == {None}
    real = compiled("llama", "fused")
    assert counted(empty) == counted(real.graph_module)
    assert [result.changes for result in results] == [result.changes for result in real.results]


# -- the verifier names what is broken ---------------------------------------------------------------------------------


def damaged(function: Callable, damage: Callable[[fx.GraphModule], None]) -> Callable:
    """A pass of the same name whose result is damaged."""

    @functools.wraps(function)
    def broken(graph_module: fx.GraphModule, **options: object) -> fx.GraphModule:
        graph_module = function(graph_module, **options)
        damage(graph_module)
        return graph_module

    return broken


def broken_run(name: str, layout: str, function: Callable, damage: Callable, *, numbers: bool = True) -> str:
    """Runs the compiler with one pass damaged and returns what the verifier says."""
    _, plan, graph_module = planned(name, layout)
    indices = compiled(name, layout).indices
    steps = []
    for step in all_passes(plan, indices, compiled(name, layout).importances, PATTERN):
        if step.name == function.__name__:
            options = step.run.keywords if isinstance(step.run, partial) else {}
            step = Pass(partial(damaged(function, damage), **options), step.exact)
        steps.append(step)
    with pytest.raises(VerificationError, match=f"^pass {function.__name__}: ") as caught:
        run_passes(graph_module, steps, [BATCH] if numbers else ())
    assert "this is a bug of permtriton" in str(caught.value)
    return str(caught.value)


def undo(graph_module: fx.GraphModule, parameter: str) -> None:
    """Takes the last permutation of a parameter away."""
    node = parameter_node(graph_module, parameter)
    while True:
        (user,) = node.users
        if "permtriton" not in user.meta:
            break
        node = user
    assert node.target is PERMUTE
    node.replace_all_uses_with(node.args[0])


def node_in(graph_module: fx.GraphModule, message: str) -> fx.Node:
    name = re.search(r"node (?:that differs is )?(\w+)", message)[1]
    return next(node for node in graph_module.graph.nodes if node.name == name)


PRODUCERS = {
    "mlp.gate_proj.weight": "mlp",
    "mlp.up_proj.weight": "mlp",
    "self_attn.v_proj.weight": "self_attn",
}


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_producer_that_is_not_folded(producer, numbers, layout):
    damage = partial(undo, parameter=f"model.layers.1.{producer}")
    message = broken_run("llama", layout, fuse_permutations, damage, numbers=numbers)
    assert "joins channels that are different ones" in message
    node = node_in(planned("llama", layout)[2], message)
    assert module_path(node).startswith(f"model.layers.1.{PRODUCERS[producer]}")


@pytest.mark.parametrize("parameter", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_part_of_the_stream_that_is_not_folded(parameter):
    message = broken_run("llama", "portable", fuse_permutations, partial(undo, parameter=parameter))
    assert "joins channels that are different ones" in message


def buffer_of(graph_module: fx.GraphModule, node: fx.Node) -> Tensor:
    """An index's own buffer, of which the graph module gets its own copy."""
    name = str(node.target)
    setattr(graph_module, name, getattr(graph_module, name).clone())
    return getattr(graph_module, name)


def activation_permutes(graph_module: fx.GraphModule, site: str) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if str(node.meta.get(SITE, "")).endswith(site)]


def test_an_index_that_is_no_bijection():
    def repeat(graph_module: fx.GraphModule) -> None:
        index = buffer_of(graph_module, activation_permutes(graph_module, "1.mlp.down_proj")[0].args[1])
        index[0] = index[1]

    message = broken_run("llama", "portable", insert_permutations, repeat)
    assert re.search(r"index permtriton_index_\d+ is no permutation", message)


def test_an_index_that_crosses_a_head():
    """Here it is harmless, since nothing is folded yet: only the rule on indices sees it."""

    def cross(graph_module: fx.GraphModule) -> None:
        index = buffer_of(graph_module, activation_permutes(graph_module, "1.self_attn.o_proj")[0].args[1])
        head = zoo.HEAD_DIM
        index[[0, head]] = index[[head, 0]]

    message = broken_run("llama", "portable", insert_permutations, cross)
    assert "moves channels out of the run 0 to 15 (a head, or a block)" in message


def test_an_index_that_crosses_a_block():
    _, plan, graph_module = planned("llama", "portable")
    inside = {
        space.name: torch.cat([start + torch.randperm(size) for start, size in space.blocks(16)])
        for space in plan.spaces
    }
    run_passes(graph_module, permutation_passes(plan, inside, 16), [BATCH])
    with pytest.raises(VerificationError, match=r"pass insert_permutations: index .* out of the run 0 to 15"):
        run_passes(graph_module, permutation_passes(plan, zoo.random_indices(plan), 16), [BATCH])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_permutation_that_is_dropped_before_its_linear(layout):
    def drop(graph_module: fx.GraphModule) -> None:
        (node,) = activation_permutes(graph_module, "0.mlp.gate_proj+up_proj")
        node.replace_all_uses_with(node.args[0])

    message = broken_run("llama", layout, insert_permutations, drop)
    assert "joins channels that are different ones" in message
    assert module_path(node_in(planned("llama", layout)[2], message)).startswith("model.layers.0.mlp")


def other_norm_index(graph_module: fx.GraphModule, module: str) -> None:
    node = next(n for n in graph_module.graph.nodes if n.target is NORM_PERMUTE and module_path(n) == module)
    wrong = index_value(node.args[3]).flip(0)
    node.update_arg(3, Constants(graph_module).index(wrong))


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize(
    ("name", "module"), [("llama", "model.layers.1.input_layernorm"), ("gpt2", "transformer.h.1.ln_1")]
)
def test_a_norm_that_writes_another_order(name, module, numbers):
    damage = partial(other_norm_index, module=module)
    message = broken_run(name, "fused", fuse_permutations, damage, numbers=numbers)
    assert "joins channels that are different ones" in message


def test_a_norm_with_an_index_of_another_length():
    def lengthen(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.target is NORM_PERMUTE)
        node.update_arg(3, Constants(graph_module).index(identity(zoo.INTERMEDIATE)))

    message = broken_run("llama", "fused", fuse_permutations, lengthen)
    assert re.search(r"node \w+ gathers 64 channels with an index of 112", message)


def product_of(graph_module: fx.GraphModule, linear: str) -> fx.Node:
    calls = [node for node in graph_module.graph.nodes if module_path(node) == linear]
    return next(node for node in calls if node.target in (torch.ops.aten.linear.default, SPARSE_LINEAR))


def scale_output(graph_module: fx.GraphModule, linear: str, factor: float) -> None:
    wrap(product_of(graph_module, linear), torch.ops.aten.mul.Tensor, (factor,))


@pytest.mark.parametrize("factor", [1.01, float("nan")])
@pytest.mark.parametrize("function", [insert_permutations, fuse_permutations, cancel_permutations, lower])
def test_numbers_that_are_wrong(function, factor):
    """The channels are right, so only the outputs tell; and the first node of both graphs that differs is named."""
    linear = "model.layers.1.mlp.up_proj"
    message = broken_run("llama", "fused", function, partial(scale_output, linear=linear, factor=factor))
    assert re.search(r"outputs differ by [\d.e+nan-]+ of their size, more than 1e-05", message)
    (reader,) = product_of(planned("llama", "fused")[2], linear).users
    assert message.split("first node that differs is ")[1].startswith(f"{reader.name}. ")


def test_wrong_numbers_are_not_seen_without_weights():
    """What the structure alone can show is stated: a model on meta is never compared, nor an approximate pass."""
    graph_module = planned("llama", "fused")[2]

    def scale(graph_module: fx.GraphModule) -> fx.GraphModule:
        scale_output(graph_module, "lm_head", 2.0)
        return graph_module

    run_passes(graph_module, [Pass(scale)])
    run_passes(graph_module, [Pass(scale, exact=False)], [BATCH])
    with pytest.raises(VerificationError, match=r"pass scale: outputs differ by .* that differs is the output"):
        run_passes(graph_module, [Pass(scale)], [BATCH])


@pytest.mark.parametrize("numbers", [True, False])
def test_a_product_that_is_lost(numbers):
    """Channels that were joined are apart, and a weight is no longer read."""
    (product,) = [
        node.name
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1.mlp" and node.target is torch.ops.aten.mul.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == product)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose, numbers=numbers)
    assert re.search("only one of the graphs .* reads model.layers.1.mlp.(gate|up)_proj.weight", message)


@pytest.mark.parametrize("numbers", [True, False])
def test_a_residual_that_is_lost(numbers):
    added = [
        node
        for node in planned("llama", "fused")[2].graph.nodes
        if module_path(node) == "model.layers.1" and node.target is torch.ops.aten.add.Tensor
    ]

    def lose(graph_module: fx.GraphModule) -> None:
        node = next(n for n in graph_module.graph.nodes if n.name == added[0].name)
        node.replace_all_uses_with(node.args[1])

    message = broken_run("llama", "fused", cancel_permutations, lose, numbers=numbers)
    assert f"nothing joins the channels any more that node {added[0].name} joins" in message


# -- cancel_permutations -----------------------------------------------------------------------------------------------

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FIRST, SECOND = (torch.randperm(8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


class Chain:
    """``neg(x)``, what is appended to it, and the outputs."""

    def __init__(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = X
        self.start = graph.call_function(torch.ops.aten.neg.default, (x,))
        self.start.meta["val"] = X
        graph.output((self.start,))
        self.module = fx.GraphModule(nn.Module(), graph)
        self.constants = Constants(self.module)

    def call(self, target: object, *arguments: object) -> fx.Node:
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        with self.module.graph.inserting_before(output):
            node = self.module.graph.call_function(target, arguments)
        node.meta["val"] = X
        return node

    def permute(self, node: fx.Node, index: Tensor, *dim: int) -> fx.Node:
        return self.call(PERMUTE, node, self.constants.index(index), *dim)

    def norm(self, node: fx.Node, index: Tensor) -> fx.Node:
        weight = self.constants.tensor(torch.arange(1.0, 9.0, dtype=torch.float64), "weight")
        return self.call(NORM_PERMUTE, node, weight, None, self.constants.index(index), 1e-6, 0.0, "rms")

    def cancelled(self, *outputs: fx.Node) -> list[fx.Node]:
        """Cancels, checks that the outputs stay, and returns the permuting nodes that are left."""
        next(node for node in self.module.graph.nodes if node.op == "output").args = (outputs,)
        self.module.recompile()
        before = fx.Interpreter(self.module).run(X)
        after = cancel_permutations(self.module)
        after.graph.eliminate_dead_code()
        after.graph.lint()
        for expected, got in zip(before, fx.Interpreter(after).run(X), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        return [node for node in after.graph.nodes if node.target in (PERMUTE, NORM_PERMUTE)]


def test_the_identity_goes():
    chain = Chain()
    assert chain.cancelled(chain.permute(chain.start, identity(8))) == []


def test_two_permutations_become_one():
    chain = Chain()
    (left,) = chain.cancelled(chain.permute(chain.permute(chain.start, FIRST), SECOND))
    assert torch.equal(index_value(left.args[1]), FIRST[SECOND])


def test_three_permutations_become_one_and_none_where_they_undo_each_other():
    chain = Chain()
    undone = inverse(FIRST[SECOND])
    end = chain.permute(chain.permute(chain.permute(chain.start, FIRST), SECOND), undone)
    assert chain.cancelled(end) == []


def test_a_permutation_and_its_inverse_vanish():
    chain = Chain()
    assert chain.cancelled(chain.permute(chain.permute(chain.start, FIRST), inverse(FIRST))) == []


def test_an_inner_permutation_with_other_readers_stays_for_them():
    chain = Chain()
    inner = chain.permute(chain.start, FIRST)
    left = chain.cancelled(inner, chain.permute(inner, SECOND), chain.permute(inner, inverse(FIRST)))
    assert [index_value(node.args[1]).tolist() for node in left] == [FIRST.tolist(), FIRST[SECOND].tolist()]
    assert {node.args[0].name for node in left} == {chain.start.name}


def test_permutations_of_other_dimensions_do_not_merge():
    chain = Chain()
    rows = torch.tensor([2, 0, 1])
    left = chain.cancelled(chain.permute(chain.permute(chain.start, rows, 0), FIRST))
    assert len(left) == 2


def test_a_dimension_counts_from_both_ends():
    chain = Chain()
    assert len(chain.cancelled(chain.permute(chain.permute(chain.start, FIRST, 1), SECOND, -1))) <= 2


def test_a_norm_takes_the_permutation_after_it():
    chain = Chain()
    (left,) = chain.cancelled(chain.permute(chain.norm(chain.start, FIRST), SECOND))
    assert left.target is NORM_PERMUTE
    assert torch.equal(index_value(left.args[3]), FIRST[SECOND])


def test_a_norm_takes_a_permutation_that_all_its_readers_share():
    chain = Chain()
    norm = chain.norm(chain.start, FIRST)
    (left,) = chain.cancelled(chain.permute(norm, SECOND), chain.permute(norm, SECOND))
    assert torch.equal(index_value(left.args[3]), FIRST[SECOND])


@pytest.mark.parametrize("other", ["plain", "another order"])
def test_a_norm_with_other_readers_keeps_its_order(other):
    chain = Chain()
    norm = chain.norm(chain.start, FIRST)
    second = norm if other == "plain" else chain.permute(norm, SECOND.flip(0))
    left = chain.cancelled(chain.permute(norm, SECOND), second)
    assert torch.equal(index_value(left[0].args[3]), FIRST)
    assert len(left) == (2 if other == "plain" else 3)


# -- decisions ---------------------------------------------------------------------------------------------------------


def decisions(name: str, layout: str) -> dict[str, str]:
    case = compiled(name, layout)
    found = case.graph_module.meta[DECISIONS]
    assert [decision.space for decision in found] == [space.name for space in case.plan.spaces]
    for decision in found:
        space = next(space for space in case.plan.spaces if space.name == decision.space)
        assert decision.sites == tuple(site.name for site in case.plan.sites_of(space))
    return {decision.space: decision.where for decision in found}


def test_decisions_of_llama():
    layer = "model.layers.1"
    fused = decisions("llama", "fused")
    assert len(fused) == 4 * zoo.LAYERS
    assert fused[f"{layer}.self_attn.q_proj+k_proj+v_proj"] == f"in the norm {layer}.input_layernorm"
    assert fused[f"{layer}.mlp.gate_proj+up_proj"] == f"in the norm {layer}.post_attention_layernorm"
    assert fused[f"{layer}.self_attn.o_proj"] == "folded into 1 parameters"
    assert fused[f"{layer}.mlp.down_proj"] == "folded into 2 parameters"
    assert decisions("llama", "portable")["stream"].startswith("folded into ")
    free = decisions("llama", "free")[f"{layer}.self_attn.o_proj"]
    assert free.startswith(f"a gather before {layer}.self_attn.o_proj: ")


@pytest.mark.parametrize(("name", "readers"), [("mixtral", 1), ("qwen3_moe", 1), ("qwen2_moe", 2)])
def test_a_router_that_reads_the_norm_is_permuted_with_it(name, readers):
    """The router, and the gate of a shared expert, get their columns permuted; the graph and the modules agree."""
    found = [where for where in decisions(name, "fused").values() if "post_attention_layernorm" in where]
    assert found == [
        f"in the norm model.layers.{layer}.post_attention_layernorm, with the columns of {readers} other readers"
        for layer in range(zoo.LAYERS)
    ]
    case, model = compiled(name, "fused"), built(name)
    router = "model.layers.1.mlp.gate.weight"
    before = model.get_parameter(router).detach().clone()
    fold(model, case.plan, case.indices)
    (index,) = [
        case.indices[s.name] for s in case.plan.sites if s.norm and s.norm.module.endswith("1.post_attention_layernorm")
    ]
    assert torch.equal(model.get_parameter(router), before[:, index])


@pytest.mark.parametrize("name", ["bert", "bert_mlm", "olmo2"])
def test_a_residual_that_reads_the_same_channels_leads_to_a_gather(name):
    found = [where for where in decisions(name, "fused").values() if not where.startswith("folded")]
    assert len(found) == 2 * zoo.LAYERS
    for where in found:
        assert where.startswith("a gather before ")
        assert where.endswith(": its channels have other readers that keep the order")


def test_a_space_that_stays_says_why():
    found = decisions("bert", "portable")
    assert [where for where in found.values() if where.startswith("no permutation: it is an output of the model")]


# -- the learning graph ------------------------------------------------------------------------------------------------

CONFIG = LearnConfig(block_size=16, batch_size=1, micro_batch_size=1, epochs=2, start_noise=3.0)


def ancestors(node: fx.Node) -> set[object]:
    found, waiting = set(), [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return {node.target for node in found}


class Gradients:
    """An optimizer that only remembers."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.param_groups: list[dict[str, float]] = [{}]
        self.relaxation, self.found = relaxation, {}

    def step(self) -> None:
        self.found = {name: p.grad.clone() for name, p in self.relaxation.named_parameters()}

    def zero_grad(self, **_options: object) -> None:
        self.relaxation.zero_grad()


@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_the_learning_graph_learns_as_the_trainer_does(name, layout):
    model, plan, graph_module = private(name, layout)
    with torch.no_grad():
        target = last_hidden_state(model, BATCH)
    base = zoo.random_indices(plan)
    graph_module = run_passes(graph_module, permutation_passes(plan, base), [BATCH])
    fold(model, plan, base)
    if layout == "portable":
        with torch.no_grad():
            target = last_hidden_state(model, BATCH)
    importances = random_importances(plan, model)
    spaces = learned_spaces(plan, CONFIG)
    relaxation = Relaxation(spaces, CONFIG, 0, torch.device("cpu"))
    masked = insert_masks(absorb(graph_module), plan=plan, importances=importances, pattern=PATTERN)
    learning = insert_relaxation(masked, plan=plan, spaces=spaces, relaxation=relaxation, tau=CONFIG.tau_start)
    learning.graph.eliminate_dead_code()
    learning.graph.lint()
    learning.recompile()

    sinkhorn, assignment = torch.ops.permtriton.sinkhorn.default, torch.ops.permtriton.assignment.default
    masks = [node for node in learning.graph.nodes if node.target is NM_MASK]
    assert len(masks) == len(list(plan.linears()))
    for node in masks:
        assert {sinkhorn, assignment} <= ancestors(node.args[5])
        assert sinkhorn in ancestors(node.args[6])
        assert assignment not in ancestors(node.args[6])
    own = {id(parameter) for parameter in learning.parameters()}
    assert all(id(parameter) in own for parameter in relaxation.parameters()), "shared, not copied"
    assert counted(lower(copied(learning)))["sparse"] == 0, "weights that change at every step are not packed"

    loss = cosine_loss(learning(BATCH)[traced(name)[1].hidden], target)
    loss.backward()
    found = {parameter: p.grad.clone() for parameter, p in relaxation.named_parameters()}
    model.zero_grad()
    relaxation.zero_grad()
    optimizer = Gradients(relaxation)
    with masked_model(model, plan, importances, PATTERN, relaxation, CONFIG) as entries:
        trainer = Trainer(model, entries, relaxation, optimizer, BATCH, target, CONFIG, 0)
        indices = trainer.indices(0)
        expected = trainer.step(torch.tensor([0]), 0)
    assert any(not torch.equal(index, identity(index.numel())) for index in indices.values()), "something moves"
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    for parameter, gradient in optimizer.found.items():
        assert float(gradient.abs().max()) > 0, parameter
        assert relative_difference(gradient, found[parameter]) < 1e-3, parameter


def test_only_the_spaces_that_learn_are_relaxed():
    model, plan, graph_module = planned("llama", "fused")
    config = LearnConfig(block_size=16, learn_layers="last:1")
    spaces = learned_spaces(plan, config)
    relaxation = Relaxation(spaces, config, 0, torch.device("cpu"))
    masked = insert_masks(copied(graph_module), plan=plan, importances=random_importances(plan, model), pattern=PATTERN)
    learning = insert_relaxation(masked, plan=plan, spaces=spaces, relaxation=relaxation, tau=1.0)
    learning.graph.eliminate_dead_code()
    lowered = lower(learning)
    lowered.graph.eliminate_dead_code()
    lowered.recompile()
    assert counted(lowered)["sparse"] == 7, "the first layer's order is constant"
    assert bool(run(lowered, BATCH).isfinite().all())
