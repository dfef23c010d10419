"""Where text comes from: files and folders that the user names, or Python's own help topics and source.

A document is an iterator of byte pieces, so a file larger than memory is read piece by piece. Every
complaint is a `DataError` of one line that names the file.
"""

from __future__ import annotations

import codecs
import json
import os
import pydoc_data.topics
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from swarmtrain.errors import ExitCode, UserError

# What a folder is searched for; a file that is named directly may have any suffix.
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_PIECE_BYTES = 1 << 22
_LONGEST_JSON_LINE_BYTES = 1 << 26

# Left out of the standard library's source: tests, what pip added, what differs between builds of one
# release, and pydoc_data, which holds the validation text once more.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize")
# Every ninth topic is held out, from the first on: the choice that shares least with the other topics.
_VALIDATION_STRIDE = 9
_VALIDATION_BYTES = 60_000  # a manifest carries at most 64 KiB

Document = Iterator[bytes]


class DataError(UserError):
    """Training text is missing, empty, unreadable or not text; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


def python_documents(size_bytes: int) -> Iterator[Document]:
    """Yields Python's help topics, then its standard library's source, up to `size_bytes` in all.

    Leaves out `python_validation_text`. Equal on all peers with the same Python patch release, and only
    there.
    """
    left = size_bytes
    for text in chain(_topics(held_out=False), _library_source()):
        if left <= 0:
            return
        yield iter((text[:left],))
        left -= len(text)


def python_text(size_bytes: int = 4_000_000) -> bytes:
    """Returns the text of `python_documents` in one piece."""
    return b"".join(chain.from_iterable(python_documents(size_bytes)))


def python_validation_text() -> bytes:
    """Returns about 60 kB of the held-out help topics."""
    text = b"\n".join(_topics(held_out=True))[:_VALIDATION_BYTES]
    return text[: text.rfind(b"\n") + 1]


def _topics(*, held_out: bool) -> Iterator[bytes]:
    topics: dict[str, str] = pydoc_data.topics.topics
    for number, name in enumerate(sorted(topics)):
        if (number % _VALIDATION_STRIDE == 0) is held_out:
            yield topics[name].encode()


def _library_source() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _sorted_files(root, (".py",), _SKIPPED_FOLDERS):
        if not path.name.startswith(_SKIPPED_PREFIXES) and (text := path.read_bytes()):
            yield text


def file_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Yields the documents of the named files, and of the text files below the named folders in sorted order.

    A `.jsonl` file gives one document a line, its `text` field; any other file is one document. Hidden and
    empty files in folders are passed over. Raises `DataError` for a path that is missing, empty, unreadable
    or not text.
    """
    for path in paths:
        try:
            if path.is_dir():
                files = [file for file in _sorted_files(path, TEXT_SUFFIXES) if file.stat().st_size]
                if not files:
                    raise DataError(f"{path}: no text in this folder ({', '.join(TEXT_SUFFIXES)})")
            elif not path.is_file():
                raise DataError(f"{path}: no such file or folder")
            elif path.stat().st_size == 0:
                raise DataError(f"{path}: the file is empty")
            else:
                files = [path]
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        for file in files:
            if file.suffix == ".jsonl":
                yield from (iter((text,)) for text in _json_texts(file))
            else:
                yield _text_pieces(file)


def _sorted_files(root: Path, suffixes: tuple[str, ...], skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        found += (Path(parent, name) for name in names if name.endswith(suffixes) and name[0] != ".")
    # Compared part by part: the order must not depend on the separator or on the file system.
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _text_pieces(path: Path) -> Document:
    """Yields the file in pieces, cut after a line end where there is one; `DataError` if not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = b""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                if b"\0" in piece:
                    raise DataError(f"{path}: this is a binary file, not text")
                decoder.decode(piece)
                cut = piece.rfind(b"\n") + 1
                if cut:
                    yield rest + piece[:cut]
                    rest = piece[cut:]
                else:
                    yield rest + piece
                    rest = b""
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text; convert it or leave it out") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if rest:
        yield rest


def _json_texts(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_JSON_LINE_BYTES + 1):
                number += 1
                if len(line) > _LONGEST_JSON_LINE_BYTES:
                    raise DataError(f"{path}, line {number}: longer than {_LONGEST_JSON_LINE_BYTES} bytes")
                if line.strip():
                    yield _json_text(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _json_text(line: bytes, where: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON object") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f"{where}: no `text` field that is a string")
    text: str = record["text"]
    return text.replace("\0", "").encode("utf-8", "replace")
