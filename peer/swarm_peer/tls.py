"""Mutual authentication in TLS 1.3 between strangers, with the standard library's `ssl` alone.

Each peer has a self-signed Ed25519 certificate; the peer id is the hash of its public key. Python's `ssl` cannot
ask for a client certificate without verifying it against known anchors, so the client sends its certificate in
clear before the ClientHello (the preamble), and the server makes a context whose only trust anchor is that
certificate. The TLS handshake then proves that the client holds the key (RFC 8446 section 4.4.3), without an
extra round trip. An observer learns the client's peer id.

`TlsStream` is a lean stream over `ssl.MemoryBIO`. It reads many TLS records per call, which halves the CPU time
of `trio.SSLStream`, and it shows the gate before sending that priorities need.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import struct
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import cast

import trio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import NameOID

from swarm_peer.errors import ProtocolError
from swarm_peer.identity import Identity, PeerId, peer_id_of
from swarm_peer.tcp_info import round_trip_s

ALPN = "swarmtrain/1"
LANE_ALPN = "swarmtrain-lane/1"  # a further connection between the same peers, for bulk
MAX_CERTIFICATE_BYTES = 1024
_PREAMBLE = struct.Struct("!4sH")
PREAMBLE_BYTES = _PREAMBLE.size
PREAMBLE_MAGIC = b"SWT1"
# A read takes as much as fits. The buffer grows while it comes back full: most connections are quiet, and a
# large buffer for each would be most of their memory.
_MIN_READ_BYTES = 16 * 1024
_MAX_READ_BYTES = 256 * 1024
_MAX_CONTEXTS = 256


def make_certificate(identity: Identity) -> bytes:
    """The peer's self-signed certificate, DER. It carries the public key and nothing else of meaning.

    It is valid for all time: home clocks are wrong, and the identity is the key.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarmtrain peer")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.private_key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(identity.private_key.public_key()), critical=False)
        .sign(identity.private_key, None)
    )
    return certificate.public_bytes(Encoding.DER)


def read_preamble(head: bytes, known: Container[bytes] = (PREAMBLE_MAGIC,)) -> tuple[bytes, int]:
    """What the first `PREAMBLE_BYTES` of a stranger's connection say: which greeting, and how many bytes follow.

    Raises `ProtocolError("bad-preamble")`.
    """
    magic, length = _PREAMBLE.unpack(head)
    if magic not in known:
        raise ProtocolError("bad-preamble")
    if not 0 < length <= MAX_CERTIFICATE_BYTES:
        raise ProtocolError("bad-preamble", f"body of {length} bytes")
    return magic, length


def read_certificate(der: bytes) -> PeerId:
    """The peer id that a stranger's certificate claims. Raises `ProtocolError("bad-certificate")`.

    The claim is worth nothing until a TLS handshake has proved possession of the key.
    """
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ProtocolError("bad-certificate", f"{len(der)} bytes")
    try:
        with warnings.catch_warnings():
            # A stranger must not be able to put lines on our terminal (a serial number of zero is worth a warning).
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise ProtocolError("bad-certificate", "not an Ed25519 key")
        key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
        raise ProtocolError("bad-certificate", type(error).__name__) from None
    return peer_id_of(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


class Credentials:
    """An identity's certificate and TLS contexts. Making a context costs about 4 ms, so they are kept."""

    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self.certificate = make_certificate(identity)
        self._key_pem = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._server_contexts: OrderedDict[bytes, ssl.SSLContext] = OrderedDict()
        self._client_contexts: dict[str, ssl.SSLContext] = {}

    @property
    def preamble(self) -> bytes:
        """What a client sends before its ClientHello."""
        return _PREAMBLE.pack(PREAMBLE_MAGIC, len(self.certificate)) + self.certificate

    def client_context(self, protocol: str = ALPN) -> ssl.SSLContext:
        """Verifies no chain: OpenSSL checks in every mode that the server holds its certificate's key, and
        the caller compares the peer id afterwards."""
        context = self._client_contexts.get(protocol)
        if context is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            self._prepare(context, protocol)
            self._client_contexts[protocol] = context
        return context

    def server_context(self, client_certificate: bytes) -> ssl.SSLContext:
        """Accepts the holder of exactly this certificate's key. Raises `ProtocolError("bad-certificate")`."""
        context = self._server_contexts.get(client_certificate)
        if context is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0  # no resumption, and no writes after the handshake
            self._prepare(context)
            try:
                context.load_verify_locations(cadata=client_certificate)
            except (ssl.SSLError, ValueError):
                raise ProtocolError("bad-certificate", "OpenSSL does not load it") from None
            self._server_contexts[client_certificate] = context
            if len(self._server_contexts) > _MAX_CONTEXTS:
                self._server_contexts.popitem(last=False)
        self._server_contexts.move_to_end(client_certificate)
        return context

    def _prepare(self, context: ssl.SSLContext, *protocols: str) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(protocols or (ALPN, LANE_ALPN))
        certificate_pem = ssl.DER_cert_to_PEM_cert(self.certificate).encode("ascii")
        with _secret_file(certificate_pem + self._key_pem) as path:
            context.load_cert_chain(path)


@contextlib.contextmanager
def _secret_file(content: bytes) -> Iterator[str]:
    """A path for `load_cert_chain`, which takes nothing else: memory where possible, else a 0600 file."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("swarmtrain-key", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "key.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        yield path


class TlsStream:
    """TLS 1.3 over a connected TCP stream, for one reader task and one writer task."""

    def __init__(self, tcp: trio.SocketStream, *, is_lane: bool = False) -> None:
        self.is_lane = is_lane  # of an accepted stream, what the client says
        self.bytes_sent = 0
        self.bytes_received = 0
        self._tcp = tcp
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._send_lock = trio.Lock()
        self._read_buffer = memoryview(bytearray(_MIN_READ_BYTES))

    async def connect(self, credentials: Credentials) -> PeerId:
        """Handshake as client. Returns the proved id of the server.

        Raises `ProtocolError` if the remote speaks otherwise, `trio.BrokenResourceError` if it hangs up.
        """
        self._tls = credentials.client_context(LANE_ALPN if self.is_lane else ALPN).wrap_bio(
            self._incoming, self._outgoing
        )
        await self._send_raw(credentials.preamble)
        await self._handshake()
        return read_certificate(self._remote_certificate())

    async def accept(self, credentials: Credentials) -> PeerId:
        """Handshake as server: preamble, then TLS. Returns the proved id of the client. Raises as `connect`."""
        _, certificate = await self.receive_greeting((PREAMBLE_MAGIC,))
        return await self.accept_greeted(credentials, certificate)

    async def receive_greeting(self, known: Container[bytes]) -> tuple[bytes, bytes]:
        """What a client sends first, in clear: 4 bytes that we know, and a body. Raises as `connect`."""
        magic, length = read_preamble(await self._receive_exactly(PREAMBLE_BYTES), known)
        return magic, await self._receive_exactly(length)

    async def accept_greeted(self, credentials: Credentials, certificate: bytes) -> PeerId:
        """The rest of `accept`, after a preamble with this certificate."""
        claimed = read_certificate(certificate)
        context = credentials.server_context(certificate)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        await self._handshake()
        # The anchor could also have signed a certificate of another key: only the very same one will do.
        if self._remote_certificate() != certificate:
            raise ProtocolError("bad-certificate", "not the one of the preamble")
        return claimed

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts and sends. A cancelled call leaves the stream unusable."""
        tls = self._ready()
        view = memoryview(data)
        try:
            while view:
                view = view[tls.write(view) :]
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(f"TLS: {error.reason}") from None
        await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        """Waits for the kernel to have sent most of what it has (trio sets TCP_NOTSENT_LOWAT)."""
        await self._tcp.wait_send_all_might_not_block()

    @property
    def rtt_s(self) -> float | None:
        """The kernel's measure of the round trip, if it has one."""
        return round_trip_s(self._tcp.socket)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Decrypted bytes, as many as are there up to 256 KiB; b"" when the remote has closed."""
        tls = self._ready()
        while True:
            size = 0
            limit = min(max_bytes or _MAX_READ_BYTES, len(self._read_buffer))
            try:
                while size < limit:
                    count = tls.read(limit - size, cast("bytearray", self._read_buffer[size:limit]))
                    if not count:
                        break
                    size += cast("int", count)
                else:
                    return bytes(self._read_buffer[:size])
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                if not size:
                    return b""
            except ssl.SSLError as error:
                if not size:
                    raise trio.BrokenResourceError(f"TLS: {error.reason}") from None
            if size:
                return bytes(self._read_buffer[:size])
            if self._outgoing.pending and not self._send_lock.locked():
                await self._flush()  # OpenSSL answers a KeyUpdate by itself; a sender takes it along
            if not await self._fill():
                return b""

    async def aclose(self) -> None:
        """Closes the socket. There is no close_notify: the protocol above says when it has ended."""
        await self._tcp.aclose()

    async def _handshake(self) -> None:
        tls = self._ready()
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise trio.BrokenResourceError("the remote hung up in the handshake") from None
                continue
            except ssl.SSLError as error:
                with contextlib.suppress(trio.BrokenResourceError):
                    await self._flush()  # the alert tells the other side why
                raise ProtocolError("tls-handshake", error.reason or str(error)) from None
            await self._flush()
            break
        protocol = tls.selected_alpn_protocol()
        if protocol not in (ALPN, LANE_ALPN):
            raise ProtocolError("tls-handshake", "another application protocol")
        self.is_lane = protocol == LANE_ALPN

    def _ready(self) -> ssl.SSLObject:
        assert self._tls is not None, "connect or accept first"
        return self._tls

    def _remote_certificate(self) -> bytes:
        certificate = self._ready().getpeercert(binary_form=True)
        if certificate is None:
            raise ProtocolError("bad-certificate", "none was sent")
        return certificate

    async def _receive_exactly(self, size: int) -> bytes:
        """Clear bytes before TLS; never reads beyond them."""
        data = b""
        while len(data) < size:
            piece = await self._tcp.receive_some(size - len(data))
            if not piece:
                raise trio.BrokenResourceError("the remote hung up in the preamble")
            self.bytes_received += len(piece)
            data += piece
        return data

    async def _fill(self) -> bool:
        """Takes what the socket has; False at its end."""
        try:
            count = await self._tcp.socket.recv_into(self._read_buffer)
        except OSError as error:
            raise trio.BrokenResourceError(error.strerror or "the socket failed") from None
        if not count:
            self._incoming.write_eof()
            return False
        self.bytes_received += count
        self._incoming.write(self._read_buffer[:count])
        if count == len(self._read_buffer) < _MAX_READ_BYTES:
            self._read_buffer = memoryview(bytearray(2 * count))
        return True

    async def _flush(self) -> None:
        """Sends what TLS has produced, in the order in which it did."""
        async with self._send_lock:
            while data := self._outgoing.read():
                await self._send_raw(data)

    async def _send_raw(self, data: bytes) -> None:
        await self._tcp.send_all(data)
        self.bytes_sent += len(data)
