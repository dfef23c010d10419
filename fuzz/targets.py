"""All targets by name, and their corpus."""

from __future__ import annotations

from pathlib import Path

from fuzz import admission, bridge, codecs, connection, discovery, training
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for family in (admission, bridge, codecs, connection, discovery, training)
    for target in family.TARGETS
}
CORPUS = Path(__file__).parent / "corpus"


def read_corpus(name: str) -> list[bytes]:
    """Returns the committed inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def write_corpus() -> None:
    """Writes every target's valid encodings into the corpus; what is there under other names stays."""
    for target in TARGETS.values():
        folder = CORPUS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        for seed, data in target.seeds().items():
            (folder / f"{seed}.bin").write_bytes(data)


if __name__ == "__main__":
    write_corpus()
