"""A folder that says that it is N:M and is not is named, whoever changed it."""

import pytest
import torch

import permtriton
from permtriton.checkpoint.export import export

from . import folders, zoo
from .folders import LAST_UP

IDS = zoo.token_ids()


def said(folder) -> str:
    events = []
    permtriton.evaluate(folder, IDS, progress=events.append)
    return " ".join(event.text for event in events if event.text)


@pytest.fixture
def folder(tmp_path):
    return folders.save(folders.model_of("llama"), tmp_path / "saved")


def test_a_pattern_that_was_lost_is_named(folder, tmp_path):
    assert "warning" not in said(folder)
    folders.change_tensor(LAST_UP, lambda weight: weight + 0.01)(folder)  # as a quantizer that fills zeros
    text = said(folder)
    assert f"warning: 1 of 14 weights that permtriton.json lists as 2:4 are not ({LAST_UP})" in text
    assert "GPTQ" in text
    with pytest.raises(permtriton.PermTritonError, match=LAST_UP):
        export(folder, tmp_path / "out", "fp8")


def test_every_format_is_taken_for_what_it_is(folder, tmp_path):
    for format in ("packed", "fp8"):
        export(folder, tmp_path / format, format)
        assert "warning" not in said(tmp_path / format)
    fused = folders.save(folders.model_of("llama", fused=True), tmp_path / "fused")
    assert "warning" not in said(fused)
    mixture = folders.save(folders.model_of("mixtral"), tmp_path / "mixture")
    assert "warning" not in said(mixture)


def test_patterns_of_their_own_count(folder):
    folders.change_tensor(LAST_UP, lambda weight: torch.where(torch.arange(64) % 8 < 4, 1.0, 0.0) * (weight * 0 + 1))(
        folder
    )
    assert "warning" in said(folder)
    folders.edit_json(folder / "permtriton.json", lambda content: content.update(patterns={LAST_UP: "4:8"}))
    assert "warning" not in said(folder)


def test_a_dimension_that_a_weight_does_not_have_is_refused(folder):
    folders.edit_json(folder / "permtriton.json", lambda content: content["pruned_weights"].update({LAST_UP: 7}))
    with pytest.raises(permtriton.PermTritonError, match=f"{LAST_UP} as pruned to 2:4 along dimension 7"):
        said(folder)
