"""A tiny model with a tokenizer and a text, and a folder to run commands in."""

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from permtriton.cli.main import app

from . import zoo
from .sentences import SENTENCE, trained_tokenizer

RUNNER = CliRunner()
LEARN = ("--recipe", "heuristic,learned,mask")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and a text file next to its folder."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tokenizer = trained_tokenizer()
    tokenizer.save_pretrained(folder)
    zoo.tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=True).save_pretrained(folder)
    (folder.parent / "text.txt").write_text(SENTENCE * 60, encoding="utf-8")
    return folder


class Desk:
    """A folder with an earlier output in it, and the arguments of a compilation that would replace it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.text, self.out = folder, model, model.parent / "text.txt", folder / "out"
        self.out.mkdir()
        (self.out / "permtriton.json").write_text("{}")
        (self.out / "model.safetensors").write_bytes(b"hours of work")

    def files(self) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in self.folder.rglob("*")
        }

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def compile(self, *more: object, model: object = None, output: Path | None = None) -> list[str]:
        """Later options win over earlier ones."""
        arguments = [
            "compile", model or self.model, "--output", output or self.out, "--overwrite", "--recipe", "heuristic,mask",
            "--calibration", self.text, "--samples", 4, "--sequence-length", 16, "--eval-data", "none", *more,
        ]  # fmt: skip
        return [str(argument) for argument in arguments]

    def refuses(self, arguments: list[str], *words: str) -> None:
        """Checks that a command ends in one line that contains ``words``, and that it leaves every file as it was."""
        before = self.files()
        result = RUNNER.invoke(app, arguments)
        assert isinstance(result.exception, SystemExit), f"a traceback: {result.exception!r}"
        check_refusal(result.exit_code, result.stderr, words)
        assert result.stdout == ""
        assert self.files() == before


def check_refusal(exit_code: int, stderr: str, words: tuple[str, ...]) -> None:
    lines = stderr.splitlines()
    assert exit_code == 2, stderr
    assert [line for line in lines if line.startswith("error:")] == lines[-1:], stderr
    assert "Traceback" not in stderr
    assert [word for word in words if word not in lines[-1]] == [], lines[-1]


@pytest.fixture
def desk(tmp_path, model_folder, monkeypatch) -> Desk:
    # The runner closes the streams of each command, and loggers of libraries may still write to an earlier one.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", model_folder)
