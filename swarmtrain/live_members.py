"""Who else is in the run right now, and where they stand, as far as this peer's membership knows."""

from __future__ import annotations

import statistics

from swarm_peer.addresses import Contact
from swarm_peer.members import Member
from swarm_peer.membership import Membership
from swarm_peer.records import PeerState

from swarmtrain.status import decode_status, estimate_step


class LiveMembers:
    """The other members of a run; to the exchanger they are the `Partners`."""

    def __init__(self, membership: Membership, *, tokens_per_step: int) -> None:
        self._membership = membership
        self._tokens_per_step = tokens_per_step

    def training(self) -> list[Member]:
        return [member for member in self._membership.live() if member.state is PeerState.TRAINING]

    def finished(self) -> list[Member]:
        return [member for member in self._membership.live() if member.state is PeerState.FINISHED]

    def candidates(self) -> list[Contact]:
        """`Partners`: live training peers."""
        return [member.contact for member in self.training()]

    def contact(self, peer_id: bytes) -> Contact:
        """`Partners`: how to reach a peer that has contacted us; its connection is open in any case."""
        for member in self._membership.members():
            if member.contact.peer_id == peer_id:
                return member.contact
        return Contact(peer_id, ())

    def swarm_step(self) -> int | None:
        """`Partners`: the median step of the other live training peers, as it should be by now."""
        steps = [self._estimated_step(member) for member in self.training()]
        return int(statistics.median(steps)) if steps else None

    def contacts(self) -> list[Contact]:
        """How to reach those that are there as far as is known."""
        return [member.contact for member in self._membership.live()]

    def silent_s(self) -> float | None:
        """Seconds since anybody else's newest sign of life was made; None while nobody was ever heard."""
        return min((m.age_s for m in self._membership.members() if m.state is not PeerState.LEFT), default=None)

    def none_trains(self) -> bool:
        return not self.training()

    def all_have_merged(self) -> bool:
        """False while someone may still need our final replica."""
        return all(decode_status(member.status).merged for member in self.finished())

    def _estimated_step(self, member: Member) -> int:
        return estimate_step(decode_status(member.status), member.age_s, self._tokens_per_step)
