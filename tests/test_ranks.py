"""Two processes that share the calibration sequences compile to what one process does, up to rounding."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from permtriton import config_from
from permtriton.driver.choose_placement import check_in_step
from permtriton.errors import ConfigError, ModelError
from permtriton.running.sharding import _around, _check
from permtriton.util import ranks

from . import zoo

ROOT = Path(__file__).parent.parent
ROUNDING = 1e-5
COMPILED = [
    "refitted", "learned", "spread_search", "spread_learning", "every_update", "onloaded", "trained_onloaded", "wrote",
    "searched_mixture", "encoder",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    """What `tests.two_ranks` writes of the cases that run here."""
    path = tmp_path_factory.mktemp("ranks")
    ran = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    cases = [*(case for case in COMPILED if case in ran), "refused", "strided", "data_parallel"]
    command = [sys.executable, "-m", "tests.two_ranks", str(path), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    return path


def tensors(folder: Path, case: str, who: str) -> dict[str, Tensor]:
    return load_file(folder / f"{case}.{who}.st")


def facts(folder: Path, case: str, who: str) -> dict:
    return json.loads((folder / f"{case}.{who}.json").read_text())


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.slow
def test_the_result_is_that_of_one_process_up_to_rounding(folder, case):
    alone, shared = tensors(folder, case, "alone"), tensors(folder, case, "rank0")
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        if name.startswith("index."):
            assert torch.equal(shared[name], tensor), name
        else:
            assert torch.equal(shared[name] != 0, tensor != 0), f"the mask of {name}"
            assert (shared[name] - tensor).double().norm() <= ROUNDING * tensor.double().norm(), name
    for name in ("losses", "evaluation"):
        one, other = facts(folder, case, "alone")[name], facts(folder, case, "rank0")[name]
        assert other == pytest.approx(one, rel=ROUNDING)
    assert one
    assert facts(folder, case, "alone").get("tokens") == facts(folder, case, "rank1").get("tokens")


@pytest.mark.parametrize("case", ["every_update", "refitted", "onloaded", "searched_mixture"])
@pytest.mark.slow
def test_orders_and_weights_that_follow_from_sums_are_those_of_one_process_bit_for_bit(folder, case):
    """A fit magnifies the rounding of its moments, masks and orders are chosen by comparison: no sum may differ."""
    alone, shared = tensors(folder, case, "alone"), tensors(folder, case, "rank0")
    assert [name for name, tensor in alone.items() if not torch.equal(shared[name], tensor)] == []


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.slow
def test_all_ranks_end_with_the_same_bytes(folder, case):
    one, other = tensors(folder, case, "rank0"), tensors(folder, case, "rank1")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert facts(folder, case, "rank0")["losses"] == facts(folder, case, "rank1")["losses"]


@pytest.mark.slow
def test_some_experts_are_visited_on_one_rank_only(folder):
    unvisited = [set(facts(folder, "searched_mixture", who)["unvisited"]) for who in ("rank0", "rank1", "alone")]
    assert unvisited[0] - unvisited[1]
    assert unvisited[2] == unvisited[0] & unvisited[1]


@pytest.mark.slow
def test_only_the_first_rank_keeps_a_state(folder):
    """Both ranks continued from it, see `tests.two_ranks.learned` and `refitted` there."""
    refitted = {f"refitted.{step}" for step in ("heuristic", "refit_0", "refit_1", "distill")}
    kept = refitted | {"states.heuristic", "states.learned"}
    assert {path.stem for path in (folder / "rank0").iterdir()} == kept
    assert list((folder / "rank1").iterdir()) == []


@pytest.mark.slow
def test_all_ranks_refuse_together(folder):
    too_few, of_first, of_second = facts(folder, "refused", "rank0")["errors"]
    assert too_few.startswith("ConfigError: 2 processes cannot share 1 calibration sequences")
    assert of_first == of_second == "OutputError: refused"
    assert facts(folder, "refused", "rank1") == facts(folder, "refused", "rank0")


@pytest.mark.slow
def test_a_tensor_whose_rows_are_apart_is_sent_as_it_is_seen(folder):
    for rank in ("rank0", "rank1"):
        assert facts(folder, "strided", rank)["found"] == [[[3, 3, 0, 0]] * 3, [[1, 1, 0, 0]] * 3]


@pytest.mark.slow
def test_a_fused_model_wider_than_a_byte_trains_under_ddp(folder):
    """From the weights and the orders of the first rank, since the gradients are those of one process."""
    alone, *shared = (tensors(folder, "data_parallel", who) for who in ("alone", "rank0", "rank1"))
    for name, gradient in alone.items():
        assert gradient.any(), name
        for each in shared:
            torch.testing.assert_close(each[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("samples", [5, 6])
def test_layers_that_are_spread_run_for_obs_only_with_equal_shares(samples):
    """Each layer may run on one sample at a time: a rank with one sample more would wait for the others forever."""
    config = config_from({"importance": "obs", "micro_batch_size": 2}, "heuristic,mask")
    with nullcontext() if samples == 6 else pytest.raises(ConfigError, match="a multiple of 2"):
        check_in_step(config, samples, count=2)


@pytest.mark.parametrize(("name", "expected"), [("llama", "model"), ("opt", "model.decoder"), ("bert", "encoder")])
def test_the_fsdp_root_is_what_every_run_of_a_layer_goes_through(name, expected):
    """OPT's head calls the decoder inside the base model, so that the base model does not run."""
    model = zoo.build(name)
    layers = [module for path, module in model.named_modules() if re.fullmatch(r".*layers?\.\d+", path)]
    assert len(layers) == zoo.LAYERS
    assert _around(model, layers) is model.get_submodule(expected)


def test_a_model_whose_runs_end_inside_its_fsdp_root_is_not_spread():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 40}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration.*cannot be spread"):
        _check(model, [model.encoder.block[0], model.decoder.block[0]])


@pytest.mark.parametrize(
    ("rows", "size", "fits"), [(5, 2, True), (7, 4, True), (6, 1, True), (5, 1, False), (1, 4, False)]
)
def test_ranks_that_run_in_step_have_equally_many_parts(rows, size, fits, monkeypatch):
    """FSDP2 gathers weights in every run: one run more on one rank would wait for the others forever."""
    monkeypatch.setattr(ranks, "count", lambda: 2)
    found = []
    for number in range(2):
        monkeypatch.setattr(ranks, "number", lambda number=number: number)
        with ranks.in_step():
            if not fits:
                with pytest.raises(ConfigError, match="a multiple of 2"):
                    ranks.parts(torch.arange(rows), size)
                continue
            found.append(ranks.parts(torch.arange(rows), size))
        assert max(part.numel() for part in found[-1]) <= size
    assert not fits or len(found[0]) == len(found[1])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_hold_every_sequence_once(count, monkeypatch):
    rows, found = torch.tensor([4, 1, 7]), []
    monkeypatch.setattr(ranks, "count", lambda: count)
    for number in range(count):
        monkeypatch.setattr(ranks, "number", lambda number=number: number)
        found += ranks.parts(rows, 2)
    assert torch.equal(torch.cat(found), rows)
    assert all(0 < part.numel() <= 2 for part in found)
    assert ranks.parts(rows[:0], 2) == ()
