"""Steps that prune layer by layer continue after the last finished layer, to the same bits."""

import pytest
import torch

from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.running.resume import StateFile, Workspace

from . import zoo
from .expert_stacks import unstacked
from .refits import Problem
from .two_ranks import Interrupting
from .updating import Recording, equal, interrupt, tiny_model

MINE = {"weights": "mine"}  # what identifies a run
LAYERS = 3
MODELS = {
    "llama": lambda: Problem(tiny_model(layers=LAYERS), ids=zoo.tiny_ids(8, 16)),
    "half precision": lambda: Problem(tiny_model(layers=LAYERS).bfloat16(), ids=zoo.tiny_ids(8, 16)),
    "transposed weights": lambda: Problem(zoo.build("gpt2", n_layer=LAYERS), ids=zoo.token_ids(8, 16)),
    "experts": lambda: Problem(*unstacked("mixtral"), ids=zoo.token_ids(8, 16)),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".out.refit.safetensors"


def pruned(problem: Problem, step: str, progress=None, state=None) -> tuple[dict[str, torch.Tensor], list]:
    """The weights that a step gives, and what it reports without times."""
    run = {"refit": problem.refit, "sparsegpt": problem.update, "round": problem.rounded}[step]
    problem.reset()
    parts = run(progress, state)
    weights = {name: weight.detach().clone() for name, weight in problem.weights.items()}
    return weights, [{**part, "seconds": 0} for part in parts or []]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("llama", "refit"),
        ("llama", "round"),
        pytest.param("experts", "sparsegpt", marks=pytest.mark.slow),
        pytest.param("half precision", "refit", marks=pytest.mark.slow),
        pytest.param("transposed weights", "refit", marks=pytest.mark.slow),
    ],
)
def test_it_continues_to_the_same_end(path, name, step):
    problem, whole = MODELS[name](), Recording()
    expected, parts = pruned(problem, step, whole)
    last = len(whole.steps) - 1  # in the last layer
    with pytest.raises(KeyboardInterrupt):
        pruned(problem, step, Recording(last, interrupt), StateFile(path, MINE))
    layers = len(problem.plan.layers())
    assert [file.name for file in sorted(path.parent.iterdir())] == [
        f".out.refit_{number}.safetensors" for number in range(layers - 1)
    ]
    again = Recording()
    weights, found = pruned(problem, step, again, StateFile(path, MINE))
    assert equal(weights, expected)
    assert found == parts
    assert sum(again.steps) == again.total == sum(whole.steps)
    assert len(again.steps) == len(whole.steps) // layers + layers - 1, "one layer was pruned, the others were read"


def names_of_states(path):
    return {step: [file.name for file in files] for step, files in Workspace(resume_path=path).states.items()}


def test_states_of_another_output_are_another_runs(tmp_path):
    """Those of ``out.refit_v2``, and of ``refit`` in it, begin like those of ``out``."""
    states = [".out.refit_2.safetensors", ".out.refit_12.safetensors"]
    for name in (".out.refit_v2.distill.safetensors", ".out.refit_v2.refit_0.safetensors", *states):
        (tmp_path / name).touch()
    assert names_of_states(tmp_path / ".out.safetensors") == {"refit": states}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["refit,distill", "heuristic,sparsegpt,distill"])
def test_a_recipe_continues_after_its_pruned_layers(tmp_path, recipe):
    config = config_from({"distill_epochs": 2, "refit_iterations": 2, "refit_exchanges": 1}, recipe)
    path, ids = tmp_path / ".out.safetensors", zoo.tiny_ids(8, 16)
    whole = compile_model(tiny_model(), None, config, ids=ids)
    with pytest.raises(KeyboardInterrupt):
        compile_model(tiny_model(), None, config, ids=ids, resume_path=path, progress=Interrupting("distill", 1))
    step = "refit" if "refit" in recipe else "sparsegpt"
    assert names_of_states(path) == {step: [f".out.{step}_{number}.safetensors" for number in range(2)]}
    progress = Recording()
    continued = compile_model(tiny_model(), None, config, ids=ids, resume_path=path, progress=progress)
    assert (
        progress.lines.count(
            f"found .out.{step}_0.safetensors: its step will continue where the interrupted run stopped"
        )
        == 1
    )
    assert not any("_1.safetensors" in line for line in progress.lines)
    assert equal(dict(whole.model.named_parameters()), dict(continued.model.named_parameters()))
    continued.save_pretrained(tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dense_share", [0.0, 0.3])
@pytest.mark.slow
def test_gradients_that_differ_decide_nothing_again(tmp_path, dense_share, monkeypatch):
    """As they do on a GPU, where a backward pass is not the same in every run."""
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None, **more: rand(*shape, **more))
    options = {"heuristic_row_weights": "fisher", "dense_share": dense_share, "distill_epochs": 2, "layout": "fused"}
    config = config_from({**options, "refit_iterations": 1, "refit_exchanges": 0}, "heuristic,refit,distill")
    path, ids = tmp_path / ".out.safetensors", zoo.tiny_ids(8, 16)
    with pytest.raises(KeyboardInterrupt):
        compile_model(tiny_model(), None, config, ids=ids, resume_path=path, progress=Interrupting("distill", 1))
    stages = []
    progress = Recording()
    monkeypatch.setattr(
        progress, "stage", lambda name, steps, at=progress.stage: stages.append(name) or at(name, steps)
    )
    compile_model(tiny_model(), None, config, ids=ids, resume_path=path, progress=progress)
    assert "distill" in stages
    assert "row weights" not in stages
    assert stages.count("heuristic") == 1, "the step, which takes its order from the state, and no assignment"
