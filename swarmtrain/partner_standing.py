"""Which partners are left alone for a while: those with whom an exchange has failed, longer each time."""

from __future__ import annotations

from swarmtrain.round_pace import RoundPace

MAX_BACKOFFS = 1024  # strangers choose, by failing, the peers that we remember


class PartnerStanding:
    """Remembers until when each failed partner is left alone, and for how long it was; times in seconds."""

    def __init__(self, pace: RoundPace, *, backoff_s: float) -> None:
        """`backoff_s` is the first pause, but no more than a round of `pace`."""
        self._pace = pace
        self._backoff_s = backoff_s
        self._backoff_until: dict[bytes, tuple[float, float]] = {}  # with the last pause; oldest first

    def __len__(self) -> int:
        return len(self._backoff_until)

    def lower(self, peer_id: bytes, now_s: float) -> None:
        """Leaves a partner alone from now on.

        The first time for about a round: in many rounds two replicas drift so far apart that the next meeting fails
        for that alone.
        """
        _, before = self._backoff_until.pop(peer_id, (0.0, 0.0))
        first = self._pace.at_most_a_round(self._backoff_s)
        pause = min(before * 2 or first, 64 * self._backoff_s)
        self._backoff_until[peer_id] = (now_s + pause, pause)
        while len(self._backoff_until) > MAX_BACKOFFS:
            del self._backoff_until[next(iter(self._backoff_until))]

    def restore(self, peer_id: bytes) -> None:
        """Forgets the failures of a partner with whom an exchange has succeeded."""
        self._backoff_until.pop(peer_id, None)

    def is_backed_off(self, peer_id: bytes, now_s: float) -> bool:
        return self.backed_off_until(peer_id) > now_s

    def backed_off_until(self, peer_id: bytes) -> float:
        """Returns until when a partner is left alone; 0 for one in good standing."""
        return self._backoff_until.get(peer_id, (0.0, 0.0))[0]
