"""Documents, token files and slices: clear complaints, exact disjointness, nothing held out is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.data import (
    OVERLAP_TOKENS,
    Slice,
    SliceConfig,
    content_digest,
    prepare_tokens,
    token_dtype,
    usable_windows,
)
from swarmtrain.documents import (
    DataError,
    file_documents,
    python_documents,
    python_text,
    python_validation_text,
)
from swarmtrain.tokenizer import ByteTokenizer


def texts(*paths: Path) -> list[bytes]:
    return [b"".join(document) for document in file_documents(paths)]


def documents(*parts: bytes) -> Iterator[Iterator[bytes]]:
    return (iter((part,)) for part in parts)


def random_tokens(count: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


# Documents


def test_python_text_is_capped_stable_and_leaves_out_the_validation_text() -> None:
    text = python_text(600_000)
    assert text == python_text(600_000)
    assert text == b"".join(b"".join(document) for document in python_documents(600_000))
    assert len(text) == 600_000
    validation = python_validation_text()
    assert 50_000 < len(validation) <= 65_536
    assert b"\0" not in text + validation
    middle = validation[len(validation) // 2 :][:200]
    assert middle not in text


def test_folders_are_walked_in_order_and_only_for_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "x.md").write_text("two")
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden" / "y.txt").write_text("no")
    assert texts(tmp_path) == [b"one", b"two", b"three"]
    assert texts(tmp_path / "b.txt", tmp_path / "a.py") == [b"three", b"one"]


def test_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"id": 3, "text": "tw\\u0000\\u00f6"}\n')
    assert texts(path) == [b"one\n", "twö".encode()]


@pytest.mark.parametrize("line", ["{", "[1]", '{"body": "x"}', '{"text": 3}', "[" * 100_000])
def test_a_bad_json_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"data\.jsonl, line 2: ") as caught:
        texts(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty"),
        (b"text\0text", "a binary file"),
        (b"caf\xe9\n", "not UTF-8 text"),
        (b"cut off \xe2\x82", "not UTF-8 text"),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        texts(path)


def test_missing_paths_and_folders_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        texts(tmp_path / "absent")
    with pytest.raises(DataError, match="no text in this folder"):
        texts(tmp_path)


def test_large_files_come_in_pieces_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.documents._PIECE_BYTES", 7)
    path = tmp_path / "file.txt"
    content = "ä line\nanother line without end, longer\nß".encode()
    path.write_bytes(content)
    (document,) = file_documents([path])
    pieces = list(document)
    assert b"".join(pieces) == content
    assert len(pieces) > 3


# Token files


def test_token_file_holds_each_document_and_its_end_mark(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = prepare_tokens(lambda: documents(b"ab", b"c"), ByteTokenizer(), cache)
    assert bytes(made.tokens) == b"ab\0c\0"
    assert made.tokens.dtype == np.uint8
    assert made.digest == content_digest(documents(b"ab", b"c"))
    assert len(list(cache.iterdir())) == 1


def test_token_file_is_made_once(tmp_path: Path) -> None:
    calls = []

    def source() -> Iterator[Iterator[bytes]]:
        calls.append(1)
        return documents(b"some text")

    first = prepare_tokens(source, ByteTokenizer(), tmp_path)
    second = prepare_tokens(source, ByteTokenizer(), tmp_path)
    assert len(calls) == 3  # hashed twice, tokenised once
    assert np.array_equal(first.tokens, second.tokens)


def test_an_interrupted_tokenisation_leaves_nothing(tmp_path: Path) -> None:
    calls = []

    def source() -> Iterator[Iterator[bytes]]:
        calls.append(1)
        yield iter((b"text",))
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(source, ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_digest_tells_documents_apart_but_not_pieces() -> None:
    assert content_digest(documents(b"ab", b"c")) != content_digest(documents(b"a", b"bc"))
    assert content_digest(documents(b"ab")) == content_digest(iter([iter((b"a", b"b"))]))
    with pytest.raises(DataError, match="holds no text"):
        content_digest(documents(b"", b""))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used") as caught:
        prepare_tokens(lambda: documents(b"text"), ByteTokenizer(), tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_ids_are_stored_in_the_smallest_type() -> None:
    assert [token_dtype(size).itemsize for size in (256, 257, 65536, 65537)] == [1, 2, 2, 4]


# Slices


def config(peer: bytes = b"peer", shard: tuple[int, int] | None = None, seed: int = 1) -> SliceConfig:
    return SliceConfig(context_length=16, batch_size=4, seed=seed, peer_id=peer, shard=shard)


def windows_of(piece: Slice, steps: int) -> list[bytes]:
    return [row.astype(np.uint8).tobytes() for step in range(steps) for row in piece.batch(step)[0]]


def test_targets_are_the_next_tokens() -> None:
    tokens = random_tokens(1000)
    inputs, targets = Slice(tokens, config()).batch(3)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    joined = np.concatenate((inputs[0], targets[0, -1:])).astype(np.uint8).tobytes()
    assert joined in tokens.tobytes()


def test_a_batch_depends_on_its_step_alone() -> None:
    tokens = random_tokens(16 * 30 + 1)
    one, other = Slice(tokens, config()), Slice(tokens, config())
    later = other.batch(40)[0]  # epochs back and forth
    assert all(np.array_equal(one.batch(step)[0], other.batch(step)[0]) for step in range(20))
    assert np.array_equal(one.batch(40)[0], later)


def test_the_order_is_written_down() -> None:
    """A change here breaks exact resuming and the disjointness of shards between versions."""
    tokens = np.arange(161, dtype=np.uint8)
    first = Slice(tokens, config()).batch(0)[0][:, 0] // 16
    assert first.tolist() == [2, 3, 6, 1]


def test_an_epoch_visits_every_window_once_in_a_new_order() -> None:
    piece = Slice(random_tokens(16 * 8 + 1), config())
    assert piece.window_count == 8
    first, second = windows_of(piece, 2), windows_of(piece, 4)[8:]
    assert len(set(first)) == 8
    assert sorted(first) == sorted(second)
    assert first != second


def test_peers_and_seeds_have_orders_of_their_own() -> None:
    tokens = random_tokens(16 * 100 + 1)
    orders = [
        windows_of(Slice(tokens, config(peer, seed=seed)), 25) for peer, seed in ((b"a", 1), (b"b", 1), (b"a", 2))
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(9, 60))
def test_shards_are_disjoint_and_complete(count: int, windows: int) -> None:
    tokens = random_tokens(16 * windows + 1)
    seen: list[bytes] = []
    sizes = []
    for index in range(count):
        # Different peer ids: shards must not depend on who holds them.
        piece = Slice(tokens, config(bytes([index]), (index, count)))
        sizes.append(piece.window_count)
        rows = windows_of(piece, -(-piece.window_count // 4))[: piece.window_count]
        seen += rows
    assert len(seen) == len(set(seen)) == windows
    assert max(sizes) - min(sizes) <= 1


def test_a_slice_without_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="no window of 17 tokens"):
        Slice(random_tokens(16), config())
    with pytest.raises(DataError, match="no window"):
        Slice(random_tokens(33), config(shard=(2, 3)))
    with pytest.raises(ValueError, match="shard 3 of 3"):
        config(shard=(3, 3))


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 3000),
    length=st.integers(2 * OVERLAP_TOKENS - 1, 900),
    context_length=st.sampled_from([1, 16, 64, 100, 500]),
    dtype=st.sampled_from(["<u1", "<u2", "<u4"]),
)
def test_no_window_shares_a_passage_with_the_held_out_text(
    start: int, length: int, context_length: int, dtype: str
) -> None:
    tokens = random_tokens(4000).astype(dtype)
    held_out = np.concatenate(
        (random_tokens(77, 1), tokens[start : start + length].astype(np.uint8), random_tokens(50, 2))
    )
    passage = range(start, min(start + length, 4000))
    kept = usable_windows(tokens, context_length, held_out)
    if len(passage) >= 2 * OVERLAP_TOKENS - 1:
        for window in kept.tolist():
            first, last = window * context_length, window * context_length + context_length
            assert last < passage.start or first >= passage.stop
    # Nothing far from the passage is lost.
    margin = 2 * OVERLAP_TOKENS + context_length
    expected = {
        window
        for window in range((4000 - 1) // context_length)
        if window * context_length + context_length < passage.start - margin
        or window * context_length > passage.stop + margin
    }
    assert expected <= set(kept.tolist())


def test_unrelated_and_tiny_held_out_texts_cost_nothing() -> None:
    tokens = random_tokens(2000)
    assert len(usable_windows(tokens, 16, random_tokens(500, 9))) == 1999 // 16
    assert len(usable_windows(tokens, 16, tokens[:40])) == 1999 // 16
    assert len(usable_windows(tokens, 16, None)) == 1999 // 16
    assert len(usable_windows(tokens, 16, tokens)) == 0


def test_little_of_the_built_in_text_overlaps_its_validation_text() -> None:
    text, held_out = (ByteTokenizer().encode(t) for t in (python_text(500_000), python_validation_text()))
    kept = usable_windows(text, 128, held_out)
    assert len(kept) > 0.99 * ((len(text) - 1) // 128)
