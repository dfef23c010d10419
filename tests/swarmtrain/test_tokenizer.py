"""Bytes and ids correspond one to one, and the exported files describe the same mapping."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.tokenizer import EOS_ID, VOCAB_SIZE, ByteTokenizer, byte_alphabet, tokenizer_files


@given(st.binary(max_size=200))
def test_any_bytes_survive(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text)
    assert tokenizer.decode(ids.tolist()) == text


def test_ids_beyond_the_bytes_decode_to_nothing() -> None:
    assert ByteTokenizer().decode([104, 300, -1, 105]) == b"hi"


def test_the_end_mark_is_a_byte_that_text_never_holds() -> None:
    assert (EOS_ID, VOCAB_SIZE) == (0, 256)


def test_the_alphabet_is_printable_and_reversible() -> None:
    letters = byte_alphabet()
    assert len(set(letters)) == 256
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)
    assert letters[ord("a")] == "a"
    assert letters[ord(" ")] == "Ġ"
    assert letters[ord("\n")] == "Ċ"


def test_files_map_each_byte_to_itself() -> None:
    files = tokenizer_files(128)
    tokenizer = json.loads(files["tokenizer.json"])
    assert tokenizer["model"]["vocab"] == {letter: value for value, letter in enumerate(byte_alphabet())}
    assert tokenizer["model"]["merges"] == []
    assert tokenizer["added_tokens"] == []
    assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 128
