"""Who is in a run, as one peer knows it, free of I/O: the peers admitted so far, the newest list of revocations, and
the invitations that have been redeemed here.

What is believed and why stands in `certificates.py`. `now` is wall-clock seconds. Memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from swarm_peer.addresses import PeerIdBytes
from swarm_peer.certificates import (
    BAD_CERTIFICATE,
    EXPIRED,
    MAX_USES,
    NOT_INTRODUCED,
    NOT_LISTED,
    REDEEM_SKEW_S,
    REVOKED,
    SKEW_S,
    TIME_CAP,
    USED,
    AdmissionMode,
    Chain,
    Charter,
    Revocations,
    Time,
    check_standing,
    decode_typed,
    verify_chain,
    verify_links,
    verify_revocations,
    witness,
)
from swarm_peer.errors import Refusal
from swarm_peer.identity import Identity, PeerId, peer_id_of

_MAX_ADMITTED: Final = 16_384
_MAX_TICKETS: Final = 16_384
_MAX_REDEMPTIONS_BYTES: Final = 1 << 26


class Admission:
    """Who is in one run, as one peer knows it. `now` is wall-clock seconds; memory is bounded."""

    def __init__(self, charter: Charter, own_id: PeerId, chain: Chain = ()) -> None:
        self.charter = charter
        self.chain = chain
        self._own_id = own_id
        self._admitted: OrderedDict[bytes, Chain] = OrderedDict()
        self._revoked: frozenset[bytes] = frozenset()
        self._expelled: OrderedDict[bytes, None] = OrderedDict()  # also those whose inviters were
        self.revocations: Revocations | None = None

    @property
    def seq(self) -> int:
        """The number of the newest list of revocations that is known; 0 for none."""
        return self.revocations.seq if self.revocations else 0

    @property
    def needs_introduction(self) -> bool:
        """Whether peers have to show certificates; with a list or an open door the peer id is enough."""
        return self.charter.mode is AdmissionMode.INVITE

    def admit(self, subject: bytes, chain: Chain, now: float) -> None:
        """Takes a peer's certificates. Raises `Refusal` with one of `DENIALS`, and then keeps nothing."""
        if self._admitted.get(subject) == chain and chain:
            check_standing(chain, now, self._revoked)  # the signatures are known to be good
            return
        try:
            verify_chain(self.charter, chain, subject, now, self._revoked)
        except Refusal as refusal:
            if refusal.code == REVOKED:
                self._expel(subject)
            raise
        self._expelled.pop(subject, None)
        self._admitted[subject] = chain
        self._admitted.move_to_end(subject)
        if len(self._admitted) > _MAX_ADMITTED:
            self._admitted.popitem(last=False)

    def require(self, subject: bytes, now: float) -> None:
        """Raises `Refusal` unless the peer is in: with one of `DENIALS`, or because it must introduce itself."""
        if self.charter.mode is AdmissionMode.OPEN or subject == peer_id_of(self.charter.creator):
            return
        if subject in self._revoked:
            raise Refusal(REVOKED, "this peer was revoked by the run's creator")
        if self.charter.mode is AdmissionMode.ALLOWLIST:
            if subject not in self.charter.listed:
                raise Refusal(NOT_LISTED, "this run admits the peers on its list")
            return
        chain = self._admitted.get(subject)
        if chain is None:
            raise Refusal(NOT_INTRODUCED, "show your certificate first")
        check_standing(chain, now, self._revoked)

    def is_admitted(self, subject: bytes, now: float) -> bool:
        """Whether the peer is in, as far as is known here."""
        try:
            self.require(subject, now)
        except Refusal:
            return False
        return True

    def require_self(self, now: float) -> None:
        """Raises `Refusal` with one of `DENIALS` unless this peer itself is in."""
        if self.needs_introduction:
            verify_chain(self.charter, self.chain, self._own_id, now, self._revoked)
        else:
            self.require(self._own_id, now)

    def chain_of(self, subject: bytes) -> Chain | None:
        """The certificates of a peer that is in, ours included; None where they are not known."""
        return self.chain if subject == self._own_id else self._admitted.get(subject)

    @property
    def revoked(self) -> frozenset[bytes]:
        """The ids on the newest list."""
        return self._revoked

    def may_read(self, subject: bytes, now: float) -> bool:
        """Whether a peer gets the list of revocations: members do, and those whom it puts out."""
        return subject in self._revoked or subject in self._expelled or self.is_admitted(subject, now)

    def take(self, revocations: Revocations) -> frozenset[bytes] | None:
        """Takes a list from anyone, if it is the creator's and goes before ours; else None.

        Returns who is out now: the ids on the list, and the peers that those had invited.
        """
        held = self.revocations
        if held is not None and revocations.seq <= held.seq and not _goes_before(revocations, held):
            return None
        if not verify_revocations(self.charter, revocations):
            return None
        self.revocations = revocations
        self._revoked = frozenset(revocations.revoked)
        out = [who for who, chain in self._admitted.items() if any(c.subject in self._revoked for c in chain)]
        for who in out:
            del self._admitted[who]
            self._expel(who)
        return self._revoked | frozenset(out)

    def _expel(self, subject: bytes) -> None:
        self._expelled[subject] = None
        if len(self._expelled) > _MAX_ADMITTED:
            self._expelled.popitem(last=False)


def _goes_before(new: Revocations, held: Revocations) -> bool:
    """Of two lists of one number, every peer ends up with the same: the longer, then the smaller bytes."""
    if new.seq != held.seq:
        return False
    return (-len(new.revoked), new.signed_bytes()) < (-len(held.revoked), held.signed_bytes())


class _Redeemed(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    forget_after: Time
    subjects: Annotated[list[PeerIdBytes], msgspec.Meta(max_length=MAX_USES)] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class Redemptions:
    """Which tickets this peer has redeemed, for whom. Keep `encode()` on disk before the answer goes out."""

    used: dict[bytes, _Redeemed] = field(default_factory=dict)

    def redeem(
        self, redeemer: Identity, charter: Charter, chain: Chain, subject: bytes, now: float, revoked: frozenset[bytes]
    ) -> Chain:
        """Counts a ticket's use and witnesses the claim. The same peer may ask again, at no cost.

        Raises `Refusal` with one of `DENIALS`.
        """
        if len(chain) < 2 or not chain[-2].is_ticket or chain[-1].is_ticket or chain[-1].subject != subject:
            raise Refusal(BAD_CERTIFICATE, "this is no claim to an invitation")
        ticket = chain[-2]
        if ticket.redeemer != redeemer.peer_id:
            raise Refusal(BAD_CERTIFICATE, "this invitation is redeemed at another peer")
        verify_links(charter, chain, is_witnessed=False)
        check_standing(chain, now, revoked)
        if now > ticket.redeem_by + REDEEM_SKEW_S:
            raise Refusal(EXPIRED, "the invitation has expired")
        entry = self.used.get(ticket.subject) or _Redeemed(min(ticket.redeem_by + 2 * SKEW_S, TIME_CAP))
        if subject not in entry.subjects:
            if len(entry.subjects) >= ticket.uses:
                raise Refusal(USED, "the invitation has been used")
            if not entry.subjects:
                self._make_room(now)
            entry.subjects.append(subject)
            self.used[ticket.subject] = entry
        return witness(redeemer, chain)

    def encode(self) -> bytes:
        """What `decode_redemptions` reads."""
        return msgspec.msgpack.encode(self.used)

    def _make_room(self, now: float) -> None:
        if len(self.used) >= _MAX_TICKETS:
            self.used = {who: entry for who, entry in self.used.items() if entry.forget_after > now}
        if len(self.used) >= _MAX_TICKETS:
            raise Refusal("busy", "too many invitations are open here")


def decode_redemptions(data: bytes) -> Redemptions:
    """Reads what `Redemptions.encode` wrote. Raises `ValueError`."""
    return Redemptions(decode_typed(data, dict[bytes, _Redeemed], _MAX_REDEMPTIONS_BYTES))
