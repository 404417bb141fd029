"""The HTML report: its masks are those of the dense model's order, its text is escaped, and it loads nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import permtriton
from permtriton.checkpoint.export import export
from permtriton.checkpoint.read_record import read_record
from permtriton.cli.main import app
from permtriton.driver.pipeline import compile_model
from permtriton.errors import ModelError
from permtriton.evaluation.report import html, page_of, report
from permtriton.evaluation.report_folders import read_folders
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.passes.plan import linear_module, weight_in_out
from permtriton.recipe import config_from

from . import zoo
from .desk import RUNNER, check_refusal
from .folders import record
from .kernel_inputs import TWO_FOUR

MAGNITUDE = {"importance": "magnitude", "recipe": "heuristic,mask"}
LEARNED = {
    "recipe": "learned,mask",
    "learn_epochs": 2,
    "learn_batch_size": 4,
    "learn_learning_rate": 0.1,
    "learn_block_size": 16,
}


def compiled(**options: object) -> permtriton.CompiledModel:
    return compile_model(zoo.build("llama"), None, config_from(options), ids=zoo.token_ids())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Compiled folders of the same model; do not write into them."""
    root = tmp_path_factory.mktemp("report")
    options = {
        "wanda": {"recipe": "mask", "importance": "wanda"},
        "learned": LEARNED,
        "portable": MAGNITUDE,
        "fused": {**MAGNITUDE, "layout": "fused", "o_proj": "free"},
    }
    made = {name: compiled(**each).save_pretrained(root / name) for name, each in options.items()}
    for name in ("portable", "fused"):
        export(made[name], root / f"{name}-packed")
        made[f"{name}-packed"] = root / f"{name}-packed"
    return made


def changed(folder: Path, place: Path, change) -> Path:
    """A copy of a folder whose record ``change`` has edited."""
    shutil.copytree(folder, place)
    record = json.loads((place / "permtriton.json").read_text())
    change(record)
    (place / "permtriton.json").write_text(json.dumps(record))
    return place


def page(folders: list[Path], output: Path, **options: object) -> str:
    return report(folders, output, **options).read_text(encoding="utf-8")


def test_retained_importance_is_what_the_masks_keep(folders):
    """By magnitude, the share of the compiled weights in the dense ones."""
    model = zoo.build("llama")
    record = json.loads((folders["portable"] / "permtriton.json").read_text())
    (folder,) = read_folders([folders["portable"]])
    shares = record["retained_importance"]
    assert set(shares) == set(record["sparsity_by_layer"])
    for site in folder.record["sites"]:
        for linear in site["linears"]:
            scores = weight_in_out(linear_module(model, linear)).abs()
            for key, index in (("before", torch.arange(site["channels"])), ("after", torch.tensor(site["index"]))):
                kept = top_n_mask(scores[index], TWO_FOUR).bool()
                share = float(scores[index][kept].sum() / scores.sum())
                assert shares[linear][key] == pytest.approx(share, rel=1e-5)
    wanda = json.loads((folders["wanda"] / "permtriton.json").read_text())["retained_importance"]
    assert all(0.5 < entry["before"] == entry["after"] < 1 for entry in wanda.values())


def loaded(text: str) -> list[str]:
    """What a browser could load."""
    return re.findall(r'(?:src|href|data)="([^"]*)"|url\((?!#)|@import', text)


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory) -> str:
    """A page with everything on it."""
    place = tmp_path_factory.mktemp("page")
    row = {"setting": "", "kl": 0.25, "cosine": 0.75, "tasks": {"foxes acc": 0.5}, "seconds": 9.0, "by_seed": []}
    row |= {"compile_seconds": 7.0}
    compared = {
        "model": "zoo", "measure": "perplexity", "text": "foxes", "tokens": 64, "window": 16, "seeds": [0, 1],
        "patterns": ["2:4"], "ablation": None, "config": {}, "versions": {}, "device": "cpu", "system": "Linux",
        "rows": [
            {"method": "dense", "pattern": "", "values": [10.0], "mean": 10.0, "spread": 0.0, **row},
            {"method": "wanda", "pattern": "2:4", "values": [15.0, 15.378], "mean": 15.189, "spread": 0.1696, **row},
        ],
    }  # fmt: skip
    (place / "c.json").write_text(json.dumps(compared))
    chosen = [folders[name] for name in ("wanda", "learned", "fused-packed")]
    return page(chosen, place / "report.html", comparison=place / "c.json")


def test_the_page_loads_nothing_and_follows_the_colours_of_its_reader(whole):
    assert [target for target in loaded(whole) if not re.match(r"#|data:", target)] == []
    assert "<script" not in whole
    anchors = re.findall(r' id="([^"]*)"', whole)
    assert len(set(anchors)) == len(anchors)
    assert whole.count('role="img"') == whole.count("<svg") == 5
    assert re.findall(r'(?:fill|stroke)="#', whole) == [], "a colour that does not follow the scheme"


def test_every_section_says_what_was_recorded(folders, whole):
    record = json.loads((folders["learned"] / "permtriton.json").read_text())
    parts = dict(re.findall(r'<section id="(\w+)".*?>(.*?)</section>', whole, re.DOTALL))
    for word in ("15.19", "0.170", "±"):
        assert word in parts["result"]
    assert parts["result"].count(" *</td>") == 2, "the packed folder has its size on disk"
    learned = record["steps"][0]
    losses = [epoch["loss"] for epoch in learned["history"]]
    assert f"from {losses[0]:.4f} to {losses[-1]:.4f} in 2 epochs" in parts["search"]
    assert parts["importance"].count("<svg") == 1


def test_text_from_files_is_text(folders, tmp_path):
    evil = "</title><script>alert('$x^2$')</script>\x00\ud800"

    def change(record):
        record.update(model=evil, command=evil, device=evil, barriers=[evil])
        record["skipped"] = {evil: evil}
        record["evaluation"] = {"measure": evil, "text": evil, "dense": 1.0, "compiled": 2.0}
        record["permutations"][0].update(name=evil, reason=evil)
        record["retained_importance"] = {evil: {"before": 0.5, "after": 0.75}}

    text = page([changed(folders["learned"], tmp_path / "evil", change)], tmp_path / "out.html")
    assert "<script" not in text
    assert "&lt;script&gt;alert(" in text


def test_the_first_sentence_is_the_verdict(folders):
    def of(*numbers: tuple[float, float], measure: str = "perplexity") -> str:
        found = read_folders([folders["portable"], folders["wanda"]][: len(numbers)])
        for folder, (dense, compiled) in zip(found, numbers, strict=True):
            folder.record["evaluation"] = {"measure": measure, "dense": dense, "compiled": compiled}
        return page_of(found, None).lead

    assert of((10.0, 12.5)).startswith("The perplexity of MODEL on the held-out text goes from 10.00 to 12.50 (+25.0%)")
    assert "when it is pruned as in portable. Of every 4" in of((10.0, 12.5))
    assert "as in wanda, the best of the 2 folders here. Of every" in of((10.0, 12.5), (10.0, 12.0))
    assert "pruned as in portable, the best" in of((1.0, 0.9), (1.0, 0.8), measure="cosine")
    assert "was not measured" in page_of(read_folders([folders["portable"]]), None).lead


def test_numbers_of_different_texts_are_not_compared(folders):
    found = read_folders([folders["portable"], folders["wanda"]])
    for folder, dense, text in zip(found, (5.5, 4.0), ("wikitext2", "mine.txt"), strict=True):
        folder.record["evaluation"] = {"measure": "perplexity", "dense": dense, "compiled": 9.0, "text": text}
    page = page_of(found, None)
    assert "best" not in page.lead
    assert "do not compare" in page.lead
    assert page.warning == "The folders were measured on different texts, or in different ways."
    assert f"{page.warning} Their numbers do not compare." in html(page)


def test_folders_are_told_apart(folders, tmp_path):
    same = read_folders([folders["portable"], folders["portable-packed"]])
    assert [folder.label for folder in same] == ["portable", "portable-packed"]
    places = [tmp_path / "first" / "out", tmp_path / "second" / "out"]
    for place in places:
        changed(folders["portable"], place, lambda record: None)
    compared = read_folders(places)
    assert [folder.label for folder in compared] == ["first/out", "second/out"]
    assert all(cell in str(page_of(compared, None)) for cell in ("first/out", "second/out"))
    other = changed(folders["portable"], tmp_path / "other", lambda record: record.update(model="org/other"))
    assert page_of(read_folders([folders["portable"], other]), None).warning.startswith(
        "The folders come from different models"
    )


# -- what is refused -----------------------------------------------------------------------------------------------


DAMAGE = {
    "no record": (lambda path: path.unlink(), "not written by permtriton"),
    "no JSON": (lambda path: path.write_text("{"), "cannot be read as JSON"),
    "nothing in it": (lambda path: path.write_text("{}"), "model is missing"),
    "a site": (lambda path: edit(path, lambda r: r["sites"][1].pop("linears")), "sites[1].linears is missing"),
    "weights": (lambda path: (path.parent / "model.safetensors").write_bytes(b"x" * 99), "damaged or truncated"),
}


def edit(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders_are_one_line(folders, tmp_path, case):
    folder = shutil.copytree(folders["portable"], tmp_path / "damaged")
    damage, words = DAMAGE[case]
    damage(folder / "permtriton.json")
    result = RUNNER.invoke(app, ["report", str(folder), "--output", str(tmp_path / "out.html")])
    check_refusal(result.exit_code, result.stderr, (words, str(folder)))
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"sites": {}}, "sites is {}"),
        ({"config": {"sparsity": "4:2"}}, "config.sparsity is '4:2', expected a pattern such as 2:4"),
        ({"rows": [{"linears": [], "index": [0, 0]}]}, r"rows\[0\].index is \[0, 0\], expected a permutation"),
    ],
)
def test_records_of_another_form_are_refused(tmp_path, entries, words):
    (tmp_path / "permtriton.json").write_text(json.dumps(record(pruned_weights={"a": 1}, **entries)))
    with pytest.raises(ModelError, match=f"permtriton.json: {words}"):
        read_record(tmp_path)
