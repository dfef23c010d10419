"""At which address and port others see a connection of ours: what tells one kind of NAT from another.

    we                                     somebody
    greeting "SWO1"  ------------------>   a new connection, without TLS
                     <------------------   [host, port] from which it came

The answer is a hint that nobody proves, about an address that whoever answers has in hand already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from swarm_peer.addresses import Address, Host, Port, host_group
from swarm_peer.errors import NotSwarmtrain
from swarm_peer.raw import RawConnection, RawTransport, close_now
from swarm_peer.storage import RateLimiter

_MAGIC: Final = b"SWO1"
_BODY: Final = b"?"
_MAX_ANSWER_BYTES: Final = 300
_LINGER_S: Final = 5.0


class Observed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a connection came from."""

    host: Host
    port: Port


@dataclass(frozen=True, slots=True)
class Ends:
    """Our own end of a connection, as we know it and as the other side sees it."""

    local: Address
    observed: Address


class Observer:
    """Answers those who ask, each host once a second (burst 20)."""

    def __init__(self, transport: RawTransport) -> None:
        self._limiter = RateLimiter(rate_per_s=1.0, burst=20.0)
        transport.on_greeting(_MAGIC, self._answer)

    async def _answer(self, raw: RawConnection, body: bytes) -> None:
        group = host_group(raw.remote.host).encode()
        if body != _BODY or not self._limiter.allow(group, trio.current_time()):
            return
        try:
            await raw.stream.send_all(msgspec.msgpack.encode(Observed(raw.remote.host, raw.remote.port)))
            await raw.stream.send_eof()
            with trio.move_on_after(_LINGER_S):
                await raw.stream.receive_some(1)  # closing first could take the answer with it
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


async def observe(transport: RawTransport, address: Address, *, deadline_s: float = 10.0) -> Ends:
    """Asks whoever listens at `address`. Raises a subclass of `ConnectError`."""
    raw = await transport.greet(address, _MAGIC, _BODY, deadline_s)
    answer = b""
    try:
        with trio.move_on_after(deadline_s):
            while len(answer) <= _MAX_ANSWER_BYTES and (part := await raw.stream.receive_some(_MAX_ANSWER_BYTES)):
                answer += part
        seen = msgspec.msgpack.decode(answer[:_MAX_ANSWER_BYTES], type=Observed)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        raise NotSwarmtrain(address, "it hung up") from None
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise NotSwarmtrain(address, "no answer to an observation") from None
    finally:
        await close_now(raw.stream)
    return Ends(raw.local, Address(seen.host, seen.port))
