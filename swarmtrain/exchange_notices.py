"""Says why exchanges do not happen: one line per reason, and one when they happen again.

A peer trains on alone whatever the others do, so silence would look like success.  The reasons differ in what a user
can do about them: nobody is there, all are busy, they cannot be reached, or they refuse.
"""

from __future__ import annotations

from collections import Counter

from swarm_peer import errors
from swarm_peer.identity import short

# Rounds without an exchange before anything is said: one busy partner is not worth a line.
PATIENCE_ROUNDS = 3
MAX_COUNTED_REASONS = 64  # strangers choose the codes of their refusals
_BUSY = frozenset({"busy", "too-soon", "not-ready"})
# The outcomes that a connection's errors give: the class names of `swarm_peer.errors` in lower case.
_UNREACHABLE = frozenset(
    error.__name__.lower()
    for error in (
        errors.AddressUnresolvable,
        errors.Banned,
        errors.ConnectionRefused,
        errors.ConnectTimedOut,
        errors.DeadlineExpired,
        errors.Disconnected,
        errors.NotSwarmtrain,
        errors.Unreachable,
        errors.WrongIdentity,
    )
)


class ExchangeNotices:
    """Takes in rounds and exchanges as they end; returns the lines worth saying."""

    def __init__(self) -> None:
        self._rounds = 0  # closed since the last exchange that mixed
        self._failures: Counter[str] = Counter()  # since then, by kind
        self._refusals: Counter[str] = Counter()  # since then, by "peer: reason"
        self._said = ""

    def exchange_ended(self, partner: bytes, outcome: str) -> str | None:
        """Takes in one exchange or attempt; `outcome` is "mixed" or a short reason."""
        if outcome == "mixed":
            said, self._said = self._said, ""
            self._rounds = 0
            self._failures.clear()
            self._refusals.clear()
            return f"exchanging now, with peer {short(partner)}" if said else None
        if outcome in _BUSY:
            self._failures["busy"] += 1
        elif outcome in _UNREACHABLE:
            self._failures["unreachable"] += 1
        else:
            self._failures["refused"] += 1
            if len(self._refusals) < MAX_COUNTED_REASONS:
                self._refusals[f"{outcome} (peer {short(partner)})"] += 1
        return None

    def round_closed(self, candidates: int) -> str | None:
        """Takes in the end of a round, with the number of live training peers besides this one."""
        self._rounds += 1
        if self._rounds < PATIENCE_ROUNDS:
            return None
        kind = self._kind(candidates)
        if not kind or kind == self._said:
            return None
        self._said = kind
        return self._line(kind, candidates)

    def _kind(self, candidates: int) -> str:
        if candidates == 0:
            return "alone"
        return max(self._failures, key=lambda kind: self._failures[kind], default="")

    def _line(self, kind: str, candidates: int) -> str:
        peers = "1 other peer trains" if candidates == 1 else f"{candidates} other peers train"
        quiet = f"no exchange for {self._rounds} rounds: {peers}"
        match kind:
            case "alone":
                return "no other training peer of this run is in sight: training on alone, and looking for others"
            case "busy":
                return f"{quiet}, busy when asked; training on"
            case "unreachable":
                return f"{quiet}, but cannot be reached; training on. Is the network up?"
            case _:
                reason = self._refusals.most_common(1)[0][0]
                return f"{quiet}, but nothing is accepted, mostly: {reason}; training on"
