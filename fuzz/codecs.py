"""Targets: containers of weights. Each decoder must give the very state that was encoded, or refuse."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import swarm_compression as sc
from blake3 import blake3
from numpy.typing import NDArray
from swarm_compression.container import HEADER_BYTES, layout_tag

from fuzz.target import Target
from swarmtrain.layout import FlatLayout
from swarmtrain.snapshots import Payload, PayloadInvalid, Snapshot, decode_payload, encode_payload, take_snapshot

State = dict[str, NDArray[Any]]
# Where a container's header holds the layout's tag and the hash of the result: FORMAT.md, "Header".
_TAG = slice(20, 28)
_RESULT = slice(28, 60)


def _floats(rng: np.random.Generator, *shape: int) -> NDArray[np.uint16]:
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def single_pair() -> tuple[State, State]:
    """A new state and its base: one small tensor, so that most mutants cost little."""
    rng = np.random.default_rng(10)
    base = _floats(rng, 6, 8)
    at = rng.random((6, 8)) < 0.2
    return {"only": (base + at).astype(np.uint16)}, {"only": base}


def mixed_pair() -> tuple[State, State]:
    """A pair with one tensor of each case: changed, moved as a whole, 0-d, integer, tied."""
    rng = np.random.default_rng(11)
    base: State = {
        "embed": _floats(rng, 6, 8),
        "norm": np.full(8, 0x3F80, np.uint16),
        "scale": np.array(0x3F80, np.uint16),
        "steps": np.array([7], np.int64),
        "tied": np.zeros((6, 8), np.uint16),
    }
    new = {name: array.copy() for name, array in base.items()}
    at = rng.random((6, 8)) < 0.2
    new["embed"][at] += rng.choice(np.array([1, 0xFFFF, 5], np.uint16), int(at.sum()))
    new["norm"] += np.uint16(3)
    new["steps"] += np.int64(1)
    new["tied"] = new["embed"].copy()
    return new, base


def classed_pair() -> tuple[State, State]:
    """A pair with enough changes that a patch codes them by classes of old values."""
    rng = np.random.default_rng(12)
    bits = (_floats(rng, 4000).astype(np.int64) - (rng.geometric(0.5, 4000) << 7)).astype(np.uint16)
    base: State = {"wide": bits}
    share = np.where((bits >> 7 & 0xFF) < 124, 0.5, 0.1)
    moved = np.where(rng.random(4000) < share, rng.choice(np.array([1, 0xFFFF], np.uint16), 4000), 0)
    return {"wide": (bits + moved).astype(np.uint16)}, base


def history_of_classed_pair() -> State:
    """The state before that pair's base: most of what changes had moved before, the same way."""
    rng = np.random.default_rng(15)
    new, base = classed_pair()
    moved = np.where(rng.random(4000) < 0.95, new["wide"] - base["wide"], 0)
    return {"wide": (base["wide"] - moved).astype(np.uint16)}


class _Pair:
    """A pair as a receiver knows it, with the state before the base."""

    def __init__(self, new: State, base: State, history: State | None = None) -> None:
        self.new, self.base, self.history = new, base, history or base
        self.layout = sc.Layout.of(base)
        self.tag = layout_tag(self.layout)
        self.base_digest, self.history_digest = sc.digest_state(base), sc.digest_state(self.history)
        self.new_hash = sc.state_hash(new)


@cache
def _pairs() -> dict[bytes, _Pair]:
    pairs = (_Pair(*single_pair()), _Pair(*mixed_pair()), _Pair(*classed_pair(), history_of_classed_pair()))
    return {pair.tag: pair for pair in pairs}


def _pair_of(data: bytes) -> _Pair:
    """The pair that the header names; any other layout is as good as the first for being refused."""
    pairs = _pairs()
    return pairs.get(data[_TAG]) or next(iter(pairs.values()))


def _decode_patch(data: bytes) -> State:
    sc.describe(data)
    pair = _pair_of(data)
    result = sc.apply_patch(
        data,
        pair.base,
        layout=pair.layout,
        base_digest=pair.base_digest,
        history=pair.history,
        history_digest=pair.history_digest,
    )
    assert sc.state_hash(result, pair.layout) == data[_RESULT], "another state than the header says"
    return result


def _patch_seeds() -> dict[str, bytes]:
    new, base = single_pair()
    seeds = {"steps": sc.encode_patch(new, base), "absolute": sc.encode_patch(new, base, absolute=True)}
    seeds["nothing"] = sc.encode_patch(base, base)
    seeds["mixed"] = sc.encode_patch(*mixed_pair())
    seeds["moved"] = sc.encode_patch({"only": base["only"] + np.uint16(1)}, base)
    seeds["classed"] = sc.encode_patch(*classed_pair(), level="best")
    seeds["history"] = sc.encode_patch(*classed_pair(), level="best", history=history_of_classed_pair())
    return seeds


def _decode_dense(data: bytes) -> State:
    pair = _pair_of(data)
    result = sc.decode_dense(data, pair.layout)
    assert sc.state_hash(result, pair.layout) == data[_RESULT]
    return result


def _dense_seeds() -> dict[str, bytes]:
    return {"single": sc.encode_dense(single_pair()[0]), "mixed": sc.encode_dense(mixed_pair()[0])}


def _decode_blocks(data: bytes) -> State:
    pair = _pair_of(data)
    result = sc.decode_blocks(data, pair.base, layout=pair.layout, base_digest=pair.base_digest)
    assert sc.state_hash(result, pair.layout) == data[_RESULT]
    return result


def _block_seeds() -> dict[str, bytes]:
    new, base = single_pair()
    seeds = {"8-bits": sc.encode_blocks(new, base, bits=8), "4-bits": sc.encode_blocks(new, base, bits=4)}
    return seeds | {"mixed": sc.encode_blocks(*mixed_pair())}


def _displacement() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(13)
    return {"a": rng.standard_normal((8, 16)).astype(np.float32)}


@cache
def _displacement_layout() -> sc.Layout:
    return sc.displacement_layout(_displacement())


def _decode_top_k(data: bytes) -> dict[str, sc.Sparse]:
    # A forger can hash what he forges: without that no mutant would get beyond the hash.
    if len(data) >= HEADER_BYTES:
        data = data[: _RESULT.start] + blake3(data[HEADER_BYTES:]).digest() + data[_RESULT.stop :]
    entries = sc.decode_top_k(data, _displacement_layout())
    for spec in _displacement_layout():
        found = entries[spec.name]
        assert np.isfinite(found.values).all()
        assert not found.positions.size or (found.positions[0] >= 0 and found.positions[-1] < spec.elements)
        assert (np.diff(found.positions) > 0).all()
    return entries


def _top_k_seeds() -> dict[str, bytes]:
    return {f"{bits}-bits": sc.encode_top_k(_displacement(), k=400, bits=bits) for bits in (2, 4, 8)}


_FLAT = FlatLayout.of([("model.embed_tokens.weight", (6, 8))])


@cache
def _snapshots() -> tuple[Snapshot, Snapshot]:
    rng = np.random.default_rng(14)
    bits = _floats(rng, _FLAT.size)
    moved = bits + (rng.random(_FLAT.size) < 0.2).astype(np.uint16)
    return take_snapshot(_FLAT, moved.astype(np.uint16)), take_snapshot(_FLAT, bits)


def _decode_payload(data: bytes) -> Snapshot:
    """As the exchange does it: a byte says whether it is a patch, 32 what the sender calls the result."""
    base = _snapshots()[1]
    head, body = data[:33].ljust(33, b"\0"), data[33:]
    payload = Payload(head[1:], base.hash if head[0] & 1 else b"", bytes(32), len(body))
    snapshot = decode_payload(_FLAT, payload, body, base)
    assert snapshot.hash == payload.snapshot
    return snapshot


def _payload_seeds() -> dict[str, bytes]:
    new, base = _snapshots()
    dense = encode_payload(_FLAT, new, [])
    patch = sc.encode_patch(_FLAT.views(new.bits), _FLAT.views(base.bits))
    return {
        "dense": b"\0" + new.hash + dense.data,
        "patch": b"\1" + new.hash + patch,
    }


TARGETS = [
    Target("patch", _decode_patch, (sc.CodecError,), _patch_seeds, base_bytes=512 * 1024),
    Target("dense", _decode_dense, (sc.CodecError,), _dense_seeds),
    Target("blocks", _decode_blocks, (sc.CodecError,), _block_seeds),
    Target("top-k", _decode_top_k, (sc.CodecError,), _top_k_seeds),
    Target("payload", _decode_payload, (PayloadInvalid,), _payload_seeds),
]
