"""Progress where standard error is no terminal: few lines, and never silent for long."""

import re
import time

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


def test_no_stage_is_silent_for_long(said, monkeypatch):
    monkeypatch.setattr(bars, "SILENT", 0.05)
    progress = BarProgress()
    with progress.stage("distill", 0):
        time.sleep(0.2)
        with progress.stage("distill", 8) as advance:
            advance(3, "loss 0.1")
            time.sleep(0.2)
    lines = said()
    first = [line for line in lines if line.startswith("distill, ")]
    second = [line for line in lines if re.match(r"distill 3/8, \d s loss 0.1", line)]
    assert len(first) > 1, "what holds others speaks while none of them runs"
    assert len(second) > 1
    assert lines == first + second, "the innermost alone speaks"
    time.sleep(0.1)
    assert said() == [], "what has ended says nothing"
