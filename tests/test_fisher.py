"""The Fisher information is that of plain autograd, token by token, and its draws do not depend on micro batches."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, normalize
from transformers import AlbertConfig, AlbertForMaskedLM

from benchmarks.architectures import tiny
from benchmarks.known_run import Known
from permtriton import config_from
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ModelError
from permtriton.kernels.swap_gains import RankOneCurvature
from permtriton.methods.measure.fisher import curvatures, fisher_information, output_gradients
from permtriton.passes.plan import ChannelSpace, Destination, Plan, Site, linear_module, weight_in_out
from permtriton.passes.weight_folds import apply_edits, edits_of, moves_of

from . import zoo
from .expert_stacks import unstacked
from .kernel_inputs import TWO_FOUR
from .learning import Counting, stop, unchanged
from .rounding import assert_equal_but_for_rounding
from .zoo import find_plan

IDS = zoo.token_ids(5, 7)  # an odd number of logits and of hidden values per sequence
SEED = 3


def found(model, plan, kind="kl", ids=IDS, progress=None, **options: object) -> dict[str, RankOneCurvature]:
    config = config_from({"seed": SEED, **options})
    return fisher_information(Known(model, plan, Samples.of(ids), config, progress), kind)


def plain(model, plan, kind: str, ids: Tensor = IDS) -> tuple[dict[str, RankOneCurvature], dict[str, int]]:
    """One sequence at a time: squared gradients at every output, and squared inputs, of every call of a linear.

    Also the number of tokens that each linear reads.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for _, name in plan.linears()}
    handles = []
    for name, seen in calls.items():
        module = linear_module(model, name)
        handles.append(module.register_forward_hook(lambda _m, given, out, seen=seen: seen.append((given[0], out))))
    generator = torch.Generator().manual_seed(SEED)
    sums, tokens = {}, dict.fromkeys(calls, 0)
    for _, name in plan.linears():
        channels, rows = weight_in_out(linear_module(model, name)).shape
        sums[name] = RankOneCurvature(torch.zeros(rows), torch.zeros(channels))
    for sequence in ids.unsqueeze(1):
        for seen in calls.values():
            seen.clear()
        if kind == "kl":
            logits = model(input_ids=sequence).logits[0]
            gumbel = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator)))
            loss = cross_entropy(logits, (logits + gumbel).argmax(1), reduction="sum")
        else:
            hidden = normalize(model.base_model(input_ids=sequence)[0][0], dim=1)
            loss = (hidden * torch.randn(hidden.shape, generator=generator)).sum()
        used = [(name, given, out) for name, seen in calls.items() for given, out in seen]
        grads = torch.autograd.grad(loss, [out for _, _, out in used], allow_unused=True)
        for (name, given, _), grad in zip(used, grads, strict=True):
            sums[name].row.add_(grad.flatten(0, -2).square().sum(0))
            sums[name].column.add_(given.detach().flatten(0, -2).square().sum(0))
            tokens[name] += given.shape[:-1].numel()
    for handle in handles:
        handle.remove()
    means = {name: RankOneCurvature(own.row, own.column / max(tokens[name], 1)) for name, own in sums.items()}
    return means, tokens


def assert_same(one: dict[str, RankOneCurvature], other: dict[str, RankOneCurvature], tolerance: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for name, fisher in one.items():
        expected = other[name]
        for mine, theirs in ((fisher.row, expected.row), (fisher.column, expected.column)):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


def albert() -> nn.Module:
    """All layers share one set of linears."""
    torch.manual_seed(0)
    model = AlbertForMaskedLM._from_config(AlbertConfig(**zoo.SIZES, embedding_size=32))
    zoo.randomize(model)
    return model.eval()


def planned(name: str):
    if name == "albert":
        model = albert()
        return model, find_plan(model, TWO_FOUR)
    return unstacked(name) if name in zoo.MIXTURES else zoo.planned(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", "kl"), ("bert", "cosine")),
        *(pytest.param(name, "kl", marks=pytest.mark.slow) for name in ("gpt2", "bert_mlm", "albert")),
    ],
)
def test_rows_and_columns_are_those_of_plain_autograd(name, kind):
    model, plan = planned(name)
    expected, tokens = plain(model, plan, kind)
    assert all(fisher.row.max() > 0 for fisher in expected.values())
    assert max(tokens.values()) == IDS.numel() * (zoo.LAYERS if name == "albert" else 1)
    with unchanged(model):
        assert_same(found(model, plan, kind, micro_batch_size=2), expected)


def _within(segments) -> Tensor:
    """A random permutation that keeps to the segments of a space."""
    ends = torch.tensor(segments).cumsum(0).tolist()
    return torch.cat([end - size + torch.randperm(size) for end, size in zip(ends, segments, strict=True)])


@pytest.mark.slow
def test_columns_are_in_the_order_of_the_weight_where_a_linear_gathers():
    model = zoo.build("phi")
    plan = find_plan(model, TWO_FOUR, layout="fused", o_proj="free")
    space = next(each for each in plan.spaces if each.placement is Destination.GATHER)
    site = plan.sites_of(space)[0]
    before = found(model, plan)
    index = _within(space.segments)
    apply_edits(model, edits_of(moves_of(plan, {space.name: index})))
    assert linear_module(model, site.linears[0]).gather is not None
    for name, fisher in found(model, plan).items():
        reordered = before[name].column[site.expand(index)] if name in site.linears else before[name].column
        torch.testing.assert_close(fisher.column, reordered, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.slow
def test_experts_count_the_tokens_that_come_to_them(name):
    model, plan = planned(name)
    expected, tokens = plain(model, plan, "kl")
    assert_same(found(model, plan, micro_batch_size=2), expected)
    for layer in range(zoo.LAYERS):
        experts = [f"model.layers.{layer}.mlp.experts.{number}.down_proj" for number in range(5)]
        assert sum(tokens[name] for name in experts) == 2 * IDS.numel()
        assert len({tokens[name] for name in experts}) > 1


@pytest.mark.slow
def test_an_expert_that_no_token_visits_has_no_information():
    model, plan = planned("mixtral")
    mine = found(model, plan, ids=IDS[:1, :1])
    idle = [fisher for name, fisher in mine.items() if ".experts." in name and not fisher.column.any()]
    assert len(idle) == 2 * zoo.LAYERS * (5 - 2)
    assert not any(fisher.row.any() for fisher in idle)


@pytest.mark.parametrize(("name", "kind"), [("llama", "kl"), ("llama", "cosine"), ("gpt2", "kl")])
@pytest.mark.slow
def test_micro_batches_and_checkpointing_change_nothing(name, kind):
    """But for the last bit of float32, where the model is in float64, as the sums are."""
    model, plan = planned(name)
    model = model.double()
    expected = found(model, plan, kind, micro_batch_size=1, activation_checkpointing=False)
    for size in (2, 5):
        for checkpointing in (False, True):
            options = {"micro_batch_size": size, "activation_checkpointing": checkpointing}
            with unchanged(model):
                assert_same(found(model, plan, kind, **options), expected, torch.finfo(torch.float32).eps)


def test_an_interrupted_run_leaves_the_model_as_it_was():
    model, plan = planned("llama")
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        found(model, plan, progress=Counting(2, stop(KeyboardInterrupt())), micro_batch_size=1)


def test_gradients_that_are_not_finite_are_refused_by_name():
    model, plan = planned("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(CalibrationError, match=r"model\..*not finite.*`heuristic_row_weights=none`"):
        found(model, plan)


class Toy(nn.Module):
    """A linear on embeddings; its outputs are logits and last hidden state at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(3, 4), nn.Linear(4, 5)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        self.config, self.device, self.dtype = SimpleNamespace(), torch.device("cpu"), torch.float32
        self.base_model = self._states

    def _states(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.linear(self.embedding(input_ids)),)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._states(input_ids)[0])

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


@pytest.mark.parametrize("kind", ["kl", "cosine"])
@pytest.mark.slow
def test_the_curvature_is_half_the_second_derivative_of_the_loss(kind):
    """Over many draws for one token, where rows and columns are independent: by how much removing a weight costs."""
    model, ids = Toy(), torch.full((40, 1000), 2)
    space = ChannelSpace("space", (4,), ())
    plan = Plan([Site("linear", ("linear",), 4, torch.arange(4), space)], [space], {"linear": TWO_FOUR})
    run = Known(model, plan, Samples.of(ids), config_from({"seed": SEED, "micro_batch_size": 20}))
    curvature = curvatures(run, kind)["linear"]
    weight, x = model.linear.weight.detach(), model.embedding.weight[2].detach()
    dense = weight @ x + model.linear.bias.detach()

    def loss(changed: Tensor) -> Tensor:
        out = changed @ x + model.linear.bias.detach()
        if kind == "cosine":
            return 1 - torch.cosine_similarity(out, dense, dim=0)
        return kl_div(out.log_softmax(0), dense.log_softmax(0), reduction="sum", log_target=True)

    second = torch.autograd.functional.hessian(loss, weight).flatten(2).flatten(0, 1).diagonal().view_as(weight)
    torch.testing.assert_close(
        curvature.row.outer(curvature.column), second / 2, rtol=0.05, atol=0.01 * second.max().item()
    )


@pytest.mark.parametrize(("name", "kind"), [("llama_eager", "kl"), ("bert", "cosine")])
@pytest.mark.slow
def test_output_gradients_are_those_that_the_information_sums_up(name, kind):
    model, plan = zoo.planned(name)
    model.double()
    runs = (Known(model, plan, Samples.of(IDS), config_from({"seed": SEED, "activation_checkpointing": again}))
            for again in (True, False))  # fmt: skip
    one, other = (output_gradients(run, IDS.numel() * 2) for run in runs)
    for linear, fisher in found(model, plan, kind).items():
        assert one[linear].shape == (IDS.numel(), fisher.row.numel())
        assert one[linear].dtype == torch.bfloat16
        torch.testing.assert_close(one[linear].float().square().sum(0), fisher.row.float(), rtol=0.05, atol=1e-6)
        assert_equal_but_for_rounding(one[linear], other[linear], roundings=1)


@pytest.mark.slow
def test_a_model_that_computes_the_gradients_of_its_layers_itself_is_refused():
    model = tiny.build("ReformerModelWithLMHead")
    plan = find_plan(model, TWO_FOUR, skip_indivisible=True)
    ids = Samples(tiny.inputs(model, samples=1))
    with pytest.raises(ModelError, match="has no gradients by the outputs of its linears"):
        output_gradients(Known(model, plan, ids, config_from()), 1)
    config = config_from({"skip_indivisible": True, "distill_loss": "cosine"}, "mask,distill")
    with pytest.raises(ModelError, match="has no gradients by the outputs of its linears"):
        compile_model(model, None, config, ids=ids)


@pytest.mark.slow
def test_linears_without_a_gradient_have_no_output_gradients():
    """Such as those of the indexer of DeepSeek-V3.2, whose results only choose tokens."""
    model = zoo.build("llama")
    plan, attention = find_plan(model, TWO_FOUR), model.model.layers[0].self_attn
    attention.forward = torch.no_grad()(attention.forward)
    gradients = output_gradients(Known(model, plan, Samples.of(IDS), config_from()), 1)
    missing = {name for _, name in plan.linears()} - gradients.keys()
    assert missing == {f"model.layers.0.self_attn.{kind}_proj" for kind in "qkvo"}
