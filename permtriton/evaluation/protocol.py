"""Protocols: the samples, windows and tasks of a publication, chosen by one word."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from permtriton.errors import ConfigError, shown
from permtriton.model.name import DEMO


@dataclass(frozen=True)
class Protocol:
    """The values that a protocol sets, and None where it sets none; values of the user take precedence."""

    options: Mapping[str, Any] = field(default_factory=dict)  # options of a compilation
    eval_data: str | None = None  # held-out text
    window: int | None = None  # tokens per window of the held-out text
    tasks: tuple[str, ...] | None = None  # zero-shot tasks, by lm-eval's names


AS_PUBLISHED = {"one_document": True, "special_tokens": "none"}
PROTOCOLS = {
    # As in the code of SparseGPT and Wanda; the tasks are those of Wanda's table, which reports their `acc`.
    "wanda": Protocol(
        {"calibration": "c4", "samples": 128, "sequence_length": 2048, **AS_PUBLISHED},
        "wikitext2",
        2048,
        ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"),
    ),
    # As in PermLLM; its code draws each sequence from one document, as Wanda's does.
    "permllm": Protocol(
        {"calibration": "c4", "samples": 128, "sequence_length": 1024, **AS_PUBLISHED},
        "wikitext2",
        2048,
        ("hellaswag", "arc_easy", "arc_challenge", "openbookqa", "rte"),
    ),
}
ON_DEMO = Protocol(eval_data=DEMO)  # the demo model was trained on no other text, and has small sizes of its own


def protocol_of(name: str | None, model: str = "") -> Protocol:
    """Returns the protocol ``name``: `ON_DEMO` for the model ``demo``, and one that sets nothing for None."""
    if name is None:
        return Protocol()
    if name not in PROTOCOLS:
        raise ConfigError(f"protocol {shown(name)} is unknown: choose {' or '.join(PROTOCOLS)}, or leave it out")
    return ON_DEMO if model == DEMO else PROTOCOLS[name]
