"""Refitting a whole model: closer to the dense one than SparseGPT's, whatever its architecture and dtype."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import tiny as tiny_architectures
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.methods.measure import statistics as module_statistics
from permtriton.methods.measure.statistics import Moments
from permtriton.methods.prune import refit as module
from permtriton.methods.prune.refit import Refit
from permtriton.methods.step import Outcome
from permtriton.passes.plan import Site, check_pruned, sequential_groups
from permtriton.running.layer_walk import from_model
from permtriton.util.sparsity import NMPattern

from . import test_seq2seq, zoo
from .expert_stacks import unstacked
from .refits import Problem
from .two_ranks import Interrupting
from .updating import Recording, facts, tiny_model
from .zoo import find_plan


@pytest.mark.slow
def test_the_last_hidden_state_comes_closer_than_with_sparsegpt():
    problem, progress = Problem(tiny_model(layers=4), ids=zoo.tiny_ids(24, 16)), Recording()
    before = problem.sparsegpt()
    start = facts(problem.model)
    parts = problem.refit(progress)
    assert problem.error() < 0.9 * before
    assert facts(problem.model) == start
    check_pruned(problem.model, problem.plan)
    assert [part["name"] for part in parts] == [name for _, name in problem.plan.linears()]
    assert all(part["end"] < part["start"] for part in parts)
    assert sum(progress.steps) == progress.total


@pytest.mark.slow(but=["gemma2-residual_targets"])
@pytest.mark.parametrize("option", ["dense_targets", "residual_targets"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_targets_of_the_dense_model_bring_the_pruned_one_closer(option, name):
    """Also where a norm stands between a linear and the residual stream, as in Gemma."""
    problem = Problem(*zoo.planned(name), ids=zoo.token_ids(24, 16))
    errors = []
    for share in (0.0, 0.5):
        problem.reset().refit(**{option: share})
        errors.append(problem.error())
    assert errors[1] < 0.95 * errors[0]


def sharing_weights() -> PreTrainedModel:
    """Its layers' inputs come from the whole model, the dense one with the weights from before."""
    model = zoo.tiny_llama(num_hidden_layers=3, vocab_size=zoo.VOCABULARY)
    first, last = model.model.layers[0], model.model.layers[2]
    last.self_attn, last.mlp = first.self_attn, first.mlp
    return model


def pegasus_x() -> Problem:
    """Its last layer computes global tokens that nobody reads."""
    model = tiny_architectures.build("PegasusXForConditionalGeneration")
    return Problem(model, ids=tiny_architectures.inputs(model, samples=2))


PROBLEMS = {
    **{name: lambda name=name: Problem(*zoo.planned(name)) for name in ("gpt2", "gemma2", "bert")},
    **{name: lambda name=name: Problem(test_seq2seq.build(name)) for name in ("t5", "bart")},
    **{
        str(dtype): lambda dtype=dtype: Problem(tiny_model(layers=2).to(dtype), ids=zoo.tiny_ids(24, 16))
        for dtype in (torch.bfloat16, torch.float16)
    },
    "layers that share weights": lambda: Problem(sharing_weights()),
    "linears that also run for nothing": pegasus_x,
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.slow(but=["gpt2"])
def test_it_comes_closer_than_sparsegpt(name):
    problem = PROBLEMS[name]()
    before, dtypes = problem.sparsegpt(), {weight.dtype for weight in problem.weights.values()}
    problem.refit()
    assert problem.error() < before
    assert {weight.dtype for weight in problem.weights.values()} == dtypes
    check_pruned(problem.model, problem.plan)


@pytest.mark.slow
def test_moments_are_those_of_both_models():
    """The dense model runs with the weights from before pruning, also those of the layers that are pruned already."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    expected, found = inputs_of(problem), moments_of(problem)
    last = problem.plan.layers()[-1]
    present = inputs_of(problem, last[:1])  # of which nothing before was changed since
    for site in last[:1]:
        dense, pruned = expected[site.name], present[site.name]
        torch.testing.assert_close(found[site.name].hessian, pruned.T @ pruned, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[site.name].shift, (dense - pruned).T @ pruned, rtol=1e-3, atol=1e-3)
    assert found[last[0].name].shift.abs().max() > 0.1


@pytest.mark.slow
def test_the_residual_moments_are_those_of_both_models():
    """The last linear's output is added to what the norm before its MLP reads, which is fixed once it is its turn."""
    problem = Problem(tiny_model(layers=3), ids=zoo.tiny_ids(6, 16))
    last = problem.plan.sites[-1]
    dense = residual_of(problem, last)
    found = moments_of(problem)
    pruned, inputs = residual_of(problem, last), inputs_of(problem, [last])[last.name]
    torch.testing.assert_close(found[last.name].residual_shift, (dense - pruned).T @ inputs, rtol=1e-3, atol=1e-3)
    assert found[last.name].residual_shift.abs().max() > 0.1
    writers = {site.name for site in problem.plan.sites if site.residual}
    assert {name for name, moment in found.items() if moment.residual_shift is not None} == writers
    assert len(writers) == 6


def residual_of(problem: Problem, site: Site) -> Tensor:
    """What a site's output is added to in the model as it is, ``[tokens, hidden]``."""
    found = []
    hook = problem.model.get_submodule(site.residual.reader).register_forward_pre_hook(
        lambda _, inputs: found.append(inputs[0])
    )
    problem.hidden()
    hook.remove()
    return found[0].flatten(0, 1)


def inputs_of(problem: Problem, sites=None) -> dict[str, Tensor]:
    """What each site reads in the model as it is, ``[tokens, channels]``."""
    found: dict[str, list[Tensor]] = {}
    layer = from_model(problem.model, list(sites or problem.plan.sites), problem.samples, 4)
    module_statistics.watch_inputs(
        problem.model,
        layer,
        lambda site, inputs, _: found.setdefault(site.name, []).append(inputs.flatten(0, -2)),
        lambda *_: None,
    )
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("name", ["qwen2_moe"])
@pytest.mark.slow
def test_experts(name):
    """Which tokens an expert's second linear reads depends on the routing; what enters the experts does not."""
    problem = Problem(*unstacked(name))
    before = problem.sparsegpt()
    shifts = shifts_of(problem)
    assert problem.error() < before
    routed = {site for site, has_shift in shifts.items() if not has_shift}
    assert routed == {site for site in shifts if ".experts." in site and site.endswith("down_proj")}
    check_pruned(problem.model, problem.plan)


def shifts_of(problem: Problem) -> dict[str, bool]:
    """Refits, and returns site -> whether its inputs were compared with the dense model's."""
    return {site: moment.shift is not None for site, moment in moments_of(problem).items()}


def moments_of(problem: Problem) -> dict[str, Moments]:
    """Refits, and returns the moments of every site."""
    found: dict[str, Moments] = {}
    measure = module.moments

    def record(*args):
        measured = measure(*args)
        found.update(measured)
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moments", record)
        problem.refit()
    return found


# -- in a recipe -------------------------------------------------------------------------------------------------------


def compiled(recipe: str, **options):
    model, keywords = (
        tiny_model(),
        {name: options.pop(name) for name in ("progress", "resume_path") if name in options},
    )
    config = config_from({**options}, recipe)
    return compile_model(model, None, config, ids=zoo.tiny_ids(8, 16), **keywords)


def weights_of(found) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in found.model.state_dict().items()}


@pytest.mark.slow
def test_a_recipe_with_refit_is_proved_and_reported():
    found = compiled("heuristic,refit", layout="fused")
    assert found.report["proof"]["lowered_graph"] == "same outputs"
    (step,) = [each for each in found.report["steps"] if each["name"] == "refit"]
    assert [part["name"] for part in step["parts"]] == [name for _, name in found.plan.linears()]
    ((name, value),) = Refit().words(Outcome(parts=[{"name": "a", "start": 0.5, "end": 0.25}]))
    assert (name, value) == ("refit: error", "0.5000 to 0.2500 (mean of 1 linears)")


@pytest.mark.slow
def test_an_interrupted_recipe_continues_to_the_same_bytes(tmp_path):
    expected = weights_of(compiled("heuristic,refit"))
    path = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        compiled("heuristic,refit", resume_path=path, progress=Interrupting("refit", 4))
    found = weights_of(compiled("heuristic,refit", resume_path=path))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("llama_eager", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt_neox", 2), ("mobilebert", 12))),
    ],
)
def test_a_linear_is_fitted_to_what_the_new_weights_before_it_give(name, turns):
    """Experts share a turn, and so do attention and MLP if neither reads the other; layers and MLPs in lists do not."""
    classes = {"mobilebert": "MobileBertModel", "funnel": "FunnelModel"}
    model = tiny_architectures.build(classes[name]) if name in classes else None
    plan = zoo.planned(name)[1] if model is None else find_plan(model, NMPattern(2, 4), skip_indivisible=True)
    layers = [sites for sites in plan.layers() if sites[0].layer_paths]
    assert len(layers) >= 2
    for sites in layers:
        groups = sequential_groups(sites)
        assert len(groups) == turns
        if name not in ("mixtral", "gpt_neox", "funnel"):
            assert [len(group) for group in groups] == [1] * turns
