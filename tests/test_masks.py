"""Masks and orders of a compiled model and of its folders, and their picture in the report."""

import re

import pytest
import torch

import permtriton
from benchmarks import report_demo
from permtriton.checkpoint.export import export
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ConfigError
from permtriton.evaluation.report import report
from permtriton.evaluation.report_folders import mask_corners, read_folders
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.recipe import config_from

from . import zoo
from .kernel_inputs import TWO_FOUR

MAGNITUDE = {"importance": "magnitude", "recipe": "heuristic,mask"}


@pytest.fixture(scope="module", params=["portable", "fused"])
def made(request, tmp_path_factory):
    """A compiled model and its folders: dense, and packed."""
    free = {"o_proj": "free"} if request.param == "fused" else {}
    config = config_from({**MAGNITUDE, "layout": request.param, **free})
    compiled = compile_model(zoo.build("llama"), None, config, ids=zoo.token_ids())
    root = tmp_path_factory.mktemp("masks")
    export(compiled.save_pretrained(root / "dense"), root / "packed")
    return compiled, root / "dense", root / "packed"


def test_masks_by_magnitude_keep_the_largest_of_each_permuted_group(made):
    """In the dense order they are those of the dense weights, permuted, masked, and put back."""
    compiled, *folders = made
    model = zoo.build("llama")
    for masks in (compiled.masks, *map(permtriton.read_masks, folders)):
        assert set(masks.linears) == set(compiled.plan.patterns)
        for linear in masks.linears:
            index, dense = masks.permutation(linear), weight_in_out(linear_module(model, linear)).T
            expected = torch.empty_like(dense, dtype=torch.bool)
            expected[:, index] = top_n_mask(dense[:, index].abs().T, TWO_FOUR).T.bool()
            assert torch.equal(masks.mask(linear), expected), linear
            groups = masks.mask(linear, "saved").view(len(dense), -1, TWO_FOUR.group).sum(-1)
            assert (groups == TWO_FOUR.kept).all()
    assert any(compiled.permutation(linear).diff().ne(1).any() for linear in compiled.masks.linears)


def test_a_site_names_the_order_that_its_linears_share(made):
    compiled = made[0]
    site = compiled.plan.sites[0]
    assert torch.equal(compiled.permutation(site.name), compiled.permutation(site.linears[-1]))


@pytest.mark.slow
def test_experts_of_a_stack_have_masks(tmp_path):
    compiled = compile_model(zoo.build("mixtral"), None, config_from(MAGNITUDE), ids=zoo.token_ids())
    saved = permtriton.read_masks(compiled.save_pretrained(tmp_path / "out"))
    linear = next(name for name in saved.linears if ".experts." in name)
    assert torch.equal(saved.mask(linear), compiled.mask(linear))
    assert float(saved.mask(linear).float().mean()) == 0.5


def test_wrong_names_are_refused(made):
    compiled = made[0]
    for call in (compiled.mask, compiled.permutation):
        with pytest.raises(ConfigError, match=r"no pruned linear is called 'mlp'; the names are such as model\."):
            call("mlp")
    with pytest.raises(ConfigError, match="is a site: name one of its linears"):
        compiled.mask(compiled.plan.sites[0].name)
    with pytest.raises(ConfigError, match="order is 'new': expected dense or saved"):
        compiled.mask(compiled.masks.linears[0], "new")


def test_the_report_draws_the_masks(made, tmp_path):
    """Each folder's picture has a stroke for each run of kept weights; the linear is the last of the first layer."""
    _, *folders = made
    corners = mask_corners(read_folders(folders), None, size=16)
    assert [each.linear for each in corners] == ["model.layers.0.mlp.down_proj"] * 2
    assert torch.equal(corners[0].kept, corners[1].kept)
    assert corners[0].kept.shape == (16, 16)
    name = "model.layers.1.mlp.up_proj"
    page = report(folders, tmp_path / "report.html", masks=name).read_text()
    pictures = re.findall(rf'aria-label="Kept weights of {name} in \w+">(<svg.*?</svg>)', page)
    kept = permtriton.read_masks(folders[0]).mask(name)[:128, :128]
    drawn = sum(int(length) for length in re.findall(r"h(\d+)", pictures[0]))
    assert len(pictures) == 2
    assert drawn == int(kept.sum())
    with pytest.raises(ConfigError, match="no pruned linear is called 'lm_head'"):
        report(folders, tmp_path / "no.html", masks="lm_head")
    assert not (tmp_path / "no.html").exists()


def test_the_report_of_the_demo_has_the_masks_of_the_papers_methods():
    """Each keeps about half of its corner; without a permutation, half of each group."""
    corners = {corner.label: corner.kept for corner in report_demo.mask_corners(report_demo.RESULTS)}
    assert list(corners) == ["Wanda", "Wanda + CP", "Wanda + PermLLM", "RIA", "RIA + CP", "RIA + PermLLM"]
    for name, kept in corners.items():
        groups = kept.view(128, -1, TWO_FOUR.group).sum(-1)
        assert bool((groups == TWO_FOUR.kept).all()) == (name in ("Wanda", "RIA")), name
        assert 0.4 < kept.float().mean() < 0.6
