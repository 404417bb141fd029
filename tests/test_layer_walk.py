import pytest
import torch
from transformers import AlbertConfig, AlbertModel, OPTConfig, OPTForCausalLM

from benchmarks.architectures import tiny as tiny_architectures
from permtriton.data.samples import Samples
from permtriton.methods.measure.statistics import hessians
from permtriton.passes.plan import layer_modules, linear_module
from permtriton.running.layer_calls import find_chains
from permtriton.running.layer_walk import LayerWalk, from_model
from permtriton.util import ranks
from permtriton.util.sparsity import NMPattern
from permtriton.util.store import MEMORY, Store

from . import zoo
from .expert_stacks import unstacked
from .pretend_gpu import GPU, PretendGpu
from .zoo import find_plan

IDS = zoo.token_ids(5, 12)
MODELS = ["llama_eager", "gpt2", "gemma2", "mixtral", "albert", "shared", "swin", "pvt"]
CLASSES = {"swin": "SwinModel", "pvt": "PvtV2Model", "funnel": "FunnelModel"}


def ignore(*_: object) -> None:
    pass


def walked(model, plan, samples, batch, changing, store=MEMORY):
    walk = LayerWalk(model, plan, samples, batch, store)
    return walk.walk_and_change() if changing else walk.walk_dense()


def prune(model, sites):
    """Changes a layer as SparseGPT does: what later layers read is other."""
    for site in sites:
        for name in site.linears:
            linear_module(model, name).weight.data[::2] *= 0.5


def model_of(name: str):
    if name in CLASSES:
        model = tiny_architectures.build(CLASSES[name])
        return model, find_plan(model, NMPattern(2, 4), skip_indivisible=True)
    if name == "shared":
        model = zoo.tiny_llama(num_hidden_layers=4, vocab_size=zoo.VOCABULARY)
        first, last = model.model.layers[0], model.model.layers[3]
        last.self_attn, last.mlp = first.self_attn, first.mlp
        return model, find_plan(model, NMPattern(2, 4))
    if name != "albert":
        return unstacked(name) if name == "mixtral" else zoo.planned(name)
    torch.manual_seed(0)
    model = AlbertModel(AlbertConfig(**{**zoo.SIZES, "embedding_size": 32})).eval()
    zoo.randomize(model)
    return model, find_plan(model, NMPattern(2, 4))


@pytest.mark.parametrize(
    ("name", "changing"),
    [
        *((name, True) for name in MODELS if name not in CLASSES),
        ("llama_eager", False),
        *(pytest.param(name, changing, marks=pytest.mark.slow) for name, changing in (("swin", True), ("pvt", False))),
    ],
)
def test_layers_one_by_one_read_what_they_read_in_the_model(name, changing):
    """Also where layers share weights, so that all of them, or the first and the last one, need the model.

    Layers of Swin change the shape of hidden states, those of PVT return them inside a tuple.
    """
    model, plan = model_of(name)
    samples = Samples(tiny_architectures.inputs(model, samples=5)) if name in CLASSES else Samples.of(IDS)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    expected = []
    for sites in plan.layers():
        expected.append(hessians(model, from_model(model, sites, samples, 2), ignore))
        if changing:
            prune(model, sites)
    model.load_state_dict(weights)
    for layer, before in zip(walked(model, plan, samples, 2, changing), expected, strict=True):
        found = hessians(model, layer, ignore)
        assert found.keys() == before.keys()
        for site, hessian in found.items():
            torch.testing.assert_close(hessian, before[site], rtol=1e-4, atol=1e-4 * float(before[site].abs().max()))
        if changing:
            prune(model, layer.sites)
    changed = any(not torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert changed == changing, "weights that were negated for a trial are as they were"


@pytest.mark.parametrize("changing", [False, True])
def test_a_layer_that_takes_one_sequence_at_a_time(changing):
    """Where sequences run one by one, each of them is seen, and each once."""
    model, plan = zoo.planned("llama_eager")
    expected = [hessians(model, from_model(model, sites, Samples.of(IDS), 5), ignore) for sites in plan.layers()]

    def refuse(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] > 1:
            raise RuntimeError("one sequence only")

    layer_modules(model, plan)[1].register_forward_pre_hook(refuse)
    for layer, before in zip(walked(model, plan, Samples.of(IDS), 5, changing), expected, strict=True):
        for site, hessian in hessians(model, layer, ignore).items():
            torch.testing.assert_close(hessian, before[site], rtol=1e-4, atol=1e-4 * float(before[site].abs().max()))


def test_ranks_agree_on_whether_sequences_run_together(monkeypatch):
    """Where layers are spread over the ranks, one that ran them more often would wait for the others forever."""
    model, plan = model_of("llama_eager")
    together = [layer.parts for layer in walked(model, plan, Samples.of(IDS), 2, True)]
    monkeypatch.setattr(ranks, "gather", lambda value: [value, False])
    apart = [layer.parts for layer in walked(model, plan, Samples.of(IDS), 2, True)]
    assert [len(parts) for parts in together] != [len(parts) for parts in apart] == [5, 5]


def test_arguments_may_depend_on_a_linear_before_the_layers():
    """Its weight is final when the chain starts. The layers themselves need not run to find out."""
    torch.manual_seed(0)
    sizes = {"ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": zoo.VOCABULARY}
    model = OPTForCausalLM(OPTConfig(hidden_size=64, word_embed_proj_dim=32, **sizes)).eval()
    plan = find_plan(model, NMPattern(2, 4))
    layers = dict(zip("ab", layer_modules(model, plan), strict=True))
    weights = [linear_module(model, name).weight for _, name in plan.linears()]
    decoder = model.model.decoder
    projections: list[torch.Tensor] = []
    decoder.project_in.register_forward_hook(lambda _module, _inputs, output: projections.append(output))

    class Leaning(torch.nn.Module):
        def forward(self, hidden_states, **named):
            return layers["b"](hidden_states, **{**named, "position_ids": projections[-1]})

    decoder.layers[1] = Leaning()
    assert find_chains(model, layers, Samples.of(IDS[:1]), weights) == [["a", "b"]]


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True])
def test_hidden_states_stay_on_the_gpu_unless_its_memory_is_short(changing):
    model, plan = zoo.planned("llama_eager")
    samples, most = Samples.of(zoo.token_ids(40, 12)), []
    with PretendGpu().here():
        model.to(GPU)
    for store in (Store(onloads=True), MEMORY):
        with PretendGpu().here() as gpu:
            gpu.take(list(model.parameters()) + list(model.buffers()))
            for layer in walked(model, plan, samples, 2, changing, store):
                for rows in layer.parts:
                    layer.run(rows)
        most.append(gpu.most)
    assert most[1] - most[0] >= samples.positions * zoo.HIDDEN * 4
