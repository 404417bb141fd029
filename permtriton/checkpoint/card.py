"""The model card of an output folder: ``README.md``, which describes a published model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCardData
from transformers.models.auto import modeling_auto as auto

from permtriton.checkpoint.folder import file_sha256
from permtriton.checkpoint.formats import IN_8_BITS, PACKED
from permtriton.checkpoint.read_record import described_sparsity
from permtriton.model.gguf_file import in_words
from permtriton.model.headers import CONFIG_FILE, REPORT_FILE, read_json
from permtriton.model.name import is_hub_name, shown_name
from permtriton.util.extras import HOME, WHERE, install_command
from permtriton.util.output_files import to_json

CARD_FILE = "README.md"
PROJECT = f"[permtriton]({HOME})" if HOME else "permtriton"
ALONE, WITH_PERMTRITON = "transformers alone", "transformers after import permtriton"  # what loads a folder
WITH_COMPRESSED_TENSORS = "vLLM alone, and transformers where compressed-tensors is installed"
# Model classes of transformers, the class that loads them, and the hub's name of their task. The first entry with a
# class counts, because models that read sound or images are in several. The hub has no separate task for T5 and BART.
_KINDS = (
    (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, "AutoModelForImageTextToText", "image-text-to-text"),
    (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM", "text-generation"),
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM", "text-generation"),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM", "fill-mask"),
    (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "AutoModelForSequenceClassification", "text-classification"),
    (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "AutoModelForTokenClassification", "token-classification"),
    (auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, "AutoModelForQuestionAnswering", "question-answering"),
    (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "AutoModelForImageClassification", "image-classification"),
    (auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, "AutoModelForAudioClassification", "audio-classification"),
    (auto.MODEL_FOR_CTC_MAPPING_NAMES, "AutoModelForCTC", "automatic-speech-recognition"),
)


def write_record(folder: Path, record: Mapping[str, Any], loads_with: str, name: str) -> Any:
    """Writes ``permtriton.json``, and the model card unless the folder has a README.md that somebody else wrote.

    The record's entry ``card`` is the hash of the README.md that permtriton wrote, which may be replaced. In the record
    that is written and returned it is the hash of the new card, or None if another README.md stayed.
    """
    card, written = folder / CARD_FILE, {**record, "card": None}
    if not card.exists() or file_sha256(card) == record.get("card"):
        config = read_json(folder / CONFIG_FILE)
        architecture = str((config.get("architectures") or [""])[0])
        auto_map = {} if hasattr(transformers, architecture) else config.get("auto_map") or {}
        custom = next((loader for loader, code in auto_map.items() if str(code).endswith(f".{architecture}")), None)
        card.write_bytes(model_card(record, architecture, loads_with, name, custom).encode("utf-8", "replace"))
        written["card"] = file_sha256(card)
    (folder / REPORT_FILE).write_text(to_json(written) + "\n", encoding="utf-8")
    return written


def model_card(
    report: Mapping[str, Any], architecture: str, loads_with: str, name: str, custom: str | None = None
) -> str:
    """Returns a model card in Markdown, with front matter for the Hugging Face hub.

    Args:
        report: content of ``permtriton.json``.
        architecture: class of the model.
        loads_with: what loads the folder, such as `ALONE`.
        name: folder that the model is loaded from.
        custom: class of transformers that loads a model that comes with its own code; None for other models.
    """
    source, sparsity = str(report["model"]), str(report["config"]["sparsity"])
    kept, group = sparsity.split(":")
    on_hub = report.get("on_hub", is_hub_name(source))
    title = shown_name(source, on_hub)
    no_kind = (architecture if hasattr(transformers, architecture) else custom or "AutoModel", None)
    loader, task = next(((by, task) for names, by, task in _KINDS if architecture in names.values()), no_kind)
    call = f"from_pretrained({json.dumps(name)}{', trust_remote_code=True' if custom else ''})"
    evaluated = _results(report, task)
    front = ModelCardData(
        library_name="transformers",
        base_model=source if on_hub else None,
        # The hub knows adapter, merge, quantized and finetune. A pruned model is closest to quantized, the same model
        # compressed; the hub lists it under that heading on the page of the dense model.
        base_model_relation="quantized" if on_hub else None,
        model_name=f"{title} {sparsity}" if evaluated else None,
        eval_results=evaluated or None,
        pipeline_tag=task,
        tags=["permtriton", "sparse", sparsity],
    )
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {_code(title)}, pruned to {described_sparsity(report)}",
        f"Of every {group} consecutive weights of a row, {kept} are kept in the pruned linears"
        f"{' without a pattern of their own' * ('patterns' in report)}. Made with {PROJECT} "
        f"(`{install_command()}`{WHERE}), which chooses the order of channels so that pruning hurts less.",
        "## Result",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_code(value)} |" for name, value in facts(report))]),
        "## Load it",
        _loading(report, loader, loads_with, call),
        "## What was verified",
        "\n".join(f"- {name}: {result}" for name, result in checks(report)),
        "## Repeat it",
        *["This command pruned the model; how it was trained afterwards is not recorded."] * ("trained" in report),
        f"```\n{report['command']}\n```",
        "All options, every permutation and all checks: see `permtriton.json`. Plots: `permtriton report FOLDER`.",
    ]
    return "\n\n".join(parts) + "\n"


def _results(report: Mapping[str, Any], task: str | None) -> list[EvalResult]:
    """Returns the entries of the card's ``model-index``; none if weights were not evaluated, or rounded later."""
    evaluation = report["evaluation"]
    if "dense" not in evaluation or _has_8_bits(report):
        return []
    text = Path(evaluation.get("text", "held-out text")).name
    return [
        EvalResult(
            task_type=task or "feature-extraction",
            dataset_type=text,
            dataset_name=text,
            metric_type=evaluation["measure"],
            metric_value=evaluation["compiled"],
        )
    ]


def facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each row of a table about a compilation, from its record."""
    config, evaluation = report["config"], report["evaluation"]
    if "dense" in evaluation:
        if "text" in evaluation:
            shape = ", {} windows of {}".format(*evaluation["windows"]) if "windows" in evaluation else ""
            around = f", {evaluation['special_tokens']}" if "special_tokens" in evaluation else ""
            yield "held-out text", Path(evaluation["text"]).name + shape + around
        name = "perplexity" if evaluation["measure"] == "perplexity" else "cosine with the dense model"
        yield f"{name}, dense model", f"{evaluation['dense']:.3f}"
        when = "pruned, in its original dtype" if _has_8_bits(report) else "this model"
        yield f"{name}, {when}", f"{evaluation['compiled']:.3f}"
    else:
        yield "held-out evaluation", "not measured"
    yield "model", shown_name(report["model"], report.get("on_hub"))
    if "gguf" in report:
        yield "weights, dequantized from GGUF", f"{report['gguf']['file']}: {in_words(report['gguf']['tensors'])}"
    yield "pattern", described_sparsity(report)
    for key in ("recipe", "importance", "layout", "seed"):
        yield key, str(config[key])
    yield "calibration", f"{Path(str(config['calibration'])).name}, {_sizes(report['calibration'])}"
    if report["generated"]:
        yield "text that the dense model wrote", _sizes(report["generated"])
    pruned, total = report["pruned_parameters"], report["parameters"]
    yield "parameters pruned", f"{pruned:,} of {total:,} ({pruned / total:.1%})"
    if "trained" in report:
        yield "trained after pruning", "with its zeros kept"
    if "export" in report:
        yield "stored", f"{report['export']['format']}, the pruned weights at {report['export']['ratio']:.1%} of dense"
    yield "dtype", report["dtype"]
    yield "device", report["device"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def _sizes(samples: Mapping[str, Any]) -> str:
    return f"{' x '.join(str(size) for size in samples['shape'])} {samples.get('unit', 'tokens')}" + (
        f", {samples['special_tokens']}" if "special_tokens" in samples else ""
    )


def _has_8_bits(report: Mapping[str, Any]) -> bool:
    return report.get("export", {}).get("format") in IN_8_BITS


def _loading(report: Mapping[str, Any], loader: str, loads_with: str, call: str) -> str:
    lines = [f"from transformers import {loader}", "", f"model = {loader}.{call}"]
    zeros = "It stores its zeros and multiplies them, too."
    if loads_with == ALONE:
        text = f"`transformers` alone loads it. {zeros}"
    elif loads_with == WITH_COMPRESSED_TENSORS:
        text = f"vLLM loads it by itself, and `transformers` after `pip install compressed-tensors`. {zeros}"
    else:
        lines.insert(0, "import permtriton")
        packed = "export" in report and report["export"]["format"] in PACKED
        reasons = ["its weights are packed"] * packed
        reasons += ["it permutes channels at run time"] * (not packed or report["config"]["layout"] == "fused")
        text = (
            f"It needs permtriton (`{install_command()}`{WHERE}), because {' and '.join(reasons)}: it loads after "
            "`import permtriton`."
        )
    return "\n".join([text, "", "```python", *lines, "```"])


def checks(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    proof, verification = report["proof"], report["verification"]
    when = ", before the export" if "export" in report else ""
    yield (
        "permuted against dense, before pruning",
        f"same outputs up to rounding (largest relative difference {proof['fold_difference']:.1e})",
    )
    yield "pruned against the graph", proof["lowered_graph"]
    weights = f"{verification['pruned_weights']}, each N:M and equal to the model in memory, bit for bit"
    yield f"pruned weights read back{when}", weights
    yield f"reloaded with transformers{when}", verification["reloaded"]
    if "export" in report:
        rounded = "N:M still in 8 bits; what is not rounded is the same bit for bit"
        yield "export", rounded if _has_8_bits(report) else "the same bit for bit"


def _code(text: object) -> str:
    """Returns text from a file as Markdown code, in which nothing is markup."""
    shown = (letter if letter.isprintable() and letter not in "`|" else "?" for letter in str(text))
    return f"`{''.join(shown)}`"
