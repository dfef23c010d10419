"""FORMAT.md is enough: a second decoder, written from the document alone, reads the same states.

It is slow, trusts its input and shares no code with the package: plain integers, no NumPy in the decoding. The golden
files hold the format still; a change of it must come with a new version byte and new files.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import swarm_compression as sc
import zstandard
from blake3 import blake3

GOLDEN = Path(__file__).parent / "golden"
CODES = {"bf16": 1, "f16": 2, "f32": 3, "bool": 7, "i64": 27, "u8": 16}
EXPONENT_BITS = {"bf16": 8, "f16": 5, "f32": 8}
Spec = tuple[str, str, tuple[int, ...]]


def golden_states() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A small base and a new state with every case: dtypes, special values, tied, unchanged, 0-d, empty.

    Made of Python's Mersenne twister and integers, so that no later NumPy can change them.
    """
    rng = random.Random(20260101)

    def draw(count: int, top: int = 256) -> np.ndarray:
        return np.frombuffer(rng.randbytes(count), np.uint8).astype(np.int64) * top // 256

    count = 20_000
    zeros = np.array([8] + [(n & -n).bit_length() - 1 for n in range(1, 256)])[draw(count)]
    exponent = 121 - zeros
    embed = (draw(count, 2) << 15 | exponent << 7 | draw(count, 128)).astype(np.uint16)
    special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001], np.uint16)
    base = {
        "embed": embed.reshape(200, 100),
        "head": np.zeros((100, 200), np.uint16),
        "norm": (0x3F00 + draw(5000)).astype(np.uint16),
        "special": special,
        "kept": draw(50).astype(np.uint8),
        "half": (draw(300) * 37).astype(np.uint16).view(np.float16),
        "single": (0x3C000000 + draw(300) * 54321).astype(np.uint32).view(np.float32),
        "mask": draw(40) < 128,
        "count": np.array(41, np.int64),
        "empty": np.zeros((0, 7), np.float32),
    }
    new = {name: array.copy() for name, array in base.items()}
    change = draw(count) < 6 * 2**zeros
    step = np.where(draw(count, 2) > 0, 1, -1) * (1 + draw(count) * draw(count) * 2**zeros // 2**18)
    new["embed"] = (embed + np.where(change, step, 0)).astype(np.uint16).reshape(200, 100)
    new["head"] = new["embed"].reshape(100, 200).copy()
    new["norm"] += 2
    new["special"] = special[::-1].copy()
    new["half"].view(np.uint16)[::50] += 3
    new["single"].view(np.uint32)[::9] -= 70_000
    new["mask"] = ~new["mask"]
    new["count"] += 1
    return new, base


def golden_history() -> dict[str, np.ndarray]:
    """The state before `golden_states`' base: what moves went the same way before, with few exceptions."""
    rng = random.Random(20260102)
    new, base = golden_states()
    history = {name: array.copy() for name, array in base.items()}
    for name in ("embed", "norm", "half", "single"):
        old, bits = (state[name].reshape(-1).view(f"<u{base[name].itemsize}") for state in (base, history))
        moved = new[name].reshape(-1).view(old.dtype) - old
        kept = np.frombuffer(rng.randbytes(old.size), np.uint8) < 250
        strayed = np.array([0] * 61 + [1, -1, 3])[np.frombuffer(rng.randbytes(old.size), np.uint8) % 64]
        bits -= np.where(kept & (moved != 0), moved, strayed.astype(old.dtype))
    return history


def specs_of(state: dict[str, np.ndarray]) -> list[Spec]:
    tags = {"uint16": "bf16", "float16": "f16", "float32": "f32", "bool": "bool", "int64": "i64", "uint8": "u8"}
    specs = [(name, tags[array.dtype.name], array.shape) for name, array in state.items()]
    return sorted(specs, key=lambda spec: spec[0].encode())


def width(tag: str) -> int:
    return {"bf16": 2, "f16": 2, "f32": 4, "bool": 1, "i64": 8, "u8": 1}[tag]


class In:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        assert self.at <= len(self.data)
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (piece,) = self.take(1)
            value |= (piece & 0x7F) << shift
            if piece < 0x80:
                return value
            shift += 7

    def stream(self, size: int) -> bytes:
        head = self.varint()
        body = self.take(head >> 1)
        out = zstandard.ZstdDecompressor().decompress(body) if head & 1 else body
        assert len(out) == size
        return out

    def planes(self, count: int, size: int) -> list[int]:
        columns = [self.stream(count) for _ in range(size)]
        return [sum(column[n] << 8 * k for k, column in enumerate(columns)) for n in range(count)]

    def bits(self, count: int) -> list[int]:
        packed = self.stream(-(-count // 8))
        return [packed[n // 8] >> n % 8 & 1 for n in range(count)]

    def gaps(self, count: int) -> list[int]:
        (size,) = self.take(1)
        escape, p, found = 2 ** (8 * size) - 1, -1, []
        for g in self.planes(self.varint(), size):
            p += escape if g == escape else g + 1
            if g != escape:
                found.append(p)
        assert len(found) == count
        return found

    def steps(self, count: int, size: int) -> list[int]:
        signs = self.bits(count)
        (style,) = self.take(1)
        if style == 1:
            excess = self.planes(count, size)
        else:
            packed = self.stream(-(-count // 4))
            excess = [packed[n // 4] >> 2 * (n % 4) & 3 for n in range(count)]
            large = iter(self.planes(excess.count(3), size))
            excess = [m if m < 3 else 3 + next(large) for m in excess]
        return [-(m + 1) if sign else m + 1 for sign, m in zip(signs, excess, strict=True)]


def ordered(x: int, tag: str) -> int:
    b = 8 * width(tag)
    if tag not in EXPONENT_BITS:
        return x
    return x ^ (2**b - 1 if x >> (b - 1) else 2 ** (b - 1))


def unordered(o: int, tag: str) -> int:
    b = 8 * width(tag)
    if tag not in EXPONENT_BITS:
        return o
    return o ^ (2 ** (b - 1) if o >> (b - 1) else 2**b - 1)


def step_up(x: int, step: int, tag: str) -> int:
    return unordered((ordered(x, tag) + step) % 2 ** (8 * width(tag)), tag)


def unrotate(r: int, tag: str) -> int:
    b = 8 * width(tag)
    return r if tag not in EXPONENT_BITS else r >> 1 | (r & 1) << (b - 1)


def unzigzag(z: int) -> int:
    return -(z + 1) // 2 if z & 1 else z // 2


def last_step(old: int, before: int, tag: str) -> int:
    b = 8 * width(tag)
    step = (ordered(old, tag) - ordered(before, tag)) % 2**b
    return step - 2**b if step >> (b - 1) else step


def decode_section(kind: int, visible: int, body: In, old: list[int], tag: str, before: list[int] | None) -> list[int]:
    size, new = width(tag), list(old)
    if kind == 1 and visible:
        (form,) = body.take(1)
        positions = body.gaps(visible)
        if form == 1:
            for p, r in zip(positions, body.planes(visible, size), strict=True):
                new[p] = unrotate(r, tag)
        else:
            for p, step in zip(positions, body.steps(visible, size), strict=True):
                new[p] = step_up(old[p], step, tag)
    elif kind == 2:
        new = [step_up(x, unzigzag(z), tag) for x, z in zip(old, body.planes(len(old), size), strict=True)]
    elif kind == 3:
        new = [unrotate(r, tag) for r in body.planes(len(old), size)]
    elif kind in (4, 5):
        b = 8 * size
        (t,) = body.take(1)
        context = [(x << 1) % 2**b >> (b - 8) for x in old]
        if kind == 4:
            bounds = [0, *body.take(t), 256]
        else:
            assert before is not None
            bounds = [0, *struct.unpack(f"<{t}H", body.take(2 * t)), 1280]
            steps = [last_step(x, h, tag) for x, h in zip(old, before, strict=True)]
            context = [c + 256 * (max(-2, min(step, 2)) + 2) for c, step in zip(context, steps, strict=True)]
        for low, high in itertools.pairwise(bounds):
            members = [p for p, c in enumerate(context) if low <= c < high]
            (mode,) = body.take(1)
            if mode == 1:
                n = body.varint()
                numbers = body.gaps(n)
                for number, step in zip(numbers, body.steps(n, size), strict=True):
                    new[members[number]] = step_up(old[members[number]], step, tag)
            elif mode == 2:
                assert body.varint() == len(members)
                for p, z in zip(members, body.planes(len(members), size), strict=True):
                    new[p] = step_up(old[p], unzigzag(z), tag)
    assert body.at == len(body.data)
    return new


def sections(reader: In) -> Iterator[tuple[int, int, int, In]]:
    while kind := reader.take(1)[0]:
        elements, visible = reader.varint(), reader.varint()
        yield kind, elements, visible, In(reader.take(reader.varint()))
    assert reader.at == len(reader.data)


def describe_spec(spec: Spec) -> bytes:
    name, tag, shape = spec
    raw = name.encode()
    return struct.pack("<IBB", len(raw), CODES[tag], len(shape)) + raw + struct.pack(f"<{len(shape)}Q", *shape)


def state_hash(raw: list[bytes], specs: list[Spec]) -> bytes:
    whole = blake3(b"swarm-state-1")
    for content, spec in zip(raw, specs, strict=True):
        whole.update(describe_spec(spec) + blake3(content).digest())
    return whole.digest()


def integers(state: dict[str, bytes], specs: list[Spec]) -> dict[int, list[int]]:
    return {n: list(struct.unpack(f"<{len(state[s[0]]) // width(s[1])}{' BH I   Q'[width(s[1])]}", state[s[0]]))
            for n, s in enumerate(specs)}  # fmt: skip


def naive_decode(
    data: bytes, specs: list[Spec], base: dict[str, bytes], history: dict[str, bytes] | None = None
) -> dict[str, bytes]:
    reader = In(data)
    assert reader.take(4) == b"SWC\x01"
    codec, flags, zero, tensors, state_bytes = struct.unpack("<BBHIQ", reader.take(16))
    layout_hash, result, base_hash = reader.take(8), reader.take(32), reader.take(32)
    assert zero == 0
    assert tensors == len(specs)
    assert layout_hash == blake3(b"swarm-layout-1" + b"".join(map(describe_spec, specs))).digest()[:8]
    assert (base_hash == bytes(32)) == (codec == 2)
    history_hash = reader.take(32) if flags & 2 else None
    assert (history_hash is None) == (history is None)
    actions = reader.stream(tensors)
    same_as = {n: reader.varint() for n in range(tensors) if actions[n] == 2}
    checks = {n: reader.take(4) for n in range(tensors) if actions[n] == 1}
    old = integers(base, specs)
    before = None
    if history is not None:
        assert state_hash([history[spec[0]] for spec in specs], specs) == history_hash
        before = integers(history, specs)
    run = [(n, p) for n in range(tensors) if actions[n] == 1 for p in range(len(old[n]))]
    new, start = {n: list(values) for n, values in old.items()}, 0
    for kind, elements, visible, body in sections(reader):
        part = run[start : start + elements]
        tag = specs[part[0][0]][1]
        values = [old[n][p] for n, p in part]
        last = [before[n][p] for n, p in part] if before else None
        for (n, p), x in zip(part, decode_section(kind, visible, body, values, tag, last), strict=True):
            new[n][p] = x
        start += elements
    assert start == len(run)
    for n, target in same_as.items():
        new[n] = new[target]
    raw = {n: b"".join(x.to_bytes(width(specs[n][1]), "little") for x in values) for n, values in new.items()}
    assert sum(map(len, raw.values())) == state_bytes
    hashes = {n: blake3(content).digest() for n, content in raw.items()}
    assert all(hashes[n][:4] == check for n, check in checks.items())
    assert state_hash(list(raw.values()), specs) == result
    return {spec[0]: raw[n] for n, spec in enumerate(specs)}


def encode_golden(name: str) -> bytes:
    new, base = golden_states()
    if name == "dense":
        return sc.encode_dense(new)
    if name == "absolute":
        return sc.encode_patch(new, base, absolute=True)
    if name == "history":
        return sc.encode_patch(new, base, level="best", history=golden_history())
    return sc.encode_patch(new, base, level="fast" if name == "fast" else "default")


NAMES = ["dense", "fast", "default", "absolute", "history"]


def raw_states(name: str) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, bytes] | None]:
    """The new state, what a decoder of that file starts from, and the history if it needs one."""
    new, base = golden_states()
    old = {tensor: bytes(array.nbytes) if name == "dense" else array.tobytes() for tensor, array in base.items()}
    history = {tensor: array.tobytes() for tensor, array in golden_history().items()} if name == "history" else None
    return {tensor: array.tobytes() for tensor, array in new.items()}, old, history


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_decoder_agrees(name: str) -> None:
    _, base = golden_states()
    data = (GOLDEN / f"{name}.swc").read_bytes()
    expected, old, history = raw_states(name)
    assert naive_decode(data, specs_of(base), old, history) == expected
    if name == "dense":
        ours = sc.decode_dense(data, sc.Layout.of(base))
    else:
        ours = sc.apply_patch(data, base, history=golden_history())
    assert {tensor: array.tobytes() for tensor, array in ours.items()} == expected


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_today_is_read_by_the_naive_decoder(name: str) -> None:
    expected, old, history = raw_states(name)
    assert naive_decode(encode_golden(name), specs_of(golden_states()[1]), old, history) == expected


def test_the_golden_patches_use_classes_and_every_kind_of_section() -> None:
    kinds = set()
    for name in NAMES:
        reader = In((GOLDEN / f"{name}.swc").read_bytes())
        reader.take(124 if name == "history" else 92)
        specs = specs_of(golden_states()[0])
        actions = reader.stream(len(specs))
        for _ in range(actions.count(2)):
            reader.varint()
        reader.take(4 * actions.count(1))
        kinds |= {kind for kind, *_ in sections(reader)}
    assert kinds == {1, 2, 3, 4, 5}
