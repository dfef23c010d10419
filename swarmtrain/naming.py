"""Names of runs, as people type them: ``NAME``, ``NAME@fingerprint`` or the run id's 64 hex digits.

A run's name is chosen by its creator and is not unique. The fingerprint (first 8 hex digits of the BLAKE3 hash
of the creator's public key) tells two creators' runs of one name apart; the run id names one run for good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from swarmtrain.errors import InviteError, one_line

NAME_PATTERN = r"[a-z0-9][a-z0-9-]{0,62}"
NAME_RULE = "1 to 63 of a-z, 0-9 and '-', not starting with '-'"

_NAME = re.compile(NAME_PATTERN)
_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_RUN_ID = re.compile(r"[0-9a-f]{64}")


def is_run_name(text: str) -> bool:
    """True if ``text`` may be a run's name."""
    return _NAME.fullmatch(text) is not None


def fingerprint(creator: bytes) -> str:
    """Returns the 8 hex digits that stand for a creator's 32-byte public key in ``NAME@fingerprint``."""
    return blake3(creator).hexdigest(length=4)


def parse_peer_id_prefix(text: str) -> str:
    """Returns a peer id, or at least its first 8 hex digits, in lower case. Raises :class:`InviteError`."""
    if not re.fullmatch(r"[0-9a-fA-F]{8,64}", text):
        raise InviteError(f"not a peer id: {one_line(text, 80)!r} (64 hex digits, or at least the first 8)")
    return text.lower()


@dataclass(frozen=True, slots=True)
class RunReference:
    """What a user gave to say which run is meant. At least one of ``name`` and ``run_id`` is set."""

    name: str | None = None
    fingerprint: str | None = None
    run_id: bytes | None = None

    def matches(self, name: str, creator: bytes, run_id: bytes) -> bool:
        """True if the run of this name, creator key and id is one that the reference may mean."""
        return (
            self.name in (None, name)
            and self.fingerprint in (None, fingerprint(creator))
            and self.run_id in (None, run_id)
        )

    def __str__(self) -> str:
        if self.name is None:
            return (self.run_id or b"").hex()
        return self.name if self.fingerprint is None else f"{self.name}@{self.fingerprint}"


def parse_run_reference(text: str) -> RunReference:
    """Reads ``NAME``, ``NAME@fingerprint`` or a 64-digit run id.

    Raises:
        InviteError: none of the three forms.
    """
    text = text.strip()
    if _RUN_ID.fullmatch(text.lower()):
        return RunReference(run_id=bytes.fromhex(text))
    name, at, mark = text.partition("@")
    if not is_run_name(name):
        raise InviteError(f"not a run's name: {one_line(text, 80)!r} (a name is {NAME_RULE})")
    if at and not _FINGERPRINT.fullmatch(mark):
        raise InviteError(f"not a fingerprint: {one_line(mark, 80)!r} (NAME@fingerprint has 8 hex digits, a-f and 0-9)")
    return RunReference(name=name, fingerprint=mark or None)
