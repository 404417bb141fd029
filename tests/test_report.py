"""The HTML report: its masks are those of the dense model's order, its text is escaped, and it loads nothing."""

import copy
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import permtriton
from permtriton.checkpoint.export import export
from permtriton.checkpoint.forms import read_comparison, read_record
from permtriton.cli.main import app
from permtriton.compiler import compile_model
from permtriton.data.samples import Samples
from permtriton.errors import ModelError
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.statistics import site_statistics
from permtriton.model.plan import linear_module, weight_in_out
from permtriton.progress import NoProgress
from permtriton.recipe import config_from
from permtriton.reporting import sections
from permtriton.reporting.compiled import layer_of, method_of, read_folders
from permtriton.reporting.html_report import page_of, report
from permtriton.reporting.masks import corner, pictured_linears
from permtriton.reporting.pages import Part

from . import zoo
from .desk import RUNNER, check_refusal
from .folders import record
from .kernel_inputs import TWO_FOUR

MAGNITUDE = {"importance": "magnitude", "recipe": "heuristic,mask", "heuristic_row_weights": "none"}
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


# -- masks ---------------------------------------------------------------------------------------------------------


def masked(scores: Tensor, index: Tensor) -> Tensor:
    """The mask of scores ``[C, O]`` that are pruned in the order of ``index``, in the original order, ``[O, C]``."""
    return top_n_mask(scores[index], TWO_FOUR)[index.argsort()].T.bool()


def test_without_a_permutation_the_corner_is_the_mask_of_the_dense_weights(folders):
    model, plan = zoo.planned("llama")
    statistics = site_statistics(model, plan, "wanda", Samples.of(zoo.token_ids()), 4, NoProgress())
    (folder,) = read_folders([folders["wanda"]])
    for site, name in plan.linears():
        scores = weight_in_out(linear_module(model, name)).abs() * statistics[site.name][:, None]
        assert torch.equal(corner(folder, name, 48), masked(scores, torch.arange(site.channels))[:48, :48])


@pytest.mark.parametrize("name", ["portable", "fused", "portable-packed", "fused-packed"])
def test_permuted_corners_are_undone(folders, name):
    """By magnitude the rows of a mask do not depend on each other: it follows from the dense weight and the site."""
    check_corners(folders[name], zoo.build("llama"))


@pytest.mark.parametrize(("name", "layers"), [("gpt2", "n_layer"), ("phi3", "num_hidden_layers")])
def test_transposed_and_joined_weights_are_undone(name, layers, tmp_path):
    dense = zoo.build(name, **{layers: 1})
    config = config_from(MAGNITUDE)
    folder = compile_model(copy.deepcopy(dense), None, config, ids=zoo.token_ids(2, 16)).save_pretrained(
        tmp_path / "out"
    )
    check_corners(folder, dense)
    export(folder, tmp_path / "packed")
    check_corners(tmp_path / "packed", dense)


def check_corners(path: Path, model: PreTrainedModel) -> None:
    (folder,) = read_folders([path])
    rows = {linear for entry in folder.record["rows"] for linear in entry["linears"]}
    assert rows, "no test of rows"
    for site in folder.record["sites"]:
        for linear in site["linears"]:
            weight = weight_in_out(linear_module(model, linear))
            expected = masked(weight.abs(), torch.tensor(site["index"]))
            assert torch.equal(corner(folder, linear, 40), expected[:40, :40]), linear


def test_one_linear_of_each_kind_is_drawn_from_first_to_last_layer(folders):
    chosen = pictured_linears(read_folders([folders["wanda"], folders["fused-packed"]]))
    assert [name.rpartition(".")[2] for name in chosen] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert [layer_of(name) for name in chosen][:: len(chosen) - 1] == [0, 1]


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
                share = float(scores.T[masked(scores, index)].sum() / scores.sum())
                assert shares[linear][key] == pytest.approx(share, rel=1e-5)
    wanda = json.loads((folders["wanda"] / "permtriton.json").read_text())["retained_importance"]
    assert all(0.5 < entry["before"] == entry["after"] < 1 for entry in wanda.values())


# -- the page ------------------------------------------------------------------------------------------------------


VOID = {"meta", "link"}


class Tags(HTMLParser):
    """Checks that tags are balanced, and keeps what a browser could load."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.loads, self.identifiers, self.tags = [], [], [], []

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.identifiers += [value for key, value in attributes if key == "id"]
        self.loads += [value for key, value in attributes if key in ("src", "href", "xlink:href", "data")]

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory) -> str:
    """A page with everything on it."""
    chosen = [folders[name] for name in ("wanda", "learned", "fused-packed")]
    place = tmp_path_factory.mktemp("page")
    rows = [row("dense"), row("wanda", "2:4", 15.189, values=[15.0, 15.378], spread=0.1696)]
    compared_to = comparison(place / "c.json", rows, seeds=[0, 1])
    return page(chosen, place / "report.html", comparison=compared_to)


def test_the_page_is_whole_and_loads_nothing(whole):
    tags = parsed(whole)
    assert [target for target in tags.loads if not re.match(r"#|data:", target)] == []
    assert re.findall(r"url\((?!#)|@import", whole) == []
    assert "script" not in tags.tags
    assert len(set(tags.identifiers)) == len(tags.identifiers)
    assert {target[1:] for target in tags.loads if target.startswith("#")} <= set(tags.identifiers)


def test_it_is_readable_everywhere(whole):
    for word in ('name="viewport"', "prefers-color-scheme: dark", '<html lang="en">', 'aria-label="Mask of '):
        assert word in whole
    assert whole.count('role="img"') == whole.count("<svg") > 20
    assert re.findall(r"(?:fill|stroke): #", whole) == [], "a colour that does not follow the scheme"


def test_every_section_says_what_was_recorded(folders, whole):
    record = json.loads((folders["learned"] / "permtriton.json").read_text())
    parts = dict(re.findall(r'<section id="(\w+)".*?>(.*?)</section>', whole, re.DOTALL))
    for word in ("15.189", "0.1696", "±"):
        assert word in parts["result"]
    learned = record["steps"][0]
    losses = [epoch["loss"] for epoch in learned["history"]]
    assert f"from {losses[0]:.4f} to {losses[learned['kept']]:.4f}" in parts["search"]
    soft = [epoch["agreement"] for epoch in learned["history"]]
    assert f"from {soft[0]:.3f} to {soft[-1]:.3f}" in parts["search"]
    entry = [value for name, value in record["retained_importance"].items() if name.endswith("down_proj")]
    mean = [100 * sum(each[key] for each in entry) / len(entry) for key in ("before", "after")]
    assert f"{mean[0]:.2f}\u00a0→\u00a0{mean[1]:.2f}" in parts["importance"]
    assert parts["masks"].count("<svg") == 12
    assert "1 gather" in parts["cost"] or "gathers" in parts["cost"]
    assert "not measured" in parts["sizes"]
    assert f"{sum(record['seconds'].values()):.1f}" in parts["sizes"]
    assert "permtriton compile" in parts["repeat"]
    assert record["versions"]["torch"] in parts["repeat"]


def row(method: str, pattern: str = "", mean: float = 10.0, setting: str = "", **more: object) -> dict:
    return {
        "method": method, "pattern": pattern, "setting": setting, "values": [mean], "mean": mean, "spread": 0.0,
        "kl": 0.25, "cosine": 0.75, "tasks": {"foxes acc": 0.5}, "seconds": 9.0, "compile_seconds": 7.0,
        "peak_bytes": None, "by_seed": [], **more,
    }  # fmt: skip


def comparison(path: Path, rows: list[dict], **more: object) -> Path:
    """Writes the JSON report of a comparison with these rows."""
    found = {
        "model": "zoo", "measure": "perplexity", "text": "foxes", "tokens": 64, "window": 16, "seeds": [0],
        "patterns": ["2:4"], "ablation": None, "config": record()["config"], "versions": {}, "device": "cpu",
        "system": "Linux", "rows": rows, **more,
    }  # fmt: skip
    path.write_text(json.dumps(found))
    return path


def compared(path: Path, monkeypatch, rows: list[dict], **more: object) -> tuple[list, Part]:
    """The lines of the picture, and the table, of a comparison with these rows."""
    comparison(path, rows, **more)
    lines, draw = [], sections.plots.ranking
    monkeypatch.setattr(sections.plots, "ranking", lambda rows, *a, **k: lines.extend(rows) or draw(rows, *a, **k))
    return lines, sections.result([], read_comparison(path)).parts[1]


def test_rows_of_a_comparison_are_told_apart(tmp_path, monkeypatch):
    rows = [row("dense"), *(row(f"wanda{end}", pattern, mean)
            for end, pattern, mean in (("", "2:4", 15.0), (" (fused)", "2:4", 14.0), ("", "4:8", 13.0),
                                       (" (fused)", "4:8", 12.0)))]  # fmt: skip
    lines, part = compared(tmp_path / "c.json", monkeypatch, rows, patterns=["2:4", "4:8"], ablation=None)
    assert lines == [("wanda, 2:4", 15.0, 14.0), ("wanda, 4:8", 13.0, 12.0), ("dense", 10.0, None)]
    assert part.head[:4] == ["method", "pattern", "perplexity", "against dense"]
    assert part.head[4:] == ["KL, nats", "cosine", "foxes acc", "seconds"]
    assert part.rows[3] == ["wanda", "4:8", "13", "1.3", "0.25", "0.75", "0.5", "7"]
    assert part.rows[0][:2] == ["dense", ""]


def test_settings_of_an_ablation_are_told_apart(tmp_path, monkeypatch):
    method = "wanda + learned (fused)"
    rows = [row("dense"), *(row(method, "2:4", mean, f"layers {mean:.0f}") for mean in (12.0, 11.0))]
    lines, part = compared(tmp_path / "c.json", monkeypatch, rows, patterns=["2:4"], ablation="learn-layers")
    assert lines[:2] == [("wanda + learned, layers 12", None, 12.0), ("wanda + learned, layers 11", None, 11.0)]
    assert [cells[:2] for cells in part.rows[1:]] == [[method, "layers 12"], [method, "layers 11"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": []}, "values is"),
        ({"tasks": {}}, "other tasks"),
        ({"compile_seconds": "7"}, "compile_seconds is '7'"),
        ({"kl": "low"}, "kl is 'low'"),
    ],
)
def test_damaged_rows_of_a_comparison_are_refused(tmp_path, change, words):
    comparison(tmp_path / "c.json", [row("dense"), row("wanda", "2:4", **change)])
    with pytest.raises(ModelError, match=words):
        read_comparison(tmp_path / "c.json")


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
    parsed(text)


def test_methods_are_told_apart(folders, tmp_path):
    same = read_folders([folders["portable"], folders["portable-packed"]])
    assert [folder.label for folder in same] == [
        "magnitude: heuristic, mask (portable)",
        "magnitude: heuristic, mask (portable-packed)",
    ]
    assert method_of({"importance": "obs", "recipe": "sparsegpt", "layout": "fused"}) == "obs: sparsegpt, fused"
    other = changed(folders["portable"], tmp_path / "other", lambda record: record.update(model="org/other"))
    warnings = page_of(read_folders([folders["portable"], other]), None).warnings
    assert [line.partition(":")[0] for line in warnings] == ["The folders come from different models"]


def test_sizes_follow_from_the_pattern(folders):
    dense, packed = read_folders([folders["portable"], folders["portable-packed"]])
    assert dense.sizes["packed"] == pytest.approx(packed.stored_bytes, rel=0.02)
    assert packed.sizes["dense"] == pytest.approx(dense.stored_bytes, rel=0.02)


# -- what is refused -----------------------------------------------------------------------------------------------


DAMAGE = {
    "no record": (lambda path: path.unlink(), "not written by permtriton"),
    "no JSON": (lambda path: path.write_text("{"), "cannot be read as JSON"),
    "a list": (lambda path: path.write_text("[]"), "expected an object"),
    "nothing in it": (lambda path: path.write_text("{}"), "model is missing"),
    "a pattern": (lambda path: edit(path, lambda r: r["config"].update(sparsity="x")), "sparsity"),
    "seconds": (lambda path: edit(path, lambda r: r.update(seconds={"a": "b"})), "seconds.a is 'b'"),
    "a site": (lambda path: edit(path, lambda r: r["sites"][1].pop("linears")), "sites[1].linears is missing"),
    "an index": (lambda path: edit(path, lambda r: r["sites"][0]["index"].__setitem__(0, 1)), "expected a permutation"),
    "a short index": (lambda path: edit(path, lambda r: r["sites"][0].update(index=[1, 0])), "2 columns"),
    "a huge number": (lambda path: edit(path, lambda r: r.update(parameters=10**400)), "parameters is"),
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


def test_outputs_are_not_replaced_by_chance(folders, tmp_path):
    output = tmp_path / "out.html"
    output.write_text("mine")
    arguments = ["report", str(folders["wanda"]), "--output", str(output)]
    result = RUNNER.invoke(app, arguments)
    check_refusal(result.exit_code, result.stderr, (str(output), "--overwrite"))
    assert output.read_text() == "mine"
    assert RUNNER.invoke(app, [*arguments, "--overwrite"]).exit_code == 0
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_comparison_of_another_form_is_refused(folders, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"rows": [{"method": "wanda"}]}')
    arguments = ["report", str(folders["wanda"]), "--output", str(tmp_path / "out.html"), "--comparison", str(other)]
    result = RUNNER.invoke(app, arguments)
    check_refusal(result.exit_code, result.stderr, (str(other), "model is missing"))


def test_the_form_is_what_saving_and_exporting_write(folders):
    for name, path in folders.items():
        written = json.loads((path / "permtriton.json").read_text())
        assert json.dumps(read_record(path)) == json.dumps(written), name


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"seconds": {"a": True}}, "seconds.a is True"),
        ({"seconds": {"a": float("nan")}}, "seconds.a is nan"),
        ({"sites": {}}, "sites is {}"),
        ({"barriers": [1]}, r"barriers\[0\] is 1"),
        ({"colour": "red"}, "colour is unknown"),
        (
            {"config": {**record()["config"], "seed": "0"}},
            "config is .*, expected options, seed as a number among them",
        ),
        ({"evaluation": {"dense": 1.0}}, "evaluation is .*, expected measure, dense and compiled, or none of them"),
        ({"parameters": 0}, "parameters is 0"),
    ],
)
def test_records_of_another_form_are_refused(tmp_path, entries, words):
    (tmp_path / "permtriton.json").write_text(json.dumps(record(pruned_weights={"a": 1}, **entries)))
    with pytest.raises(ModelError, match=f"permtriton.json: {words}"):
        read_record(tmp_path)
