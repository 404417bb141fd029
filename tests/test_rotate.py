"""Step ``rotate``: attention values turned, the same model before pruning, less that masks lose."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from permtriton import config_from
from permtriton.compiler import compile_model
from permtriton.data.samples import Samples
from permtriton.errors import VerificationError
from permtriton.methods import rotation
from permtriton.methods.rotation import Scored, may_turn, orthogonal, searched, share_lost
from permtriton.methods.statistics import site_statistics
from permtriton.model.apply import apply_edits
from permtriton.model.checks import check_pruned
from permtriton.model.edits import Rotate, rotations_of
from permtriton.model.plan import Axis
from permtriton.planning import find_plan, plan_model
from permtriton.progress import NoProgress
from permtriton.sparsity import NMPattern

from . import updating, zoo

FEW = {"rotate_entropy_steps": 3, "rotate_loss_steps": 10}
IDS = zoo.tiny_ids(6, 24)


def turned_spaces(model, ids=None):
    """The plan of a model, and those of its spaces that may be rotated."""
    plan, graph = plan_model(model, config_from(), Samples.of(zoo.token_ids(2, 12) if ids is None else ids))
    return plan, [space for space in plan.spaces if may_turn(graph, plan, space)]


def random_rotations(space, seed=0):
    heads, size = len(space.segments), space.segments[0]
    return orthogonal(torch.randn(heads, size, size, dtype=torch.float64, generator=torch.manual_seed(seed)))


def compiled(recipe="rotate,heuristic,refit", **options):
    options = FEW | options if "rotate" in recipe else options
    return compile_model(updating.tiny_model(), None, config_from({"recipe": recipe, **options}), ids=IDS)


@pytest.mark.parametrize("name", zoo.slow_but(["llama", "llama_eager", "gpt2", "phi3", "bert"], zoo.ARCHITECTURES))
def test_a_rotated_model_gives_the_dense_outputs(name):
    with zoo.float32_means_float64():
        model = zoo.build(name).double()
        dense = zoo.outputs(model, zoo.token_ids())
        _, spaces = turned_spaces(model)
        assert len(spaces) == zoo.LAYERS, [space.name for space in spaces]
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for space in spaces:
            edits = rotations_of(space, random_rotations(space))
            apply_edits(model, edits)
            assert all(not torch.equal(before[e.parameter], model.get_parameter(e.parameter)) for e in edits)
        assert zoo.difference(dense, zoo.outputs(model, zoo.token_ids())) < 1e-9


def test_only_values_that_reach_their_reader_linearly_are_rotated():
    class Normed(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x.tanh())

    model = zoo.build("llama")
    plan, spaces = turned_spaces(model)
    assert {space.name for space in plan.spaces} - {space.name for space in spaces} == {
        "stream", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
    }  # fmt: skip
    attention = model.model.layers[0].self_attn
    attention.o_proj = Normed(attention.o_proj)
    _, spaces = turned_spaces(model)
    assert [space.name for space in spaces] == ["model.layers.1.self_attn.o_proj"]


@pytest.mark.parametrize("method", ["obs", "wanda", "ria", "magnitude"])
def test_statistics_are_those_of_the_rotated_model(monkeypatch, method):
    seen = {}

    def rotate(run, *steps):
        outcome = inner(run, *steps)
        fresh = site_statistics(run.model, run.plan, method, run.samples, run.batch, NoProgress())
        seen.update({name: (statistic, fresh[name]) for name, statistic in run.statistics.items()})
        return outcome

    inner = rotation.rotate_values
    monkeypatch.setattr(rotation, "rotate_values", rotate)
    compiled("rotate,heuristic,mask", importance=method)
    assert any("o_proj" in name for name in seen)
    for name, (moved, fresh) in seen.items():
        torch.testing.assert_close(moved, fresh, rtol=2e-3, atol=1e-6, msg=name)


def test_masks_lose_less_and_the_rest_of_the_pipeline_follows():
    found = compiled(rotate_loss_steps=60)
    report = found.report["steps"][0]
    assert report["name"] == "rotate"
    assert len(report["parts"]) == 2
    assert all(part["end"] < 0.8 * part["start"] for part in report["parts"])
    check_pruned(found.model, found.plan)


def test_the_same_twice():
    first, second = (compiled().model.state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    other = compiled(seed=1).model.state_dict()
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_no_steps_change_nothing():
    plain, rotated = compiled("heuristic,refit"), compiled(**dict.fromkeys(FEW, 0))
    theirs = rotated.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in plain.model.state_dict().items())


def test_nothing_to_rotate_is_said():
    said = []

    class Listening(NoProgress):
        def say(self, text):
            said.append(text)

    model = updating.tiny_model()
    config = config_from({"recipe": "rotate,heuristic,mask", "ignore": ["*o_proj"], **FEW})
    compile_model(model, None, config, ids=IDS, progress=Listening())
    assert any(text.startswith("rotate: this model has no attention values") for text in said)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda edits: [replace(edit, rotation=edit.rotation.mT) if edit.dim else edit for edit in edits],
        lambda edits: [edits[0], *edits],
        lambda edits: edits[1:],
        lambda edits: [replace(edit, positions=edit.positions.flip(0)) if edit.dim else edit for edit in edits],
    ],
    ids=["transposed", "twice", "one side", "another head"],
)
def test_a_wrong_rotation_is_refused(monkeypatch, wrong):
    inner = rotation.rotations_of
    monkeypatch.setattr(rotation, "rotations_of", lambda *arguments: wrong(list(inner(*arguments))))
    with pytest.raises(VerificationError, match="after rotating the values of attention"):
        compiled()


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
def test_share_lost_is_that_of_the_masks(pattern):
    pattern = NMPattern(*map(int, pattern.split(":")))
    weight = torch.randn(2, 3, 5, 8, generator=torch.manual_seed(0))
    identity = torch.eye(8).expand(2, 1, 8, 8)
    scores = weight.square().unflatten(-1, (-1, pattern.group))
    expected = 1 - scores.topk(pattern.kept).values.sum() / scores.sum()
    found = share_lost([Scored(weight, torch.eye(8).expand(2, 3, 8, 8), pattern, True)], identity)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_a_search_that_gains_nothing_leaves_the_heads(monkeypatch):
    monkeypatch.setattr(rotation, "LOSS_RATE", 1e3)
    weight = torch.zeros(1, 1, 16, 8)
    weight[..., ::4] = 1  # masks lose nothing
    scored = [Scored(weight, torch.eye(8).expand(1, 1, 8, 8), NMPattern(2, 4), True)]
    found, before, after = searched(scored, 0, 5, 0)
    assert before == after == 0
    assert torch.equal(found, torch.eye(8, dtype=torch.float64).unsqueeze(0))


def test_blocks_of_an_axis():
    units = torch.tensor([-1, 0, 1, 2, 3, 0, 1, 2, 3])
    axis = Axis("", 0, units, torch.zeros_like(units), reads=True)
    assert axis.blocks(4, 2).tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert replace(axis, roles=torch.arange(9)).blocks(4, 2) is None
    assert replace(axis, units=torch.tensor([0, 1, 2, 3, 0, 1, 2, -1, -1])).blocks(4, 2) is None


def test_rotations_keep_the_dtype():
    model = updating.tiny_model().bfloat16()
    name, positions = "model.layers.0.self_attn.o_proj.weight", torch.arange(16).view(4, 4)
    turn = orthogonal(torch.randn(4, 4, 4, generator=torch.manual_seed(0)))
    before = model.get_parameter(name).clone()
    apply_edits(model, [Rotate(name, 1, positions, turn)])
    expected = before.float() @ torch.block_diag(*turn)
    torch.testing.assert_close(model.get_parameter(name).float(), expected, rtol=8e-3, atol=1e-4)


def test_every_plan_has_spaces_whose_size_may_differ():
    """Query heads that share a value head are copies of its units."""
    plan = find_plan(zoo.build("llama"), NMPattern(2, 4))
    space = next(space for space in plan.spaces if "o_proj" in space.name)
    (reader,) = [axis for axis in space.axes if axis.reads]
    assert reader.blocks(space.units, space.segments[0]).shape == (2, 2, zoo.HEAD_DIM)
