"""Samples: rows of every tensor, cut short where they are text, one hash for all."""

import pytest
import torch

from permtriton.data.samples import Samples
from permtriton.errors import CalibrationError

from . import zoo

IDS = zoo.token_ids(5, 7)
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
IMAGES = {"pixel_values": torch.randn(5, 3, 4, 4)}


@pytest.mark.parametrize("inputs", [IDS, PAIR, IMAGES], ids=["ids", "pair", "images"])
def test_rows_of_every_tensor(inputs):
    samples, rows = Samples.of(inputs), torch.tensor([3, 1])
    tensors = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    assert len(samples) == 5
    assert all(torch.equal(samples[rows].inputs[name], tensor[rows]) for name, tensor in tensors.items())
    assert all(torch.equal(samples[1:3].inputs[name], tensor[1:3]) for name, tensor in tensors.items())
    assert [len(part) for part in samples.split(2)] == [2, 2, 1]
    joined = {name: torch.cat([part.inputs[name] for part in samples.split(2)]) for name in tensors}
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())


def test_only_text_is_cut_short():
    assert Samples.of(IDS).start(2, 5).inputs["input_ids"].tolist() == IDS[:2, [0, 1, 2, -2, -1]].tolist()
    assert Samples.of(IMAGES).start(2, 3).inputs["pixel_values"].shape == (2, 3, 4, 4)
    assert Samples({**IMAGES, "input_ids": IDS}).start(1, 3).inputs["input_ids"].shape == (1, 7)


def test_only_floats_change_their_dtype():
    moved = Samples({**IMAGES, "input_ids": IDS}).to("cpu", torch.bfloat16).inputs
    assert {name: tensor.dtype for name, tensor in moved.items()} == {
        "pixel_values": torch.bfloat16, "input_ids": torch.int64,
    }  # fmt: skip


def test_every_tensor_counts_in_the_hash():
    changed = {**PAIR, "decoder_input_ids": PAIR["decoder_input_ids"] + 1}
    others = [IDS, PAIR, changed, IMAGES, {"pixel_values": IMAGES["pixel_values"] + 1}, {"other": IDS}]
    assert len({Samples.of(each).sha256 for each in others}) == len(others)
    assert Samples.of(dict(reversed(PAIR.items()))).sha256 == Samples.of(PAIR).sha256


@pytest.mark.parametrize(
    "inputs",
    [{}, {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}, {"a": torch.zeros(0, 3)}, {"a": torch.tensor(1.0)}],
    ids=["nothing", "different counts", "no sample", "a scalar"],
)
def test_what_are_no_samples(inputs):
    with pytest.raises(CalibrationError, match="one row per sample"):
        Samples.of(inputs)
