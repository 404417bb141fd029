"""Bad options and config files of every command: one line, exit code 2, and no file changed."""

import pytest
import torch

from permtriton.cli.main import app, command_named
from permtriton.recipe import all_options

from .desk import LEARN, RUNNER
from .world import free_memory, running_raises

BAD_OPTIONS = {
    "more kept than there are": (("--sparsity", "4:2"), ["4:2", "0 < N < M"]),
    "pattern that does not fit": (("--sparsity", "3:5"), ["layers.0-1.", "16 input channels", "--skip-indivisible"]),
    "zero samples": (("--samples", "0"), ["--samples is 0", "at least 1"]),
    "beyond the positions": (("--sequence-length", "33"), ["33", "32 positions", "--sequence-length 32"]),
    "more samples than text": (("--samples", "9999"), ["9999 are needed", "--samples"]),
    "unknown recipe": (("--recipe", "fancy"), ["'fancy'", "default, best, fast, values, permllm"]),
    "unknown step": (("--recipe", "mask,fancy"), ["'fancy' is no step", "heuristic, learned, searched, mask"]),
    "no pruning": (("--recipe", "heuristic"), ["recipe heuristic prunes nothing", "steps that prune, mask or "]),
    "unknown device": (("--device", "tpu"), ["'tpu'", "auto, cpu or cuda"]),
    "negative seed": (("--seed", "-1"), ["--seed is -1"]),
    "epochs without learning": (
        ("--learn-epochs", "3"),
        ["--learn-epochs has no effect", "--recipe heuristic,mask", "add learned"],
    ),
    "mask without SparseGPT": (("--sparsegpt-mask", "keep"), ["--sparsegpt-mask", "add sparsegpt to the recipe"]),
    "importance without a mask": (
        ("--recipe", "sparsegpt", "--importance", "ria"),
        ["--importance has no effect with --recipe sparsegpt", "its own mask"],
    ),
    "block no multiple": ((*LEARN, "--learn-block-size", "30"), ["learn_block_size 30", "2:4", "multiple of 4"]),
    "no config file": (("--config", "no.toml"), ["no.toml", "No such file"]),
    "no calibration file": (("--calibration", "no.txt"), ["no.txt", "demo, c4, wikitext2, pile"]),
    "no evaluation file": (("--eval-data", "no.txt"), ["no.txt", "demo, wikitext2"]),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(desk, case):
    options, words = BAD_OPTIONS[case]
    desk.refuses(desk.compile(*options), *words)


def test_a_flag_can_turn_off_what_a_file_or_a_protocol_turns_on():
    flags = {each.name: each.secondary_opts for each in command_named("compile").params}
    switches = [name for name, option in all_options().items() if option.type is bool]
    assert {"one_document", "skip_indivisible", "activation_checkpointing"} <= set(switches)
    assert all(flags[name] == [f"--no-{name.replace('_', '-')}"] for name in switches)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("a bug"),
    ],
)
@pytest.mark.slow
def test_out_of_memory_is_one_line_and_a_bug_a_traceback(desk, monkeypatch, error):
    running_raises(monkeypatch, error)
    if "a bug" not in str(error):
        words = str(error).splitlines()[0] if str(error) else "MemoryError"
        desk.refuses(desk.compile(), "out of memory: choose shorter", words)
    else:
        assert RUNNER.invoke(app, desk.compile()).exception is error


def test_too_little_memory(desk, monkeypatch):
    free_memory(monkeypatch, 1000)
    desk.refuses(desk.compile(), "1000 B are free", "--sequence-length")


@pytest.mark.parametrize(
    ("words", "found"), [("permtriton comp", ["compile", "compare"]), ("permtriton compile demo --samp", ["--samples"])]
)
def test_shells_complete_commands_and_options(monkeypatch, capsys, words, found):
    monkeypatch.setenv("_PERMTRITON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as stopped:
        app(prog_name="permtriton")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.split() == found


def test_an_interrupted_command_says_that_it_continues_only_where_it_does(desk, monkeypatch):
    running_raises(monkeypatch, KeyboardInterrupt())
    stopped = RUNNER.invoke(app, ["evaluate", str(desk.model), "--eval-data", str(desk.text)])
    assert (stopped.exit_code, "interrupted" in stopped.stderr, "continues" in stopped.stderr) == (130, True, False)
    stopped = RUNNER.invoke(app, desk.compile())
    assert (stopped.exit_code, "continues after the last round" in stopped.stderr) == (130, True)
