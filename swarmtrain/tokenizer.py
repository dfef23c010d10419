"""The default tokenizer: one token per byte, no file, no download, every text.

Ids are the bytes themselves. Id 0, the byte NUL, ends every document and so begins the next: text never
holds it (`documents` refuses it). `tokenizer_files` describes the same mapping to Hugging Face's
`tokenizers`, so that an exported folder is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

EOS_ID = 0
VOCAB_SIZE = 256


class Tokenizer(Protocol):
    """What the data pipeline, evaluation and sampling need of a tokenizer."""

    name: str  # part of the cache key: two tokenizers with one name give the same ids
    vocab_size: int
    eos_id: int

    def encode(self, text: bytes) -> NDArray[np.integer]: ...
    def decode(self, ids: Iterable[int]) -> bytes: ...


class ByteTokenizer:
    """Maps bytes to ids and back; lossless on any bytes, UTF-8 or not."""

    name = "bytes"
    vocab_size = VOCAB_SIZE
    eos_id = EOS_ID

    def encode(self, text: bytes) -> NDArray[np.integer]:
        """Returns one id per byte [len(text)], uint8, without an end mark; a read-only view of `text`."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of `ids`; ids beyond the bytes (a padded vocabulary) are left out."""
        return bytes(value for value in map(int, ids) if 0 <= value < VOCAB_SIZE)


def tokenizer_files(context_length: int) -> dict[str, bytes]:
    """Returns tokenizer.json and tokenizer_config.json for a Hugging Face folder, by file name.

    A byte-level BPE without merges: each byte is one printable stand-in character, whose id is the byte.
    There is no special token, so ids and text correspond one to one; the end mark stands in config.json.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: value for value, letter in enumerate(byte_alphabet())},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    return {
        "tokenizer.json": (json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def byte_alphabet() -> list[str]:
    """Returns the 256 stand-in characters of byte-level BPE, by byte (Radford et al. 2019, section 2.2).

    Printable Latin-1 characters stand for themselves; the other 68 bytes take the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(256, 512))
    return [chr(value if value in printable else next(replacements)) for value in range(256)]
