"""``benchmarks/scaling_work.py``: the work that projections count is the work that runs."""

import importlib
import sys
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from permtriton import NMPattern, find_plan
from permtriton.config import CompileConfig
from permtriton.data.samples import Samples
from permtriton.methods.fisher import fisher_information
from permtriton.progress import NoProgress

from . import zoo

SEQUENCES, TOKENS = 4, 16


@pytest.fixture(scope="module")
def counting():
    sys.path.insert(0, str(Path(__file__).parent.parent))
    try:
        return importlib.import_module("benchmarks.scaling_work")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def problem(counting):
    model = zoo.tiny_llama(attn_implementation="eager")
    plan = find_plan(model, NMPattern(2, 4))
    return model, plan, zoo.tiny_ids(SEQUENCES, TOKENS), counting.Sizes.of(model, plan, SEQUENCES, TOKENS)


def test_a_forward_pass_multiplies_what_is_counted(problem):
    model, _, ids, sizes = problem
    with FlopCounterMode(display=False) as counter:
        model(ids)
    assert counter.get_total_flops() == pytest.approx(sizes.forward(logits=1)["products"], rel=0.01)


def test_fisher_rows_multiply_what_is_counted(counting, problem):
    model, plan, ids, sizes = problem
    with FlopCounterMode(display=False) as counter:
        fisher_information(model, plan, "kl", Samples.of(ids), CompileConfig(), NoProgress())
    expected = counting.fisher_rows(sizes).split["products"]
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_ranks_divide_sequences_and_wait_for_the_slowest(counting):
    work, rates = counting.work, dict.fromkeys(counting.KINDS, 1.0)
    stage = counting.Stage(work(products=8), work(moved=1), [[work(factors=n) for n in (5, 1, 1)]], sums=10)
    alone, shared = stage.on_ranks(1, rates), stage.on_ranks(2, rates)
    assert dict(alone) == {"products": 8, "moved": 1, "factors": 7}
    assert dict(shared) == {"products": 4, "moved": 1, "factors": 6, "summed": 10}
