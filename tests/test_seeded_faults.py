"""Seeded faults: a bug planted in permtriton is refused while it runs, or a named test fails under it.

Bugs that change what a compilation writes are refused by the compilation itself; those that only waste quality, and
cannot be told from a worse model, name the test that catches them, which runs here under the bug. Without a bug, every
compilation of this file succeeds.
"""

import json
from pathlib import Path

import pytest

from benchmarks import readme_tables
from permtriton.errors import PermTritonError, VerificationError

from .faults import FAULTS, Fault
from .refusals import CHECKS, listening, refusals, run

ROOT = Path(__file__).parents[1]
KNOWN = json.loads((readme_tables.RESULTS / "seeded-faults.json").read_text(encoding="utf-8"))
REFUSED = [name for name, fault in FAULTS.items() if fault.refused]
WASTEFUL = [name for name, fault in FAULTS.items() if fault.caught_by]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow(but=["mask off by one slot", "-0.0 left", "SparseGPT keeps 1 of 4"])
def test_a_fault_is_refused(name, monkeypatch, tmp_path):
    """By the check that the page names first."""
    fault, refused = FAULTS[name], listening(monkeypatch, deaf=[])
    fault.plant(monkeypatch)
    with pytest.raises(PermTritonError, match=fault.refused) as error:
        run(fault, tmp_path)
    assert isinstance(error.value, VerificationError)
    assert refused[0] == KNOWN["refused"][name][0]
    assert not (tmp_path / ("packed" if fault.then == "export" else "out")).exists()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow
@pytest.mark.soak
def test_all_checks_that_refuse_a_fault_are_known(name):
    assert refusals(FAULTS[name]) == KNOWN["refused"][name]


def test_the_page_has_every_fault_and_every_check():
    assert list(KNOWN["refused"]) == REFUSED
    assert KNOWN["tests"] == WASTEFUL
    assert KNOWN["checks"] == [check.holds for check in CHECKS]
    assert {check for found in KNOWN["refused"].values() for check in found} <= {*KNOWN["checks"], "crash"}
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert readme_tables.seeded_faults_words("seeded-faults.json") in page


def settings() -> list[Fault]:
    """One fault for each compilation of this file."""
    return list({(fault.model, str(fault.options), fault.then): fault for fault in map(FAULTS.get, REFUSED)}.values())


@pytest.mark.parametrize("fault", settings(), ids=lambda fault: f"{fault.model}-{fault.options['recipe']}-{fault.then}")
@pytest.mark.slow(but=["gpt2-heuristic,mask-"])
def test_without_the_fault_the_same_succeeds(fault, tmp_path):
    run(fault, tmp_path)


@pytest.mark.parametrize("name", WASTEFUL)
@pytest.mark.slow
def test_a_fault_that_wastes_quality_fails_a_test(name, monkeypatch, capfd):
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    options = [f"--rootdir={ROOT}", "--soak", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    code = pytest.main([str(ROOT / fault.caught_by), *options])
    output = capfd.readouterr().out
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert fault.caught_by.split("::")[1].split("[")[0] in output


def test_there_are_enough_faults():
    assert len(FAULTS) >= 25
    assert all(bool(fault.refused) != bool(fault.caught_by) for fault in FAULTS.values())
