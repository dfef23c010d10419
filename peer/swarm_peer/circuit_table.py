"""What a relay keeps account of: who may be called through it, and which circuits there are. No I/O, no clock.

Invariants: at most one circuit per pair of peers, and never more in all, nor per host at either end, than the limits
say. A token opens one end of one circuit once, and for a short time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from swarm_peer.addresses import LOOPBACK, Address, host_group
from swarm_peer.errors import Refusal
from swarm_peer.identity import PeerId
from swarm_peer.relay_messages import LEASE_S, TOKEN_BYTES
from swarm_peer.relay_turns import HOUR_S


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay gives to others. Rates count what enters it; the same leaves it again.

    `circuits_per_host` does not hold for loopback. A client that has had `hourly_share` of what the relay can pass in
    an hour stands behind the others.
    """

    bytes_per_s: float = 10e6 / 8
    circuit_bytes_per_s: float | None = None  # None: one circuit may use all that the others leave
    hourly_share: float = 0.25
    reservations: int = 256
    circuits: int = 32
    circuits_per_host: int = 8
    idle_s: float = 60.0
    join_s: float = 10.0

    @property
    def client_bytes_per_hour(self) -> float:
        return self.hourly_share * HOUR_S * self.bytes_per_s


@dataclass(slots=True, eq=False)
class Circuit:
    """Two ends: 0 is the peer that asked, 1 the one that was asked for."""

    peers: tuple[PeerId, PeerId]
    groups: tuple[str, str]
    tokens: tuple[bytes, bytes]
    opened_at: float
    joined: list[bool] = field(default_factory=lambda: [False, False])
    is_closed: bool = False
    on_close: Callable[[], None] = lambda: None

    @property
    def client(self) -> Hashable:
        """On whose account the bytes go: the host that asked; on loopback, where all are one host, the circuit."""
        return self.tokens[0] if self.groups[0] == LOOPBACK else self.groups[0]

    @property
    def is_complete(self) -> bool:
        return all(self.joined)


class CircuitTable:
    """See the module. `now` is monotonic seconds."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._reserved: dict[PeerId, float] = {}  # until
        self._circuits: dict[frozenset[PeerId], Circuit] = {}
        self._tokens: dict[bytes, tuple[Circuit, int]] = {}

    def __len__(self) -> int:
        return len(self._circuits)

    @property
    def reserved(self) -> int:
        """How many peers can be called through this relay, or could a moment ago."""
        return len(self._reserved)

    def reserve(self, peer: PeerId, now: float) -> None:
        """Lets a peer be called through this relay. Raises `Refusal("relay-full")`."""
        if peer not in self._reserved and len(self._reserved) >= self._limits.reservations:
            self._reserved = {who: until for who, until in self._reserved.items() if until > now}
            if len(self._reserved) >= self._limits.reservations:
                raise Refusal("relay-full", "no more reservations; try another relay")
        self._reserved[peer] = now + LEASE_S

    def forget(self, peer: PeerId) -> None:
        """A peer that had reserved is gone."""
        self._reserved.pop(peer, None)

    def is_reserved(self, peer: PeerId, now: float) -> bool:
        """Whether a peer wants to be called through this relay."""
        return self._reserved.get(peer, now) > now

    def open(self, dialer: tuple[PeerId, Address], target: tuple[PeerId, Address], now: float) -> Circuit:
        """Makes a circuit between two peers who are seen at these addresses.

        Raises `Refusal`: "pair-busy" while another of the pair begins, "relay-full".
        """
        pair = frozenset((dialer[0], target[0]))
        if (known := self._circuits.get(pair)) is not None:
            if not known.is_complete and now < known.opened_at + self._limits.join_s:
                raise Refusal("pair-busy", "a circuit between these two is being opened")
            self.close(known)  # whoever asks again has lost its end
        groups = (host_group(dialer[1].host), host_group(target[1].host))
        if len(self._circuits) >= self._limits.circuits or any(map(self._is_group_full, groups)):
            raise Refusal("relay-full", "no more circuits; try another relay")
        tokens = (secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES))
        circuit = Circuit((dialer[0], target[0]), groups, tokens, now)
        self._circuits[pair] = circuit
        for end, token in enumerate(tokens):
            self._tokens[token] = (circuit, end)
        return circuit

    def join(self, token: bytes, now: float) -> tuple[Circuit, int] | None:
        """The circuit and the end that a token opens, if it does."""
        found = self._tokens.pop(token, None)
        if found is None or now >= found[0].opened_at + self._limits.join_s:
            return None
        found[0].joined[found[1]] = True
        return found

    def close(self, circuit: Circuit) -> None:
        """Ends a circuit. Does nothing the second time."""
        if circuit.is_closed:
            return
        circuit.is_closed = True
        for token in circuit.tokens:
            self._tokens.pop(token, None)
        self._circuits.pop(frozenset(circuit.peers), None)
        circuit.on_close()

    def expire(self, now: float) -> None:
        """Ends circuits whose ends did not come, and reservations that were not renewed. Call it every few seconds."""
        for circuit in list(self._circuits.values()):
            if not circuit.is_complete and now >= circuit.opened_at + self._limits.join_s:
                self.close(circuit)
        self._reserved = {who: until for who, until in self._reserved.items() if until > now}

    def _is_group_full(self, group: str) -> bool:
        if group == LOOPBACK:
            return False
        return sum(group in circuit.groups for circuit in self._circuits.values()) >= self._limits.circuits_per_host
