from __future__ import annotations

import datetime
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from swarm_peer.addresses import Address
from swarm_peer.errors import (
    AddressInUse,
    AddressUnresolvable,
    ConnectionRefused,
    ConnectTimedOut,
    DialledSelf,
    ListenError,
    NotSwarmtrain,
    ProtocolError,
    Unreachable,
    WrongIdentity,
)
from swarm_peer.identity import Identity
from swarm_peer.tcp import AcceptGate, AcceptLimits, TlsTransport
from swarm_peer.tls import ALPN, Credentials, TlsStream, make_certificate, read_certificate
from swarm_peer.transport import Channel

SERVER = Identity.from_seed(b"server".ljust(32))
CLIENT = Identity.from_seed(b"client".ljust(32))
MALLORY = Identity.from_seed(b"mallory".ljust(32))
LOCAL = Address("127.0.0.1", 0)
PATIENCE_S = 10.0


async def echo(channel: Channel) -> None:
    try:
        while data := await channel.stream.receive_some():
            await channel.stream.send_all(data)
    except trio.BrokenResourceError:
        pass


@asynccontextmanager
async def serving(
    limits: AcceptLimits | None = None, on_channel: Callable[[Channel], Awaitable[None]] = echo
) -> AsyncIterator[tuple[TlsTransport, Address]]:
    transport = TlsTransport(SERVER, limits=limits)
    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(transport.serve, [LOCAL], on_channel)
        yield transport, address
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def answering(answer: bytes, *, close: bool = True) -> AsyncIterator[Address]:
    """A server of something else: sends `answer` to whoever connects."""

    async def handle(tcp: trio.SocketStream) -> None:
        await tcp.send_all(answer)
        if close:
            await tcp.send_eof()
        try:
            while await tcp.receive_some():
                pass
        except trio.BrokenResourceError:
            pass

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        yield Address("127.0.0.1", listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await scenario()

    trio.run(bounded)


async def wait_for_drop(transport: TlsTransport, reason: str, count: int = 1) -> None:
    """The server counts in a task of its own: give it the turns that it needs, but not for ever."""
    with trio.fail_after(PATIENCE_S):
        while transport.drops[reason] < count:  # noqa: ASYNC110 (a counter has no event)
            await trio.sleep(0.01)


async def is_cut_off(tcp: trio.SocketStream) -> bool:
    with trio.fail_after(PATIENCE_S):
        try:
            while await tcp.receive_some():
                pass
        except trio.BrokenResourceError:
            pass
    return True


def test_both_ends_prove_who_they_are() -> None:
    seen: list[bytes] = []

    async def greet(channel: Channel) -> None:
        seen.append(channel.remote)
        await channel.stream.send_all(b"welcome")

    async def scenario() -> None:
        async with serving(on_channel=greet) as (transport, address):
            channel = await TlsTransport(CLIENT).dial(address, SERVER.peer_id, PATIENCE_S)
            assert channel.remote == SERVER.peer_id
            assert channel.remote_address == address
            assert await channel.stream.receive_some() == b"welcome"
            assert await channel.stream.receive_some() == b""
            assert channel.bytes_sent > 300
            assert channel.bytes_received > 300
            await channel.stream.aclose()
            assert not transport.drops
        assert seen == [CLIENT.peer_id]

    run(scenario)


def test_large_data_passes_both_ways_at_once() -> None:
    data = os.urandom(5_000_000)

    async def scenario() -> None:
        async with serving() as (_, address):
            channel = await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)
            received = bytearray()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.stream.send_all, data)
                while len(received) < len(data):
                    received += await channel.stream.receive_some(100_000)
            assert received == data
            await channel.stream.aclose()

    run(scenario)


def test_the_wrong_server_is_recognised() -> None:
    async def scenario() -> None:
        async with serving() as (_, address):
            with pytest.raises(WrongIdentity) as raised:
                await TlsTransport(CLIENT).dial(address, MALLORY.peer_id, PATIENCE_S)
            assert raised.value.expected == MALLORY.peer_id
            assert raised.value.found == SERVER.peer_id

    run(scenario)


def test_dialling_oneself_is_refused_on_both_ends() -> None:
    async def scenario() -> None:
        async with serving() as (transport, address):
            with pytest.raises(DialledSelf, match="copy of its key file"):
                await TlsTransport(SERVER).dial(address, None, PATIENCE_S)
            await wait_for_drop(transport, "own-identity")

    run(scenario)


def test_a_stolen_certificate_is_worth_nothing() -> None:
    """M shows C's certificate in the preamble (or replaces the preamble in flight), but has its own key."""

    async def scenario() -> None:
        async with serving() as (transport, address):
            credentials = Credentials(MALLORY)
            credentials.client_context()
            credentials.certificate = make_certificate(CLIENT)
            async with await trio.open_tcp_stream(address.host, address.port) as tcp:
                # In TLS 1.3 the client is done before the server has judged it.
                await TlsStream(tcp).connect(credentials)
                await wait_for_drop(transport, "tls-handshake")
                assert await is_cut_off(tcp)

    run(scenario)


def test_a_certificate_signed_by_the_claimed_one_is_not_that_one() -> None:
    async def scenario() -> None:
        async with serving() as (transport, address):
            name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "swarmtrain peer")])
            leaf = (
                x509.CertificateBuilder()
                .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf")]))
                .issuer_name(name)
                .public_key(CLIENT.private_key.public_key())
                .serial_number(2)
                .not_valid_before(datetime.datetime(2000, 1, 1))
                .not_valid_after(datetime.datetime(2100, 1, 1))
                .sign(MALLORY.private_key, None)
            )
            credentials = Credentials(CLIENT)
            credentials.certificate = leaf.public_bytes(Encoding.DER)
            credentials.client_context()
            credentials.certificate = make_certificate(MALLORY)
            async with await trio.open_tcp_stream(address.host, address.port) as tcp:
                await TlsStream(tcp).connect(credentials)
                assert await is_cut_off(tcp)
            assert transport.drops.total() == 1

    run(scenario)


def client_context(*, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    context.set_alpn_protocols([ALPN])
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_no_client_certificate_or_old_tls_is_refused(version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        async with serving() as (transport, address):
            tcp = await trio.open_tcp_stream(address.host, address.port)
            await tcp.send_all(Credentials(CLIENT).preamble)
            stream = trio.SSLStream(tcp, client_context(version=version))
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)
            await wait_for_drop(transport, "tls-handshake")
            await trio.aclose_forcefully(stream)

    run(scenario)


def other_certificate() -> bytes:
    key = generate_private_key(SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(datetime.datetime(2000, 1, 1))
    return builder.not_valid_after(datetime.datetime(2100, 1, 1)).sign(key, SHA256()).public_bytes(Encoding.DER)


def preamble(certificate: bytes, *, magic: bytes = b"SWT1") -> bytes:
    return struct.pack("!4sH", magic, len(certificate)) + certificate


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "bad-preamble"),
        (b"\x16\x03\x01\x02\x00\x01", "bad-preamble"),
        (preamble(make_certificate(CLIENT), magic=b"SWT2"), "bad-preamble"),
        (preamble(b""), "bad-preamble"),
        (preamble(b"x" * 1025), "bad-preamble"),
        (b"SWT1\xff\xff", "bad-preamble"),
        (preamble(b"x" * 1024), "bad-certificate"),
        (preamble(make_certificate(CLIENT)[:-1]), "bad-certificate"),
        (preamble(make_certificate(CLIENT)[:-1] + b"x"), "bad-certificate"),
        (preamble(other_certificate()), "bad-certificate"),
        (preamble(make_certificate(CLIENT)) + b"no TLS at all, but long enough", "tls-handshake"),
    ],
)
def test_garbage_is_dropped_and_counted_before_any_work(data: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with serving() as (transport, address):
            async with await trio.open_tcp_stream(address.host, address.port) as tcp:
                await tcp.send_all(data)
                assert await is_cut_off(tcp)
            assert transport.drops == {reason: 1}
            # The server is none the worse for it.
            channel = await TlsTransport(CLIENT).dial(address, SERVER.peer_id, PATIENCE_S)
            await channel.stream.aclose()

    run(scenario)


def test_silence_is_dropped_at_the_deadline() -> None:
    async def scenario() -> None:
        async with serving(AcceptLimits(handshake_deadline_s=0.05)) as (transport, address):
            for opening in (b"", b"SWT1", preamble(make_certificate(CLIENT))):
                async with await trio.open_tcp_stream(address.host, address.port) as tcp:
                    await tcp.send_all(opening)
                    assert await is_cut_off(tcp)
            assert transport.drops == {"handshake-deadline": 3}

    run(scenario)


def test_strangers_who_only_knock_are_bounded() -> None:
    async def scenario() -> None:
        async with serving(AcceptLimits(max_unauthenticated=3)) as (transport, address):
            knocking = [await trio.open_tcp_stream(address.host, address.port) for _ in range(5)]
            await wait_for_drop(transport, "too-many-unauthenticated")
            for tcp in knocking:
                await tcp.aclose()
            await wait_for_drop(transport, "hung-up", 3)
            channel = await TlsTransport(CLIENT).dial(address, SERVER.peer_id, PATIENCE_S)
            await channel.stream.aclose()

    run(scenario)


def test_new_connections_are_rationed_per_host() -> None:
    gate = AcceptGate(AcceptLimits(accept_burst_per_host=3, max_unauthenticated_per_host=2))
    assert gate.enter("8.8.8.8", 0.0) is None
    assert gate.enter("8.8.8.8", 0.0) is None
    assert gate.enter("8.8.8.8", 0.0) == "too-many-unauthenticated"
    gate.leave("8.8.8.8")
    gate.leave("8.8.8.8")
    assert gate.enter("8.8.8.8", 0.0) is None
    gate.leave("8.8.8.8")
    assert gate.enter("8.8.8.8", 0.0) == "rate"
    assert gate.enter("9.9.9.9", 0.0) is None, "others are not concerned"
    assert gate.enter("8.8.8.8", 0.4) == "rate"
    assert gate.enter("8.8.8.8", 0.6) is None
    for _ in range(50):
        assert gate.enter("127.0.0.1", 0.0) is None


def test_loopback_can_be_rationed_too() -> None:
    async def scenario() -> None:
        limits = AcceptLimits(loopback_is_exempt=False, accept_burst_per_host=2, accepts_per_s_per_host=0.001)
        async with serving(limits) as (transport, address):
            for _ in range(2):
                channel = await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)
                await channel.stream.aclose()
            with pytest.raises(NotSwarmtrain, match="hung up"):
                await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)
            assert transport.drops["rate"] == 1

    run(scenario)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00" * 100])
def test_something_else_there_is_said_so(answer: bytes) -> None:
    async def scenario() -> None:
        async with answering(answer) as address:
            with pytest.raises(NotSwarmtrain, match=f"127.0.0.1:{address.port} does not answer as"):
                await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)

    run(scenario)


def test_something_silent_there_times_out_in_the_handshake() -> None:
    async def scenario() -> None:
        async with answering(b"", close=False) as address:
            with pytest.raises(ConnectTimedOut, match=r"TLS handshake did not end within 0\.1 s"):
                await TlsTransport(CLIENT).dial(address, None, 0.1)

    run(scenario)


def test_another_application_on_tls_is_recognised() -> None:
    credentials = Credentials(SERVER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    credentials._prepare(context)
    context.set_alpn_protocols(["h2"])

    async def handle(tcp: trio.SocketStream) -> None:
        await tcp.receive_some(len(Credentials(CLIENT).preamble))
        stream = trio.SSLStream(tcp, context, server_side=True)
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some(1)
        await trio.aclose_forcefully(stream)

    async def scenario() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, handle, [listener])
            address = Address("127.0.0.1", listener.socket.getsockname()[1])
            with pytest.raises(NotSwarmtrain):
                await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)
            nursery.cancel_scope.cancel()

    run(scenario)


def test_each_way_to_fail_at_connecting_has_its_own_error() -> None:
    async def scenario() -> None:
        transport = TlsTransport(CLIENT)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
            with pytest.raises(ConnectionRefused, match="start the peer there"):
                await transport.dial(Address("127.0.0.1", unused.getsockname()[1]), None, PATIENCE_S)
        with pytest.raises(Unreachable, match="cannot reach 255"):
            await transport.dial(Address("255.255.255.255", 4000), None, PATIENCE_S)
        with pytest.raises(AddressUnresolvable, match="spelling of the host name"):
            await transport.dial(Address("x" * 70 + ".invalid", 4000), None, PATIENCE_S)
        with pytest.raises(ConnectTimedOut, match="no TCP connection within 0"):
            await transport.dial(LOCAL, None, 0.0)

    run(scenario)


def test_a_busy_port_is_named() -> None:
    async def scenario() -> None:
        async with serving() as (_, address):
            with pytest.raises(AddressInUse, match=f"port {address.port} is in use"):
                await TlsTransport(CLIENT).serve([address], echo)
            with pytest.raises(AddressInUse):
                await TlsTransport(CLIENT).serve([LOCAL, address], echo)
        with pytest.raises(ListenError, match="cannot listen on"):
            await TlsTransport(CLIENT).serve([Address("8.8.8.8", 0)], echo)

    run(scenario)


def test_what_fails_in_one_channel_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(channel: Channel) -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        async with serving(on_channel=crash) as (transport, address):
            for _ in range(2):
                channel = await TlsTransport(CLIENT).dial(address, None, PATIENCE_S)
                assert await channel.stream.receive_some() == b""
                await channel.stream.aclose()
            assert transport.drops == {"crash": 2}

    run(scenario)
    assert "a bug" in caplog.text


def test_certificates_name_their_key_and_are_small() -> None:
    certificate = make_certificate(CLIENT)
    assert read_certificate(certificate) == CLIENT.peer_id
    assert len(certificate) < 512
    with pytest.raises(ProtocolError, match="bad-certificate"):
        read_certificate(b"x" * 2000)


def test_contexts_are_kept_but_not_without_bound() -> None:
    credentials = Credentials(SERVER)
    certificate = make_certificate(CLIENT)
    context = credentials.server_context(certificate)
    assert credentials.server_context(certificate) is context
    for number in range(260):
        credentials.server_context(make_certificate(Identity.from_seed(number.to_bytes(32, "big"))))
    assert len(credentials._server_contexts) == 256
    assert credentials.server_context(certificate) is not context
