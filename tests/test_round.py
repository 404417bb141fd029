"""Step round: weights on the grid of FP8, with errors that make up for each other."""

import json

import pytest
import torch
from safetensors.torch import load_file

import permtriton
from permtriton.checkpoint.export import export
from permtriton.checkpoint.folder import Folder
from permtriton.errors import ConfigError
from permtriton.kernels.quantize import FLOAT8, round_to_fp8, short_scales
from permtriton.methods.prune.least_squares import row_errors
from permtriton.methods.train.round import rounded

from . import folders, zoo
from .folders import LAST_UP, WEIGHTS
from .kernel_inputs import rng

GRID = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


@pytest.fixture(scope="module")
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """A 2:4 weight with a row of zeros, and the Hessian of inputs that are not independent, one of them always 0."""
    weight = torch.randn(24, 40, generator=rng(0)) * torch.rand(24, 1, generator=rng(1)).exp()
    folders.prune_weight(weight)
    weight[5] = 0
    x = torch.randn(200, 40, generator=rng(2)) @ torch.randn(40, 40, generator=rng(3)) + 2
    x[:, 7] = 0
    hessian = x.T @ x
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    return weight, hessian


def test_a_short_scale_has_exact_products_and_is_found_again():
    weight = torch.randn(32, 64, generator=rng(0)) * torch.logspace(-6, 3, 32).unsqueeze(1)
    largest = weight.abs().amax(1, keepdim=True)
    scales = short_scales(largest)
    assert torch.stack(scales).sort(0).values.div(torch.stack(scales).amin(0)).max() < 2
    for scale in scales:
        assert ((largest / scale > 223.9) & (largest / scale <= 448)).all()
        on_grid = (weight / scale).to(FLOAT8).float() * scale + 0.0
        assert torch.equal(on_grid.bfloat16().float(), on_grid)
        for dtype in (torch.float32, torch.bfloat16):
            stored, found = round_to_fp8(on_grid.to(dtype))
            assert torch.equal(stored.to(dtype) * found, on_grid.to(dtype))


@pytest.mark.parametrize("sweeps", [0, 1, 4])
def test_zeros_stay_and_the_errors_fall(problem, sweeps):
    weight, hessian = problem
    found = rounded(weight, hessian, sweeps)
    assert not found[weight == 0].any()
    assert not found[found == 0].signbit().any()
    stored, scale = round_to_fp8(found)
    assert torch.equal(stored.float() * scale, found)
    plain, scale = round_to_fp8(weight)
    errors = row_errors(found, weight, hessian)
    before = row_errors(rounded(weight, hessian, sweeps - 1) if sweeps else plain.float() * scale, weight, hessian)
    assert errors.sum() < before.sum() * (0.9 if sweeps < 2 else 1.0001)
    assert not sweeps or (errors <= before * 1.0001).all()


def test_in_the_end_no_single_weight_can_be_better(problem):
    """By trying every number of the grid for each kept weight."""
    weight, hessian = problem
    found = rounded(weight, hessian, 30)
    # The scale as it was chosen, which every number of a row is a multiple of.
    _, scale = round_to_fp8(rounded(weight, hessian, 0))
    errors = row_errors(found, weight, hessian)
    for row, column in (weight != 0).nonzero().tolist()[::7]:
        tried = found[row].repeat(256, 1)
        tried[:, column] = GRID * scale[row]
        tried = tried[GRID.isfinite()]
        assert row_errors(tried, weight[row], hessian).min() >= errors[row] * (1 - 1e-4)


def test_a_recipe_that_is_saved_in_8_bits_rounds_last_and_the_export_changes_nothing(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    ids, out = zoo.token_ids(), tmp_path / "out"
    options = {"data": ids, "samples": 4, "sequence_length": 16, "distill_steps": 1}
    compiled = permtriton.compile(tmp_path / "dense", output=out, save_format="packed-fp8", **options)
    assert compiled.config.recipe == "heuristic,refit,distill,round"
    assert "--save-format packed-fp8" in compiled.report["command"]
    assert "--recipe" not in compiled.report["command"]
    step = compiled.report["steps"][-1]
    assert (step["name"], len(step["parts"])) == ("round", 14)
    assert sum(part["end"] for part in step["parts"]) < 0.7 * sum(part["start"] for part in step["parts"])
    weight = compiled.model.get_parameter(LAST_UP)
    assert torch.equal(Folder(out).tensor(LAST_UP), weight)
    assert compiled.report["export"]["rounded"] == 0
    compiled.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "fp8", "fp8")
    stored = load_file(tmp_path / "fp8" / WEIGHTS)
    assert torch.equal(stored[LAST_UP].float() * stored[f"{LAST_UP}_scale"], weight)


def test_a_finished_folder_is_rounded_plainly_and_told_of_the_step(tmp_path):
    folders.save(folders.model_of("llama", dtype=torch.bfloat16), tmp_path / "saved")
    for format in ("fp8", "packed-fp8"):
        assert export(tmp_path / "saved", tmp_path / format, format)["rounded"] == 14


def test_experts_are_left_as_they_are(tmp_path):
    zoo.build("mixtral").save_pretrained(tmp_path / "dense")
    compiled = permtriton.compile(tmp_path / "dense", recipe="mask,round", data=zoo.token_ids())
    step = compiled.report["steps"][-1]
    assert {part["name"].split(".")[-1] for part in step["parts"]} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all("experts" in name for name in step["left"])


def test_nothing_follows_it():
    with pytest.raises(ConfigError, match="distill cannot follow round"):
        permtriton.config_from(recipe="mask,round,distill")
    assert permtriton.config_from(recipe="mask,round", options={"round_sweeps": 0}).steps[-1].sweeps == 0


def test_a_listed_recipe_is_taken_as_it_is(tmp_path):
    """Its weights are rounded by the export, each alone."""
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    out = tmp_path / "out"
    permtriton.compile(tmp_path / "dense", recipe="mask", data=zoo.token_ids(), output=out, save_format="packed-fp8")
    record = json.loads((out / "permtriton.json").read_text())
    assert [step["name"] for step in record["steps"]] == ["mask"]
    assert record["export"]["rounded"] == 14
