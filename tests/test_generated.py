"""Text that the dense model writes: what it is, which steps read it, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

import permtriton
from permtriton import config_from
from permtriton.data import generated
from permtriton.data.generated import beginnings, generated_text, kept_of_text, written
from permtriton.data.samples import Samples
from permtriton.driver.pipeline import compile_model
from permtriton.errors import CalibrationError, ConfigError, OutputError
from permtriton.recipe import check_effects, compile_command
from permtriton.util.progress import NoProgress, Progress

from . import test_seq2seq, zoo
from .desk import RUNNER, app
from .two_ranks import Interrupting
from .updating import facts, tiny_model

IDS = zoo.tiny_ids(6, 12)
OPTIONS = {
    "generated": 5, "distill_epochs": 2, "distill_batch_size": 4, "micro_batch_size": 4,
    "activation_checkpointing": False,
}  # fmt: skip


def text(model: PreTrainedModel | None = None, count: int = 9, seed: int = 0, to: Progress | None = None) -> Tensor:
    starts = beginnings(Samples.of(IDS), count, 4)
    return generated_text(model or tiny_model(), starts, count, 12, seed, to or NoProgress())


def surprises(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """The negative log-probability of all tokens but the first ones, without a cache: float32 ``[texts]``."""
    with torch.no_grad():
        logs = log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
    return -logs[:, first - 1 : -1].gather(2, ids[:, first:, None]).sum((1, 2))


def test_the_text_continues_the_samples_and_depends_on_the_seed_alone(monkeypatch):
    model = tiny_model()
    torch.manual_seed(77)
    before, found = torch.get_rng_state(), text(model)
    assert (found.shape, found.dtype) == ((9, 12), torch.int64)
    torch.manual_seed(0)
    assert torch.equal(text(model), found)
    torch.manual_seed(77)
    text(model)
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is left alone"
    assert not torch.equal(text(model, seed=1)[:, 4:], found[:, 4:])
    starts = beginnings(Samples.of(IDS), 9, 4)
    assert {tuple(row) for row in found[:, :4].tolist()} <= {tuple(row) for row in starts.tolist()}
    monkeypatch.setattr(generated, "AT_ONCE", 3 * kept_of_text(model, 12))
    assert torch.equal(text(model), found), "three at a time"


def test_the_worst_tenth_is_dropped():
    model, count = tiny_model(), 18
    starts = beginnings(Samples.of(IDS), count, 4)
    assert len(starts) == written(count) == 20
    every = generated_text(model, starts, len(starts), 12, 0, NoProgress())
    expected = surprises(model, every, 4).argsort()[:count].sort().values
    assert torch.equal(text(model, count), every[expected])


def test_tokens_are_drawn_as_often_as_the_model_expects():
    model, count = zoo.tiny_llama(vocab_size=16), 4000
    zoo.randomize(model)
    starts = torch.tensor([[3, 5]]).expand(count, 2)
    found = generated_text(model, starts, count, 3, 0, NoProgress())[:, 2]
    with torch.no_grad():
        expected = model(input_ids=starts[:1]).logits[0, -1].softmax(-1)
    assert expected.max() < 0.9, "there is something to draw"
    assert (found.bincount(minlength=16) / count - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def test_the_models_own_settings_have_no_part_in_it():
    """Its end token ends no text, and it is left as it was."""
    model, found = tiny_model(), text()
    settings = model.generation_config
    settings.eos_token_id = list(range(zoo.TINY["vocab_size"]))
    settings.repetition_penalty, settings.suppress_tokens, settings.do_sample = 3.0, [1, 2, 3], True
    before, config = settings.to_dict(), facts(model)
    assert torch.equal(text(model), found)
    assert model.generation_config is settings
    assert (settings.to_dict(), facts(model)) == (before, config)


def test_weights_that_are_damaged_are_named():
    model = tiny_model()
    model.get_output_embeddings().weight.data[:] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        text(model)


def test_a_model_whose_own_generate_fails_says_so(monkeypatch):
    """Whatever it raises, but for memory that runs out: fewer texts are written together then."""
    model = tiny_model()

    def fails(*_arguments: object, **_options: object) -> None:
        raise AttributeError("'Own' object has no attribute 'past'\nand more")

    monkeypatch.setattr(model, "generate", fails)
    settings = model.generation_config
    with pytest.raises(CalibrationError) as caught:
        text(model)
    assert str(caught.value) == (
        "the dense model itself, LlamaForCausalLM, cannot generate text: AttributeError: 'Own' object has no attribute "
        "'past'. Give calibration text and `generated=0`, so that it need not"
    )
    assert model.generation_config is settings


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "opt", "mixtral"])
def test_models_write(name):
    model = zoo.build(name)
    ids = zoo.token_ids(3, 10)
    found = generated_text(model, beginnings(Samples.of(ids), 4, 4), 4, 10, 0, NoProgress())
    assert found.shape == (4, 10)


# -- in a compilation --------------------------------------------------------------------------------------------------


def compiled(recipe: str, model: PreTrainedModel | None = None, ids: Tensor | None = IDS, **more) -> object:
    running = {name: more.pop(name) for name in ("progress", "resume_path") if name in more}
    config = config_from({**OPTIONS, **more, "recipe": recipe})
    return compile_model(model or tiny_model(), None, config, ids=ids, **running)


@pytest.mark.slow
def test_an_objective_of_the_samples_alone_is_not_taken_for_one_of_all():
    """The search measures the samples; what distillation minimises has the text, too."""
    found = compiled("searched,mask,distill", search_rounds=1)
    assert len(found.report["steps"][-1]["history"]) == 3


@pytest.mark.slow
def test_it_changes_the_result_and_the_record_repeats_it():
    models = [tiny_model() for _ in range(3)]
    first, *_ = (compiled("mask,distill", model, generated=n) for model, n in zip(models, (5, 5, 0), strict=True))
    weights = [model.state_dict() for model in models]
    same = [all(torch.equal(weights[0][name], other[name]) for name in other) for other in weights[1:]]
    assert same == [True, False]
    assert "--generated 5" in compile_command("m", first.config)


@pytest.mark.slow
def test_an_interrupted_compilation_continues_with_the_same_text(tmp_path, monkeypatch):
    path, whole, again = tmp_path / "state.safetensors", tiny_model(), tiny_model()
    compiled("refit,distill", whole)
    with pytest.raises(KeyboardInterrupt):
        compiled("refit,distill", tiny_model(), resume_path=path, progress=Interrupting("distill", 5))
    state = tmp_path / "state.generated.safetensors"
    assert load_file(state)["text"].shape == (5, 12)
    monkeypatch.setattr(type(again), "generate", lambda *_, **__: pytest.fail("written again"))
    compiled("refit,distill", again, resume_path=path)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.slow
def test_text_of_another_run_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    compiled("mask,distill", resume_path=path)
    with pytest.raises(OutputError, match="belongs to another run: seed was 0 and is 1"):
        compiled("mask,distill", resume_path=path, seed=1)
    state, trained = (path.with_suffix(f".{name}.safetensors") for name in ("generated", "distill"))
    state.unlink()
    own = permtriton.driver.prepare.generated_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("permtriton.driver.prepare.generated_text", lambda *a: own(*a).roll(1, 0))
        with pytest.raises(OutputError, match=r"distill.* belongs to another run: the dense model wrote another text"):
            compiled("mask,distill", resume_path=path)
    assert trained.is_file()


# -- what cannot write -------------------------------------------------------------------------------------------------


def bert() -> PreTrainedModel:
    return zoo.build("bert", vocab_size=zoo.TINY["vocab_size"], num_hidden_layers=1)


def t5() -> PreTrainedModel:
    return test_seq2seq.build("t5")


@pytest.mark.parametrize(
    ("make", "words"),
    [(bert, "BertModel does not generate text token by token"), (t5, "T5.* is an encoder-decoder")],
    ids=["encoder", "encoder-decoder"],
)
def test_models_that_cannot_write_are_refused(make, words):
    with pytest.raises(ConfigError, match=f"`generated=5`: {words}.*`generated=0`"):
        compiled("mask,distill", make())


def test_samples_of_more_than_tokens_are_refused():
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    with pytest.raises(ConfigError, match=r"`generated=5`: .* reads input_ids, attention_mask"):
        compiled("mask,distill", ids=inputs)


def test_the_dry_run_says_how_long_writing_takes(model_folder, tmp_path):
    arguments = [
        "compile", str(model_folder), "--recipe", "mask,distill", "--calibration", "demo", "--generated", "4",
        "--sequence-length", "16", "--samples", "4", "--dry-run", "--json", "--eval-data", "none",
        "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["seconds"]["generate"] > 0
    assert report["memory"]["stages"]["generation"] > 0


def test_options_without_an_effect():
    fast = config_from({"recipe": "heuristic,sparsegpt", "generated": 3})
    with pytest.raises(ConfigError, match=r"`generated=` has no effect with `recipe=heuristic,sparsegpt`, none of"):
        check_effects(["generated"], fast)
    assert fast.generated == 0
    one_document = {"recipe": "mask,distill", "distill_further": 2, "one_document": True}
    check_effects(["distill_further"], config_from(one_document))  # further samples: see `over`
