"""Every error that leaves this package.

Foreign exceptions (OSError, ssl.SSLError, msgspec, trio) are translated where they arise, so a caller catches
`PeerError` and nothing else. Each message is one line that says what failed, why, and what to do about it.
Text that came from a remote is escaped and cut before it enters a message.
"""

from __future__ import annotations

import re

_CODE = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_MAX_DETAIL_CHARS = 200


def sanitise(text: str, max_chars: int = _MAX_DETAIL_CHARS) -> str:
    """Makes a stranger's text safe for a log line: printable characters only, at most `max_chars`."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:max_chars])
    return shown if len(text) <= max_chars else shown[: max_chars - 1] + "…"


class PeerError(Exception):
    """Root of all errors of this package."""


class ConnectError(PeerError):
    """No connection came about. `address` is what was dialled (an `Address`, or text for a peer id)."""

    template = "cannot connect to {address}: {reason}"

    def __init__(self, address: object, reason: str = "") -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return self.template.format(address=self.address, reason=self.reason)


class AddressUnresolvable(ConnectError):
    """The host name has no address."""

    template = "cannot resolve {address}: {reason}; check the spelling of the host name, and your DNS"


class Unreachable(ConnectError):
    """No route, or no address known."""

    template = "cannot reach {address}: {reason}; check your network, and that the peer's address is current"


class ConnectionRefused(ConnectError):
    """The host answered that nothing listens on this port."""

    template = "{address} refused the connection{reason}; start the peer there, or check the port"


class ConnectTimedOut(ConnectError):
    """The deadline passed before the connection stood."""

    template = "{address} did not answer: {reason}; check that the peer runs and no firewall or NAT blocks it"


class WrongIdentity(ConnectError):
    """The remote proved another identity than the expected one."""

    def __init__(self, address: object, expected: bytes, found: bytes) -> None:
        super().__init__(address)
        self.args = (address, expected, found)
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"{self.address} is peer {self.found.hex()[:8]}, not peer {self.expected.hex()[:8]} as expected; "
            "ask for a current address or invite link"
        )


class DialledSelf(ConnectError):
    """The remote has our own identity."""

    template = (
        "{address} has our own peer id: it is this peer itself or one that runs on a copy of its key file; "
        "dial another address, and give every peer a key file of its own"
    )


class NotSwarmtrain(ConnectError):
    """Something answered, but not as a swarmtrain peer of this protocol version does."""

    template = "{address} does not answer as a swarmtrain peer: {reason}; check host and port"


class Banned(ConnectError):
    """We refuse contact with this peer for now."""

    template = "peer {address} is banned here: {reason}; the ban ends by itself, or when this peer restarts"


class ListenError(PeerError):
    """A listening address could not be opened."""


class AddressInUse(ListenError):
    """Another process has the port. `port` names it."""

    def __init__(self, address: object, port: int) -> None:
        super().__init__(address, port)
        self.address = address
        self.port = port

    def __str__(self) -> str:
        return f"port {self.port} is in use ({self.address}); stop the other program or listen on another port"


class ProtocolError(PeerError):
    """The remote broke the protocol. `reason` is a short token for counters, such as "oversized-frame"."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = sanitise(detail)

    def __str__(self) -> str:
        return f"protocol violation: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class DeadlineExpired(PeerError):
    """A call did not end in time, here or at the remote."""


class Disconnected(PeerError):
    """The connection ended while it was needed. The next call dials again."""


class Refusal(PeerError):
    """The remote's handler said no; handlers raise it to say no.

    `code` is a short token (`[a-z0-9-]{1,40}`), `detail` at most 200 printable characters for people.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        code = code if _CODE.fullmatch(code) else "malformed"
        super().__init__(code, detail)
        self.code = code
        self.detail = sanitise(detail)

    def __str__(self) -> str:
        return f"refused: {self.code}" + (f" ({self.detail})" if self.detail else "")


class NotAMember(PeerError):
    """The remote did not show that it may take part in the run. `reason` is one of `certificates.DENIALS`."""

    def __init__(self, peer_id: bytes, reason: str, detail: str = "") -> None:
        super().__init__(peer_id, reason, detail)
        self.peer_id = peer_id
        self.reason = reason
        self.detail = sanitise(detail)

    def __str__(self) -> str:
        return f"peer {self.peer_id.hex()[:8]} is not in this run: {self.reason}" + (
            f" ({self.detail})" if self.detail else ""
        )


class IdentityFileError(PeerError):
    """The identity key file cannot be used; the message names the file and the remedy."""


class RecordInvalid(PeerError):
    """A signed record failed a check. `reason` is a short token for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = sanitise(detail)

    def __str__(self) -> str:
        return f"invalid record: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class BlobUnavailable(PeerError):
    """No holder delivered the whole blob."""


class BlobInvalid(PeerError):
    """A holder sent bytes that do not match the blob's hash."""
