"""The whole pipeline on each way to wire layers: compiled, saved, and loaded again by transformers alone."""

import copy
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, RobertaConfig, RobertaModel
from transformers.pytorch_utils import Conv1D

from permtriton import CompiledModel, config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError
from permtriton.model.forward import max_tokens

from . import zoo
from .zoo import fold

LEARN = {
    "recipe": "heuristic,learned,mask",
    "learn_epochs": 2,
    "learn_batch_size": 4,
    "learn_learning_rate": 0.1,
    "learn_block_size": 16,
    "learn_keep": "last",
}
HEURISTIC = {"recipe": "heuristic,mask"}
MASK = {"recipe": "mask"}
HEADS = ("lm_head", "pooler", "cls.")  # parts of names that no plan may prune


@dataclass(frozen=True)
class Case:
    """One compilation. The dense model is built again, since compiling changes a model in place."""

    name: str
    compiled: CompiledModel
    path: Path
    reloaded: PreTrainedModel

    @property
    def dense(self) -> PreTrainedModel:
        return zoo.build(self.name)


def compiled_model(model: PreTrainedModel, **options: object) -> CompiledModel:
    return compile_model(model, None, config_from(options), ids=zoo.token_ids())


def step_of(report: dict, name: str) -> dict:
    return next(step for step in report["steps"] if step["name"] == name)


def compiled_with(name: str, **options: object) -> CompiledModel:
    return compiled_model(zoo.build(name), **options)


@pytest.fixture(
    scope="module", params=["llama_eager", pytest.param("gpt2", marks=pytest.mark.slow)]
)  # other classes: test_zoo.py
def case(request, tmp_path_factory) -> Case:
    compiled = compiled_with(request.param, **LEARN)
    path = compiled.save_pretrained(tmp_path_factory.mktemp("models") / request.param)
    return Case(request.param, compiled, path, type(compiled.model).from_pretrained(path).eval())


def linears_in_layers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights ``[out_features, in_features]`` that must be pruned, found without a plan."""
    return {
        name: module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(part in name for part in HEADS)
    }


def kept_in_groups(weight_OC: Tensor, group: int) -> set[int]:
    """Returns how many weights of a group are not zero, over all groups."""
    rows = weight_OC.tolist()
    return {sum(w != 0 for w in row[start : start + group]) for row in rows for start in range(0, len(row), group)}


def folded(case_name: str, compiled: CompiledModel, **changes: object) -> PreTrainedModel:
    """Returns the dense model in the order of a compiled one: what it is before masks."""
    dense = zoo.build(case_name, **changes)
    movable = {space.name for space in compiled.plan.spaces if not space.frozen}
    fold(dense, compiled.plan, {n: index for n, index in compiled.indices.items() if n in movable})
    return dense


# -- each architecture, with the learned permutation -------------------------------------------------------------------


def test_reloaded_model_is_the_compiled_one(case):
    assert type(case.reloaded) is type(case.dense)
    in_memory = dict(case.compiled.model.named_parameters())
    for name, parameter in case.reloaded.named_parameters():
        assert torch.equal(parameter, in_memory[name]), name
    before, after = (zoo.outputs(model, zoo.token_ids(seed=2)) for model in (case.compiled.model, case.reloaded))
    assert zoo.difference(before, after) < 1e-6


def test_every_linear_in_a_layer_is_exactly_half_zeros(case):
    pruned = linears_in_layers(case.reloaded)
    assert len(pruned) >= 4 * zoo.LAYERS
    for name, weight in pruned.items():
        assert kept_in_groups(weight, 4) == {2}, name
    assert {linear for _, linear in case.compiled.plan.linears()} == set(pruned)


def test_without_masks_it_computes_what_the_dense_model_does(case):
    order_kept, dense = folded(case.name, case.compiled), case.dense
    ids = zoo.token_ids(seed=2)
    assert zoo.difference(zoo.outputs(dense, ids), zoo.outputs(order_kept, ids)) < 1e-4
    assert zoo.difference(zoo.outputs(dense, ids), zoo.outputs(case.reloaded, ids)) > 1e-2, "the masks do something"


def test_kept_weights_are_the_dense_ones_in_the_new_order(case):
    expected = dict(folded(case.name, case.compiled).named_parameters())
    pruned = {f"{name}.weight" for name in linears_in_layers(case.reloaded)}
    for name, parameter in case.reloaded.named_parameters():
        masked = torch.where(parameter != 0, expected[name], 0) if name in pruned else expected[name]
        assert torch.equal(parameter, masked), name


@torch.no_grad()
def check_most_important_kept(dense: PreTrainedModel, pruned: PreTrainedModel) -> None:
    """Checks masks against Wanda's score, measured here on the dense model in the pruned one's order."""
    squares: dict[str, Tensor | int] = {}

    def watch(name: str) -> None:
        def record(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares[name] = squares.get(name, 0) + inputs[0].flatten(0, -2).square().sum(0)

        dense.get_submodule(name).register_forward_pre_hook(record)

    dense_weights, kept_weights = linears_in_layers(dense), linears_in_layers(pruned)
    for name in dense_weights:
        watch(name)
    zoo.outputs(dense, zoo.token_ids())
    for name, weight in dense_weights.items():
        scores = (weight.abs() * squares[name].sqrt()).unflatten(1, (-1, 4))
        kept = kept_weights[name].unflatten(1, (-1, 4)) != 0
        least_kept = scores.masked_fill(~kept, float("inf")).amin(-1)
        most_dropped = scores.masked_fill(kept, 0).amax(-1)
        assert bool((least_kept > most_dropped * (1 - 1e-3)).all()), name


def test_kept_weights_are_the_most_important_of_their_group(case):
    check_most_important_kept(folded(case.name, case.compiled), case.reloaded)


def test_every_free_space_moved_and_no_other(case):
    for space in case.compiled.plan.spaces:
        identity = torch.equal(case.compiled.indices[space.name], torch.arange(space.units))
        assert identity == bool(space.frozen), space.name
    epochs = step_of(case.compiled.report, "learned")["history"]
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    assert epochs[0]["moved"] == 0
    assert epochs[-1]["moved"] > 0


def test_report_file(case):
    report = json.loads((case.path / "permtriton.json").read_text())
    plan = case.compiled.plan
    assert [site["name"] for site in report["sites"]] == [site.name for site in plan.sites]
    for entry, site in zip(report["sites"], plan.sites, strict=True):
        assert sorted(entry["index"]) == list(range(site.channels))
        assert entry["linears"] == list(site.linears)
        assert entry["permutation"] == site.space.name
        assert torch.equal(site.units[torch.tensor(entry["index"])], case.compiled.indices[site.space.name][site.units])
    pruned = linears_in_layers(case.reloaded)
    assert report["sparsity_by_layer"] == dict.fromkeys(report["sparsity_by_layer"], 0.5)
    assert set(report["sparsity_by_layer"]) == set(pruned)
    assert report["pruned_parameters"] == sum(weight.numel() for weight in pruned.values())
    assert report["parameters"] == sum(parameter.numel() for parameter in case.reloaded.parameters())
    assert report["skipped"] == plan.skipped
    assert report["barriers"] == []
    assert [(p["name"], p["reason"]) for p in report["permutations"]] == [(s.name, s.reason) for s in plan.spaces]
    assert step_of(report, "learned")["kept"] == 2
    assert report["verification"]["pruned_weights"] == len(pruned)
    assert report["verification"]["reloaded"] == "same outputs"
    assert config_from(report["config"]) == case.compiled.config
    assert report["proof"]["fold_difference"] < 1e-4


# -- transformers alone ------------------------------------------------------------------------------------------------

LOAD_ALONE = """
import sys
sys.modules["permtriton"] = None  # importing it now fails
import torch, transformers
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
assert not [name for name in sys.modules if name.startswith("permtriton.")]
"""


@pytest.mark.slow
def test_loads_in_a_process_without_permtriton(tmp_path):
    compiled = compiled_with("llama", **HEURISTIC)
    path, ids = compiled.save_pretrained(tmp_path / "model"), zoo.token_ids(seed=2)
    torch.save(ids, tmp_path / "ids.pt")
    files = [str(path), str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", LOAD_ALONE, *files], cwd=tmp_path, check=True, timeout=120)
    expected = zoo.outputs(compiled.model, ids)[0]
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, rtol=1e-4, atol=1e-4)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("llama", torch.float16)])
@pytest.mark.slow
def test_other_dtypes(name, dtype, tmp_path):
    compiled = compiled_model(zoo.build(name).to(dtype), **LEARN)
    assert compiled.report["dtype"] == str(dtype).removeprefix("torch.")
    reloaded = type(compiled.model).from_pretrained(compiled.save_pretrained(tmp_path / "model"), dtype="auto")
    assert reloaded.dtype == dtype
    expected = linears_in_layers(folded(name, compiled).to(dtype))
    for linear, weight in linears_in_layers(reloaded).items():
        assert kept_in_groups(weight, 4) == {2}, linear
        assert torch.equal(weight, torch.where(weight != 0, expected[linear], 0)), linear


@pytest.mark.slow
def test_a_model_without_a_limit_on_positions():
    """XLNet's config has -1 there."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(vocab_size=zoo.VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=24)).eval()
    compiled = compiled_model(model, **MASK)
    assert compiled.report["sparsity_by_layer"]["transformer.layer.0.ff.layer_2"] == 0.5


def test_a_layer_that_runs_twice_is_calibrated_on_both_runs():
    """ALBERT's layers share one set of weights."""
    from transformers import AlbertConfig, AlbertModel

    model = AlbertModel(AlbertConfig(**zoo.SIZES, embedding_size=32)).eval()
    zoo.randomize(model)
    dense = copy.deepcopy(model)
    check_most_important_kept(dense, compiled_model(model, **MASK).model)


def test_positions_counted_from_behind_the_padding_are_respected():
    config = RobertaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    model = RobertaModel(config).eval()
    assert max_tokens(model) == 32
    with pytest.raises(CalibrationError, match="`sequence_length=32`"):
        compile_model(model, None, config_from(), ids=torch.randint(2, 64, (2, 34)))
    compile_model(model, None, config_from(HEURISTIC), ids=torch.randint(2, 64, (2, 32)))
