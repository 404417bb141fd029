"""The zoo: a tiny random model of every class that transformers can load, permuted at random in both layouts."""

import os

import pytest
import transformers

from benchmarks.architectures import table, tiny, trial
from benchmarks.architectures.__main__ import Worker
from permtriton import config_from
from permtriton.driver.pipeline import compile_model
from permtriton.errors import PermTritonError, VerificationError
from permtriton.methods import planning

# Every family whose operators, names or modules differ from the others in a way that was once wrong or lost.
SAMPLE = (
    # decoders
    "LlamaForCausalLM", "Gemma4ForCausalLM", "BartForCausalLM", "DbrxForCausalLM", "GptOssForCausalLM",
    "GraniteMoeForCausalLM", "MiniMaxForCausalLM",
    # latent attention
    "DeepseekV3ForCausalLM", "HYV4ForCausalLM", "MiniCPM3ForCausalLM",
    # state space and hybrids
    "MambaForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM", "Lfm3ForCausalLM", "NemotronHForCausalLM",
    "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "ZambaForCausalLM", "Zamba2ForCausalLM",
    "xLSTMForCausalLM",
    # encoders
    "DebertaV2ForMaskedLM", "GteForMaskedLM", "JinaEmbeddingsV3ForMaskedLM",
    "LongformerForMaskedLM", "MobileBertForMaskedLM", "NomicBertForMaskedLM", "UMT5EncoderModel",
    # encoder-decoders
    "BartForConditionalGeneration", "LongT5ForConditionalGeneration", "MarianMTModel",
    "SwitchTransformersForConditionalGeneration", "T5ForConditionalGeneration", "WhisperForConditionalGeneration",
    # images and sound
    "CLIPVisionModel", "Dinov2Model", "SiglipVisionModel", "ViTModel", "Wav2Vec2ForCTC",
    "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration",
)  # fmt: skip
# What fails when it is compiled, saved and reloaded as a whole, and how: each is refused, none is saved wrong.
REFUSED = {
    "CanineModel": "does not say which token ids it knows",
    "DiffusionGemmaForBlockDiffusion": "the mask should retain an importance",
    "ImageGPTModel": "Cannot copy out of meta tensor",
    "MarianMTModel": "reloading the saved checkpoint: outputs differ",
    "PaliGemmaForConditionalGeneration": "the graph that torch.export traces",
    "SpeechT5ForSpeechToText": "You have to specify",
}
KNOWN = {record["class"]: record for record in table.load()[1]}


def check(record: table.Record) -> None:
    """Checks that a class was built, that nothing went wrong, and that it is no worse than in the committed results."""
    assert "unbuilt" not in record, record
    known = KNOWN.get(record["class"])
    if known is None:
        assert not table.problem(record)
        return
    assert table.problem(record) in ("", table.problem(known))
    for layout in table.LAYOUTS:
        if "free" in known[layout]:
            assert record[layout]["free"] >= known[layout]["free"], layout
            assert record[layout]["pruned_weights"] >= known[layout]["pruned_weights"], layout


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.slow
def test_sample(name):
    check(trial.trial(name, compiled=False))


@pytest.mark.soak
@pytest.mark.slow
def test_every_class_is_compiled_saved_and_reloaded(soak):
    worker, failed = Worker(), {}
    for name in tiny.classes() if soak else ["LlamaForCausalLM"]:
        if not worker.usable:
            worker.end()
            worker = Worker()
        record = worker.attempt(name, True)
        if "unbuilt" not in record and (found := table.problem(record)):
            failed[name] = found
    worker.end()
    known = {name: REFUSED.get(name) or table.problem(KNOWN[name]) or "nothing" for name in failed}
    new = [f"{name}: {found}" for name, found in failed.items() if known[name] not in found]
    assert not new, "\n".join(new)


@pytest.mark.soak
@pytest.mark.slow
def test_every_class_is_compiled_by_the_default_or_refused(soak):
    """A model that permtriton cannot take is refused in a line; a failed check, or what others raise, is a bug."""
    few = {"refit_iterations": 2, "refit_exchanges": 1, "refit_metric_rounds": 1}
    failed = {}
    for name in tiny.classes() if soak else ["MobileBertModel", "XLMWithLMHeadModel"]:
        try:
            model = tiny.build(name)
            inputs = tiny.inputs(model, samples=4)
        except Exception:
            continue
        try:
            compile_model(model, None, config_from({"skip_indivisible": True, **few}), ids=inputs)
        except Exception as error:
            if isinstance(error, VerificationError) or not isinstance(error, PermTritonError):
                failed[name] = f"{type(error).__name__}: {error}"
    known = {name: REFUSED.get(name) or "nothing" for name in failed}
    assert not {name: found for name, found in failed.items() if known[name] not in found}


@pytest.mark.parametrize(
    "name", ["BltForCausalLM", "MusicgenForCausalLM", "FlavaModel", "UnlimitedOcrForConditionalGeneration"]
)
@pytest.mark.slow
def test_compiled_saved_and_reloaded(name):
    """Linears that are dense beside packed ones, several embeddings, none that the model names, masks under vmap."""
    check(trial.trial(name, compiled=True))


def test_a_wrong_plan_is_a_wrong_output(monkeypatch):
    def without_an_axis(*arguments):
        plan, graph = plan_model(*arguments)
        space = next(space for space in plan.spaces if not space.frozen)
        space.axes = space.axes[1:]
        return plan, graph

    plan_model = planning.plan_model
    monkeypatch.setattr(planning, "plan_model", without_an_axis)
    record = trial.trial("LlamaForCausalLM", compiled=False)
    assert table.problem(record).startswith("wrong output")
    assert not table.is_complete(record)


def test_a_crash_costs_one_class(monkeypatch):
    monkeypatch.setattr(trial, "trial", lambda *_: os._exit(3))
    worker = Worker()
    record = worker.attempt("LlamaForCausalLM", False)
    assert table.problem(record) == "crash: the process ended with code 3"
    assert not worker.usable


def test_the_results_are_of_these_classes():
    if table.load()[0]["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the results are of another version of transformers, which may have other classes")
    assert set(KNOWN) == set(tiny.classes())
