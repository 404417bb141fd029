"""Learning: it finds better orders, its gradient is the one it claims, and it leaves the model as it was."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import permtriton
from permtriton.calibration import channel_norms
from permtriton.config import LearnConfig
from permtriton.errors import CalibrationError, PermTritonError
from permtriton.forward import cosine_loss, hidden_states
from permtriton.importance import importance_of
from permtriton.kernels.assignment import assignment
from permtriton.learn import Learned, Masks, ResumeFile, Trainer, learn, learned_spaces, masked_model
from permtriton.permutation import identity, is_permutation, moved
from permtriton.plan import ChannelSpace, Site, linear_module, weight_in_out
from permtriton.planning import find_plan
from permtriton.progress import NoProgress
from permtriton.relaxation import Relaxation
from permtriton.sparsity import NMPattern

PATTERN = NMPattern(2, 4)
CPU = torch.device("cpu")
VOCABULARY = 40
# Blocks of 16, so that the 24 units of `down` have a smaller last block; a rate high enough for a few steps to tell.
QUICK = LearnConfig(block_size=16, epochs=3, batch_size=4, micro_batch_size=4, learning_rate=0.1, base_order="identity")


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, model_class=LlamaForCausalLM, **changes: object):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_bias": True,
        "mlp_bias": True,
    }
    torch.manual_seed(seed)
    model = model_class(LlamaConfig(**{**sizes, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def plant(model: LlamaForCausalLM, run: int = 4) -> LlamaForCausalLM:
    """Lets ``run`` channels that matter stand in a row, then as many that do not: 4 is a bad order, 2 the best one."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[:, torch.arange(linear.in_features) % (2 * run) >= run] *= 0.02
    return model


class Problem:
    """A model with everything that `learn` wants."""

    def __init__(
        self, model: LlamaForCausalLM, pattern: NMPattern = PATTERN, method: str = "wanda", layout: str = "portable"
    ) -> None:
        self.model, self.pattern = model, pattern
        self.plan = find_plan(model, pattern, layout=layout)
        self.ids = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(0))
        norms = channel_norms(model, self.plan.sites, self.ids, 4, NoProgress())
        self.importances = {}
        for site, name in self.plan.linears():
            statistic = norms[site.name].to(model.dtype)
            self.importances[name] = importance_of(method, weight_in_out(linear_module(model, name)), statistic)
        self.target = hidden_states(model, self.ids, 4)

    def learn(self, config: LearnConfig = QUICK, seed: int = 0, progress=None, resume=None) -> Learned:
        return learn(
            self.model, self.plan, self.importances, self.ids, self.target, config, self.pattern, seed,
            progress or NoProgress(), resume,
        )  # fmt: skip

    def loss(self, weights: dict[str, Tensor]) -> Tensor:
        """The loss with other weights, by module name, in place of the model's own."""
        named = {f"{name.removeprefix('model.')}.weight": weight for name, weight in weights.items()}
        arguments = {"input_ids": self.ids, "use_cache": False}
        return cosine_loss(torch.func.functional_call(self.model.base_model, named, (), arguments)[0], self.target)

    @torch.no_grad()
    def hard_loss(self, indices: dict[str, Tensor]) -> float:
        """The loss under hard permutations, masks made one row and group at a time."""
        weights = {}
        for site, name in self.plan.linears():
            index = site.expand(indices[site.space.name]) if site.space.name in indices else identity(site.channels)
            weight = linear_module(self.model, name).weight
            scores = self.importances[name].scores(weight.t()).t()[:, index].unflatten(1, (-1, self.pattern.group))
            keep = torch.zeros_like(scores, dtype=torch.bool)
            keep.scatter_(2, scores.topk(self.pattern.kept, dim=2).indices, True)
            permuted = torch.where(keep.flatten(1), weight[:, index], 0)
            weights[name] = torch.empty_like(weight).index_copy_(1, index, permuted)
        return float(self.loss(weights))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(plant(tiny()))


def same_history(one: Learned, other: Learned) -> bool:
    """Whether two runs went the same way, seconds aside, bit by bit."""
    told = [[replace(epoch, seconds=0.0) for epoch in result.history] for result in (one, other)]
    return told[0] == told[1] and one.kept == other.kept and same_indices(one, other)


def same_indices(one: Learned, other: Learned) -> bool:
    return one.indices.keys() == other.indices.keys() and all(
        torch.equal(one.indices[name], other.indices[name]) for name in one.indices
    )


# -- what it finds -------------------------------------------------------------------------------------------------


def test_learning_beats_the_base_order_and_moves_channels(problem):
    result = problem.learn(replace(QUICK, epochs=8))
    base, kept = result.history[0], result.history[result.kept]
    assert kept.loss < 0.9 * base.loss
    assert result.kept > 0
    assert kept.moved == sum(moved(index) for index in result.indices.values()) > 0


def test_the_losses_are_those_of_the_hard_permutations(problem):
    result = problem.learn()
    assert result.history[0].loss == pytest.approx(problem.hard_loss({}), rel=1e-4)
    assert result.history[result.kept].loss == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


def test_indices_are_permutations_inside_their_blocks(problem):
    result = problem.learn(replace(QUICK, start="random", keep_epoch="last"))
    assert set(result.indices) == {space.name for space in problem.plan.spaces}
    for space in problem.plan.spaces:
        index = result.indices[space.name]
        assert index.dtype == torch.int64
        for start, size in space.blocks(QUICK.block_size):
            assert is_permutation(index[start : start + size] - start)


@pytest.mark.parametrize("pattern", [NMPattern(1, 4), NMPattern(4, 8)])
@pytest.mark.parametrize("block_size", [8, 4096])
def test_other_patterns_and_block_sizes(pattern, block_size):
    other = Problem(plant(tiny()), pattern)
    result = other.learn(replace(QUICK, block_size=block_size, epochs=1, keep_epoch="last", start="random"))
    assert result.history[-1].loss == pytest.approx(other.hard_loss(result.indices), rel=1e-4)
    assert all(is_permutation(index) for index in result.indices.values())


def test_the_best_epoch_is_kept_and_never_one_worse_than_the_base(problem):
    result = problem.learn(replace(QUICK, start="random", learning_rate=0.5, epochs=4))
    losses = [epoch.loss for epoch in result.history]
    assert [epoch.epoch for epoch in result.history] == [0, 1, 2, 3, 4]
    assert losses[result.kept] == min(losses)


def test_a_base_order_that_nothing_beats_is_kept():
    good = Problem(plant(tiny(), run=2))
    result = good.learn(replace(QUICK, epochs=1, start="random", learning_rate=1e-6, learn_layers="last:1"))
    assert result.history[1].loss > result.history[0].loss, "a random order is worse than the best one"
    assert result.kept == 0
    assert all(torch.equal(index, identity(index.numel())) for index in result.indices.values())


def test_the_last_epoch_is_kept_where_asked_for(problem):
    result = problem.learn(replace(QUICK, start="random", learning_rate=0.5, keep_epoch="last"))
    assert result.kept == QUICK.epochs
    assert result.history[-1].loss == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)
    assert result.history[-1].moved == sum(moved(index) for index in result.indices.values())


def test_the_last_epoch_is_kept_though_an_earlier_one_is_better(problem):
    result = problem.learn(replace(QUICK, keep_epoch="last"))
    losses = [epoch.loss for epoch in result.history]
    assert losses[result.kept] == losses[-1] > min(losses)
    assert losses[-1] == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


def test_temperature_falls_from_start_to_end(problem):
    taus = [epoch.tau for epoch in problem.learn().history]
    assert taus[0] == QUICK.tau_start
    assert taus[-1] == pytest.approx(QUICK.tau_end)
    assert taus == sorted(taus, reverse=True)


@pytest.mark.parametrize("last", [1, 2, 9])
def test_last_layers_learn_and_the_others_stay(problem, last):
    config = replace(QUICK, learn_layers=f"last:{last}", start="random", keep_epoch="last", epochs=1)
    names = {space.name for space in problem.plan.spaces}
    expected = {name for name in names if "layers.1." in name} if last == 1 else names
    assert {space.name for space in learned_spaces(problem.plan, config)} == expected
    result = problem.learn(config)
    assert set(result.indices) == expected
    assert result.history[-1].loss == pytest.approx(problem.hard_loss(result.indices), rel=1e-4)


def test_a_model_whose_channels_may_not_move_is_no_crash():
    """A headless model's stream is its output, heads of 6 hold no whole groups, and nothing else is pruned."""
    model = tiny(model_class=LlamaModel, hidden_size=24, intermediate_size=30)
    config = permtriton.CompileConfig.from_options(
        {"skip_indivisible": True, "epochs": 1, "batch_size": 4, "micro_batch_size": 4}
    )
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))
    assert all(space.frozen for space in find_plan(model, PATTERN, skip_indivisible=True).spaces)
    try:
        compiled = permtriton.compile(model, None, config, ids=ids)
    except PermTritonError as error:
        assert "--permutation" in str(error)  # noqa: PT017
    else:
        assert all(site["moved"] == 0 for site in compiled.report["sites"])


# -- the same seed, the same result --------------------------------------------------------------------------------


def test_a_seed_decides_everything(problem):
    runs = [problem.learn(replace(QUICK, start="random", keep_epoch="last"), seed) for seed in (3, 3, 4)]
    assert same_history(runs[0], runs[1])
    assert [epoch.loss for epoch in runs[0].history[1:]] != [epoch.loss for epoch in runs[2].history[1:]]
    assert not same_indices(runs[0], runs[2])


class GradientKeeper:
    """Stands for the optimizer: keeps the gradients of the first step, and takes none."""

    def __init__(self, parameters: Iterator[Tensor], **_options: object) -> None:
        self.parameters, self.gradients = list(parameters), []
        self.param_groups = [{"lr": 0.0}]
        self.state = {}

    def step(self) -> None:
        if not self.gradients:
            self.gradients = [parameter.grad.clone() for parameter in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def gradients(problem: Problem, config: LearnConfig, monkeypatch, seed: int = 0) -> list[Tensor]:
    """The gradients of every logit and scale in the first step of `learn`, all sequences in one batch."""
    keepers = []
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: keepers.append(GradientKeeper(*a, **k)) or keepers[-1])
    problem.learn(replace(config, epochs=1, batch_size=problem.ids.shape[0]), seed)
    return keepers[0].gradients


def assert_close_gradients(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert float(other.abs().max()) > 0
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_add_up(problem, monkeypatch, micro):
    whole = gradients(problem, replace(QUICK, micro_batch_size=8), monkeypatch)
    parts = gradients(problem, replace(QUICK, micro_batch_size=micro), monkeypatch)
    assert_close_gradients(parts, whole, 1e-4)


def test_micro_batches_learn_alike(problem):
    config = replace(QUICK, batch_size=8, epochs=1, start="random")
    runs = [problem.learn(replace(config, micro_batch_size=micro)).history for micro in (1, 8)]
    assert [epoch.loss for epoch in runs[0]] == pytest.approx([epoch.loss for epoch in runs[1]], rel=0.05)


def test_activation_checkpointing_changes_nothing(problem, monkeypatch):
    on = gradients(problem, replace(QUICK, activation_checkpointing=True, micro_batch_size=8), monkeypatch)
    off = gradients(problem, replace(QUICK, activation_checkpointing=False, micro_batch_size=8), monkeypatch)
    assert_close_gradients(on, off, 1e-5)


# -- the gradient, against autograd through dense matrices ---------------------------------------------------------


def straight_through(value: Tensor, gradient_of: Tensor) -> Tensor:
    """``value`` going forward; the gradient of ``gradient_of`` going back."""
    return value.detach() + gradient_of - gradient_of.detach()


def dense_permutation(units: int, blocks: list[tuple[int, Tensor]], copies: Tensor) -> Tensor:
    """The whole ``[channels, channels]`` matrix: blocks of units on the diagonal, once for each copy of the units.

    Args:
        units: of the space.
        blocks: (first unit, soft matrix).
        copies: ``[units, copies]``, the channels of each unit.
    """
    unit_matrix = blocks[0][1].new_zeros(units, units)
    for start, matrix in blocks:
        there = torch.arange(start, start + matrix.shape[0])
        unit_matrix = unit_matrix.index_put((there[:, None], there[None, :]), matrix)
    whole = unit_matrix.new_zeros(copies.numel(), copies.numel())
    for channels in copies.T:
        whole = whole.index_put((channels[:, None], channels[None, :]), unit_matrix)
    return whole


def group_scales(grouped: Tensor, block_of_group: Tensor) -> Tensor:
    """Each group's mean score, but at least a tenth of its block's; ``grouped`` is ``[out, groups, group]``."""
    means = grouped.mean(2)
    members = (block_of_group[:, None] == block_of_group[None, :]).to(means.dtype)
    floors = 0.1 * means @ members / members.sum(0)
    return torch.maximum(means, floors).unsqueeze(2).detach()


def dense_weight(weight: Tensor, importance, soft: Tensor, index: Tensor, block_of: Tensor | None) -> Tensor:
    """The masked weight by dense products, with the rules that `permtriton.kernels.nm_mask` states.

    Args:
        weight: ``[out, channels]``.
        importance: of it.
        soft: the whole soft permutation, ``[channels, channels]``.
        index: the hard one.
        block_of: number of each channel's block, where scores are scaled by group; None where they are not.
    """
    hard = torch.zeros_like(soft)
    hard[index, torch.arange(index.numel())] = 1
    matrix = straight_through(hard, soft)
    scores = importance.scores(weight.t()).t().to(soft.dtype) @ matrix
    grouped = scores.unflatten(1, (-1, PATTERN.group))
    top = torch.zeros_like(grouped).scatter_(2, grouped.topk(PATTERN.kept, dim=2).indices, 1.0).flatten(1)
    scale = 1.0 if block_of is None else group_scales(grouped, block_of[:: PATTERN.group])
    mask_soft = (grouped / scale).softmax(2).flatten(1)
    return weight.detach() * straight_through(top @ hard.T, mask_soft @ matrix.T)


@pytest.mark.parametrize("method", ["wanda", "ria", "obs"])
@pytest.mark.parametrize(
    "options",
    [{}, {"group_scale": False, "start": "random", "clamp_logits": 1.0}, {"sinkhorn_rounds": 0}, {"block_size": 4096}],
)
def test_gradient_is_that_of_dense_permutation_matrices(monkeypatch, method, options):
    exact = Problem(tiny(dtype=torch.float64), method=method)
    config = replace(QUICK, micro_batch_size=8, **options)
    found = gradients(exact, config, monkeypatch, seed=5)

    spaces = learned_spaces(exact.plan, config)
    relaxation = Relaxation(spaces, config, 5, torch.device("cpu"))
    soft = relaxation.soft(config.tau_start)
    indices = relaxation.harden(soft)
    assert any(moved(index) for index in indices.values()) or config.start == "identity"
    weights = {}
    for site, name in exact.plan.linears():
        space = site.space
        blocks = []
        for start, _ in space.blocks(config.block_size):
            place, row = relaxation.position(space, start)
            blocks.append((start, soft[place][row].double()))
        copies = torch.stack([(site.units == unit).nonzero().flatten() for unit in range(space.units)])
        matrix = dense_permutation(space.units, blocks, copies)
        index, block_of = torch.empty(site.channels, dtype=torch.int64), torch.empty(site.channels)
        for copy_number, channels in enumerate(copies.T):
            index[channels] = channels[indices[space.name]]
            for number, (start, block) in enumerate(blocks):
                block_of[channels[start : start + block.shape[0]]] = copy_number * len(blocks) + number
        weight = linear_module(exact.model, name).weight
        scaled = block_of if config.group_scale else None
        weights[name] = dense_weight(weight, exact.importances[name], matrix, index, scaled)
    exact.loss(weights).backward()
    assert_close_gradients(found, [parameter.grad for parameter in relaxation.parameters()], 1e-4)


# -- the model comes back as it was --------------------------------------------------------------------------------


def state(model: torch.nn.Module) -> dict[str, object]:
    """Everything about a model that a careless learner could change, tensors aside."""
    return {
        "parameters": {
            name: (id(p), p.requires_grad, p.stride(), p.grad is None) for name, p in model.named_parameters()
        },
        "saved": set(model.state_dict()),
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
    }


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    before, tensors = state(model), copy.deepcopy(model.state_dict())
    yield
    assert state(model) == before
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


class Counting(NoProgress):
    """Keeps the steps of every call, and calls ``act`` at call number ``at``."""

    def __init__(self, at: int = 0, act: Callable[[], object] | None = None) -> None:
        self.told, self.at, self.act = [], at, act

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        def advance(steps: int = 1, note: str = "") -> None:
            self.told.append(steps)
            if len(self.told) == self.at:
                self.act()

        yield advance


def stop(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_model_comes_back_unchanged(problem, checkpointing):
    problem.model.lm_head.weight.requires_grad_(False)
    with unchanged(problem.model):
        problem.learn(replace(QUICK, activation_checkpointing=checkpointing))
    problem.model.lm_head.weight.requires_grad_(True)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_the_model_comes_back_unchanged_after_an_error(problem, error, at):
    with unchanged(problem.model), pytest.raises(type(error)):
        problem.learn(progress=Counting(at, stop(error)))


def test_parameters_keep_their_order():
    """An optimizer's state goes by it."""
    fresh = Problem(plant(tiny()))
    before = [name for name, _ in fresh.model.named_parameters()]
    fresh.learn(replace(QUICK, epochs=1))
    assert [name for name, _ in fresh.model.named_parameters()] == before


def test_a_forward_of_a_layers_own_comes_back():
    """Offloading and quantisation libraries put their own ``forward`` on modules."""
    wrapped = Problem(plant(tiny()))
    layer = wrapped.model.model.layers[0]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    mine = layer.forward
    wrapped.learn(replace(QUICK, epochs=1))
    assert vars(layer).get("forward") is mine


@pytest.mark.parametrize("at", [0, 2])
def test_a_loss_that_is_not_finite_is_refused(at):
    """From the start, or only at the second step."""
    broken = Problem(plant(tiny()))
    poison = lambda: broken.target.fill_(float("nan"))  # noqa: E731
    if not at:
        poison()
    with unchanged(broken.model), pytest.raises(CalibrationError, match=r"learning loss is nan.*--dtype float32"):
        broken.learn(progress=Counting(at, poison))


def test_a_learning_rate_that_explodes_is_refused(problem):
    with unchanged(problem.model), pytest.raises(PermTritonError):
        problem.learn(replace(QUICK, learning_rate=1e30))


# -- interrupted and continued -------------------------------------------------------------------------------------

STEPS = 2  # a epoch of 8 sequences in batches of 4
IN_EPOCH_3 = 1 + 2 * STEPS + 1  # the first call tells what was done before


@pytest.mark.parametrize("keep_epoch", ["best", "last"])
@pytest.mark.parametrize("start", ["identity", "random"])
def test_an_interrupted_run_continues_to_the_same_end(problem, tmp_path, keep_epoch, start):
    config = replace(QUICK, epochs=4, keep_epoch=keep_epoch, start=start)
    whole = problem.learn(config)
    path = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        problem.learn(config, progress=Counting(IN_EPOCH_3, stop(KeyboardInterrupt())), resume=ResumeFile(path, "same"))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    progress = Counting()
    continued = problem.learn(config, progress=progress, resume=ResumeFile(path, "same"))
    assert progress.told == [2 * STEPS] + [1] * (2 * STEPS), "two epochs were left"
    assert same_history(continued, whole)
    assert whole.history[2].moved > 0, "there was something to continue from"


def test_a_finished_run_is_not_run_again(problem, tmp_path):
    resume = ResumeFile(tmp_path / "state.safetensors", "same")
    whole = problem.learn(resume=resume)
    progress = Counting()
    again = problem.learn(progress=progress, resume=resume)
    assert progress.told == [QUICK.epochs * STEPS]
    assert same_history(again, whole)
    resume.delete()
    assert list(tmp_path.iterdir()) == []
    resume.delete()


@pytest.mark.parametrize("content", ["another fingerprint", "garbage", "empty"])
def test_a_state_that_does_not_belong_is_ignored(problem, tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content == "another fingerprint":
        problem.learn(replace(QUICK, epochs=1), seed=9, resume=ResumeFile(path, "another"))
    else:
        path.write_bytes(b"" if content == "empty" else b"garbage" * 9)
    assert same_history(problem.learn(resume=ResumeFile(path, "mine")), problem.learn())


def test_a_state_that_cannot_be_written_is_a_clear_error(problem, tmp_path, monkeypatch):
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("permtriton.resume.save_file", full)
    with unchanged(problem.model), pytest.raises(PermTritonError, match="No space left"):
        problem.learn(resume=ResumeFile(tmp_path / "state.safetensors", "same"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"learning_rate": 0.1}, {"seed": 1}, {"sparsity": "1:4"}, {"importance": "ria"}])
def test_compile_continues_only_an_equal_compilation(tmp_path, change):
    options = {"epochs": 2, "batch_size": 4, "micro_batch_size": 4, "block_size": 16, "base_order": "identity"}
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))

    def run(changes: dict[str, object], **more: object) -> permtriton.CompiledModel:
        config = permtriton.CompileConfig.from_options({**options, **changes})
        return permtriton.compile(plant(tiny(num_hidden_layers=1)), None, config, ids=ids, **more)

    path = tmp_path / "state.safetensors"
    first = run({}, resume_path=path)
    assert path.is_file()
    again = run({}, resume_path=path)
    assert again.report["learning"] == first.report["learning"], "to the second: it was not run again"
    other, fresh = run(change, resume_path=path), run(change)
    for mine, theirs in zip(other.report["learning"]["epochs"], fresh.report["learning"]["epochs"], strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    assert all(torch.equal(other.indices[name], fresh.indices[name]) for name in fresh.indices)


# -- the masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 12, 16])
@pytest.mark.parametrize("layout", ["portable", "fused"])
@pytest.mark.parametrize("learn_layers", ["all", "last:1"])
def test_every_linear_gets_the_order_of_its_site(block_size, layout, learn_layers):
    """Tied channels, blocks of two sizes and layers that stay included."""
    given = Problem(tiny(), layout=layout)
    config = replace(QUICK, block_size=block_size, learn_layers=learn_layers, start="random")
    relaxation = Relaxation(learned_spaces(given.plan, config), config, 0, CPU)
    soft = relaxation.soft(0.5)
    indices = relaxation.harden(soft)
    with masked_model(given.model, given.plan, given.importances, PATTERN, relaxation, config) as masks:
        for index in (relaxation.assign(soft), relaxation.join(indices)):
            masks.set(index, None)
            for site, name in given.plan.linears():
                found = linear_module(given.model, name).parametrizations.weight[0].index
                unmoved = identity(site.channels)
                learns = site.space.name in indices
                assert torch.equal(found, site.expand(indices[site.space.name]) if learns else unmoved), name
                assert learns != torch.equal(found, unmoved), name


def two_masks(soft: Tensor) -> tuple[Masks, list[Tensor]]:
    """The masks of two sites that share a block of 4 channels, and the leaves that their weights see."""
    space = ChannelSpace("space", (4,), ())
    relaxation = Relaxation([space], replace(QUICK, block_size=4), 0, CPU)
    weights = [SimpleNamespace(), SimpleNamespace()]
    sites = [Site(name, (), 4, torch.arange(4), space) for name in ("one", "other")]
    masks = Masks([(relaxation.blocks_of(site), [weight]) for site, weight in zip(sites, weights, strict=True)])
    masks.set(torch.arange(4), [soft])
    return masks, [weight.soft for weight in weights]


def test_float16_gradients_do_not_vanish():
    """A mean over many tokens leaves gradients that float16 rounds to zero unless the loss is scaled up."""
    soft = torch.ones(1, 4, 4, requires_grad=True)
    masks, leaves = two_masks(soft * 1)
    with pytest.raises(CalibrationError, match="largest gradient"):
        masks.backward(1.0)
    (leaves[0].half() * torch.tensor(1e-9 * 2.0**20, dtype=torch.float16)).sum().backward()
    masks.backward(2.0**20)
    assert soft.grad is not None
    torch.testing.assert_close(soft.grad, torch.full((1, 4, 4), 1e-9), rtol=1e-2, atol=0)


def test_gradients_of_two_sites_add_up():
    soft = torch.ones(1, 4, 4, requires_grad=True)
    masks, leaves = two_masks(soft * 1)
    ((leaves[0] * 3).sum() + (leaves[1] * torch.arange(16.0)).sum()).backward()
    masks.backward(4.0)
    torch.testing.assert_close(soft.grad, (3 + torch.arange(16.0)).view(1, 4, 4) / 4)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused(broken, value):
    """Of whichever site."""
    masks, leaves = two_masks(torch.ones(1, 4, 4, requires_grad=True) * 1)
    for leaf in leaves:
        leaf.sum().backward()
    leaves[broken].grad[5] = value
    with pytest.raises(CalibrationError, match="largest gradient"):
        masks.backward(1.0)


class Synchronisations(TorchDispatchMode):
    """Counts the numbers that the host waits for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_the_host_waits_no_oftener_in_a_model_of_more_layers():
    counts = []
    for layers in (1, 3):
        given = Problem(tiny(num_hidden_layers=layers))
        relaxation = Relaxation(learned_spaces(given.plan, QUICK), QUICK, 0, CPU)
        optimizer = torch.optim.AdamW(relaxation.parameters())
        with masked_model(given.model, given.plan, given.importances, PATTERN, relaxation, QUICK) as masks:
            trainer = Trainer(given.model, masks, relaxation, optimizer, given.ids, given.target, QUICK, 0)
            with Synchronisations() as waits:
                trainer.step(torch.arange(4), 0)
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_every_hardening_starts_from_the_prices_of_the_last(problem, monkeypatch):
    """NaN, where there are none, at the first of all; steps and the epochs' ends alike."""
    given = []

    def solve(score: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
        given.append((score.shape, prices))
        return assignment(score), torch.full_like(prices, len(given))

    monkeypatch.setattr("permtriton.relaxation.assignment_warm", solve)
    problem.learn()
    sizes = len({shape for shape, _ in given})
    assert sizes == 2
    assert len(given) == sizes * QUICK.epochs * (STEPS + 1)
    for number, (shape, prices) in enumerate(given):
        assert prices.shape == shape[:2]
        assert prices.isnan().all() if number < sizes else prices.eq(number + 1 - sizes).all()
