"""Long texts: pieces that together are the text, and the tokens of ordinary texts as before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from permtriton.data import tokenize
from permtriton.data.tokenize import Encoder, pieces
from permtriton.errors import CalibrationError

from .sentences import SENTENCE, trained_tokenizer

TEXT = f"{SENTENCE}\n" * 20


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


def token_ids(text, tokenizer, source="a.txt"):
    return Encoder([text], source, tokenizer, 10**6, "none").one(0)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.text("ab ", max_size=9), max_size=9))
def test_pieces_are_whole_lines_and_together_the_text(lines):
    text = "\n".join(lines)
    assert list(pieces(text, 10_000)) == [text]
    *others, last = pieces(text, 10)
    assert "".join([*others, last]) == text
    assert all(piece.endswith("\n") and len(piece) <= 10 for piece in others)


def test_a_line_is_cut_nowhere():
    assert list(pieces("aa\nbbbbbbbbb\ncc\ndd", 5)) == ["aa\n", "bbbbbbbbb\n", "cc\ndd"]


def test_the_tokens_of_a_text_in_pieces_are_those_of_the_text(tokenizer, monkeypatch):
    """For a tokenizer that puts a space at the beginning of the next word."""
    whole = token_ids(TEXT, tokenizer)
    monkeypatch.setattr(tokenize.pieces, "__defaults__", (100,))
    assert len(list(pieces(TEXT))) > 10
    assert torch.equal(token_ids(TEXT, tokenizer), whole)


def test_special_tokens_stand_around_the_whole_text(monkeypatch):
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "sep_token": "<sep>"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<sep>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A <sep>", special_tokens=ids)
    whole = token_ids(TEXT, tokenizer)
    assert [int(whole[0]), int(whole[-2])] == [number for _, number in ids]
    monkeypatch.setattr(tokenize.pieces, "__defaults__", (100,))
    assert torch.equal(token_ids(TEXT, tokenizer), whole)


def test_no_second_end_token_follows_the_code_of_a_language():
    """As mBART's tokenizer ends a text: ``</s> en_XX``. Behind any other token, one is added."""
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["en_XX"]})
    end = tokenizer.eos_token
    for last, added in (("en_XX", []), ("fox", [tokenizer.eos_token_id])):
        ids = [(token, tokenizer(token)["input_ids"][0]) for token in (end, last)]
        template = processors.TemplateProcessing(f"$A {end} {last}", special_tokens=ids)
        plain, tokenizer.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor, template
        assert token_ids("one fox", tokenizer).tolist() == tokenizer("one fox")["input_ids"] + added
        tokenizer.backend_tokenizer.post_processor = plain


def test_a_tokenizer_that_fails_names_the_text(tokenizer):
    with pytest.raises(CalibrationError, match=r"a\.jsonl cannot be tokenized by the model's tokenizer"):
        token_ids("\ud800", tokenizer, "a.jsonl")


def test_a_tokenizer_that_cuts_and_pads_reads_the_whole_text_and_stays_as_it_is(tokenizer):
    """So that it is saved as it was loaded."""
    cutting = trained_tokenizer()
    cutting.backend_tokenizer.enable_truncation(max_length=8)
    cutting.backend_tokenizer.enable_padding(length=8)
    before = cutting.backend_tokenizer.to_str()
    assert torch.equal(token_ids(SENTENCE, cutting), token_ids(SENTENCE, tokenizer))
    assert cutting.backend_tokenizer.to_str() == before
