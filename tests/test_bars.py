"""Progress where standard error is no terminal: few lines."""

import re

import pytest

from permtriton.util import bars
from permtriton.util.bars import BarProgress


@pytest.fixture
def said(capsys):
    return lambda: capsys.readouterr().err.splitlines()


def test_a_short_stage_is_one_line(said):
    with BarProgress().stage("calibrate", 50) as advance:
        for _ in range(50):
            advance(1, "loss 0.5")
    assert said() == ["calibrate 50/50, 0 s loss 0.5"]


def test_a_long_stage_is_a_line_per_tenth_at_most(said, monkeypatch):
    monkeypatch.setattr(bars, "SELDOM", 0.0)
    with BarProgress().stage("train", 40) as advance:
        for _ in range(40):
            advance()
    assert [re.match(r"train (\d+)/40", line)[1] for line in said()] == [str(done) for done in range(4, 41, 4)]
