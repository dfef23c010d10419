"""Has the home router forward this peer's port: by NAT-PMP, else by UPnP where miniupnpc is installed.

A mapping is renewed at half its life and deleted at the end. Nothing here is needed: without it a peer is reached
through relays. What a router claims is believed only as far as others can dial it.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio
from swarm_peer.address_policy import Judged, Reach, is_loopback
from swarm_peer.addresses import Address
from swarm_peer.nat_pmp import NatPmpClient, NatPmpError, default_router
from swarm_peer.routing import is_local

logger = logging.getLogger("swarmtrain.port_mapping")

LIFETIME_S: Final = 3600
RETRY_S: Final = 900.0
_UPNP_DISCOVERY_MS: Final = 2000
_UPNP_DEADLINE_S: Final = 20.0
_UNMAP_DEADLINE_S: Final = 3.0
_PORTS_TRIED: Final = 4


class MappingFailed(Exception):
    """No mapping came about; one line for people."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Where the router says that it forwards from, and for how long."""

    address: Address
    lifetime_s: int


class Method(Protocol):
    """A way to ask a router. Both calls raise `MappingFailed` and end within seconds."""

    name: str

    async def map_port(self, port: int, lifetime_s: int) -> Mapped: ...

    async def unmap_port(self, port: int) -> None: ...


class NatPmp:
    """RFC 6886."""

    name = "NAT-PMP"

    def __init__(self, client: NatPmpClient) -> None:
        self._client = client
        self._given: int | None = None

    async def map_port(self, port: int, lifetime_s: int) -> Mapped:
        try:
            mapping = await self._client.map_port(port, lifetime_s, wanted=self._given)
            host = await self._client.external_host()
        except NatPmpError as error:
            raise MappingFailed(str(error)) from None
        self._given = mapping.port
        return Mapped(Address(host, mapping.port), mapping.lifetime_s)

    async def unmap_port(self, port: int) -> None:
        try:
            await self._client.unmap_port(port)
        except NatPmpError as error:
            raise MappingFailed(str(error)) from None


class Upnp:
    """UPnP by way of miniupnpc, whose calls block, in a thread that is left behind when it takes too long.

    A router that was found is kept: to look for one takes seconds, and there are none at the end. With `description`,
    the URL of a router's description, none is looked for.
    """

    name = "UPnP"

    def __init__(self, description: str | None = None) -> None:
        self._description = description
        self._external: int | None = None
        self._router: Any = None

    async def map_port(self, port: int, lifetime_s: int) -> Mapped:
        mapped: Mapped = await self._in_thread(self._map, port, lifetime_s)
        return mapped

    async def unmap_port(self, port: int) -> None:
        await self._in_thread(self._unmap)

    async def external_host(self) -> str:
        """Returns the router's address on its far side. Raises `MappingFailed`."""
        host: str = await self._in_thread(self._find)
        return host

    async def _in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            with trio.fail_after(_UPNP_DEADLINE_S):
                return await trio.to_thread.run_sync(work, *arguments, abandon_on_cancel=True)
        except trio.TooSlowError:
            self._router = None  # the thread may still be at it
            raise MappingFailed(f"no UPnP answer within {_UPNP_DEADLINE_S:.0f} s") from None
        except ImportError:
            raise MappingFailed("UPnP needs the extra swarmtrain[portmap]") from None

    def _map(self, port: int, lifetime_s: int) -> Mapped:
        if self._router is not None:
            try:
                return self._map_at(self._router, port, lifetime_s)
            except MappingFailed as error:  # it may have started again, on another port
                logger.info("UPnP: looking for the router again: %s", error)
        self._find()
        return self._map_at(self._router, port, lifetime_s)

    def _find(self) -> str:
        self._router = _upnp_router(self._description)
        return _external_host(self._router)

    def _map_at(self, router: Any, port: int, lifetime_s: int) -> Mapped:  # noqa: ANN401
        host = _external_host(router)
        first, failure = self._external or port, ""
        for external in range(first, min(first + _PORTS_TRIED, 65536)):
            try:
                _add_mapping(router, external, port, lifetime_s)
            except Exception as error:
                failure = str(error)
                logger.info("UPnP: port %d is not mapped: %s", external, error)
                continue
            self._external = external
            return Mapped(Address(host, external), lifetime_s)
        raise MappingFailed(f"the router refuses UPnP: {failure}")

    def _unmap(self) -> None:
        if self._external is None or self._router is None:
            return
        try:
            self._router.deleteportmapping(self._external, "TCP")
        except Exception as error:
            raise MappingFailed(f"UPnP: {error}") from None


def mapping_methods(bound: Sequence[Address], own: Sequence[Judged]) -> list[Method]:
    """Returns the ways to ask the router, none where there is nothing to ask for: a node that listens on loopback, or
    a machine with a public IPv4 address or without a private router."""
    is_public = any(judged.is_told and judged.reach is Reach.PUBLIC_V4 for judged in own)
    has_lan = any(judged.is_told and judged.reach is Reach.LAN and ":" not in judged.found.host for judged in own)
    listens = any(address.host == "0.0.0.0" or is_local(address.host) for address in bound)
    if is_public or not has_lan or not listens or all(is_loopback(address.host) for address in bound):
        return []
    router = default_router()
    methods: list[Method] = [NatPmp(NatPmpClient(router))] if router else []
    if importlib.util.find_spec("miniupnpc") is not None:
        methods.append(Upnp())
    return methods


def _upnp_router(description: str | None) -> Any:  # noqa: ANN401  # miniupnpc has no types
    upnp = importlib.import_module("miniupnpc").UPnP()
    upnp.discoverdelay = _UPNP_DISCOVERY_MS
    try:
        if description is None:
            upnp.discover()
            upnp.selectigd()
        else:
            upnp.selectigd(description)
    except Exception:  # a bare one, which says "Success" when nobody answers
        raise MappingFailed("no UPnP router answers") from None
    return upnp


def _external_host(router: Any) -> str:  # noqa: ANN401
    try:
        return str(ipaddress.IPv4Address(router.externalipaddress()))
    except Exception:  # miniupnpc raises bare Exceptions; without an address the text is empty
        raise MappingFailed("the UPnP router has no public address: another NAT is before it, or no link") from None


def _add_mapping(router: Any, external: int, port: int, lifetime_s: int) -> None:  # noqa: ANN401
    mapping = (external, "TCP", router.lanaddr, port, "swarmtrain", "")
    try:
        router.addportmapping(*mapping, lifetime_s)
    except TypeError:  # an older miniupnpc, whose mappings last until they are deleted
        router.addportmapping(*mapping)
    except Exception as error:
        if str(error) != "OnlyPermanentLeasesSupported":  # code 725 of IGD version 1
            raise
        router.addportmapping(*mapping, 0)


def _is_global(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


class PortMapping:
    """Keeps one port mapped. `on_change` hears the public address, or None when there is none any more."""

    def __init__(
        self,
        port: int,
        methods: list[Method],
        on_change: Callable[[Address | None], None],
        *,
        lifetime_s: int = LIFETIME_S,
        retry_s: float = RETRY_S,
        private_allowed: bool = False,
    ) -> None:
        self._port = port
        self._methods = methods
        self._on_change = on_change
        self._lifetime_s = lifetime_s
        self._retry_s = retry_s
        self._private_allowed = private_allowed
        self.on_notice: Callable[[str], None] = lambda line: None
        self.address: Address | None = None
        self.reason = "not tried yet"  # why there is no mapping, for people

    async def run(self) -> None:
        """Maps and renews until cancelled, and then deletes the mapping."""
        used: Method | None = None
        try:
            while True:
                used, mapped = await self._try()
                self._set(mapped.address if mapped else None)
                await trio.sleep(mapped.lifetime_s / 2 if mapped else self._retry_s)
        finally:
            if used is not None:
                with trio.move_on_after(_UNMAP_DEADLINE_S, shield=True):
                    try:
                        await used.unmap_port(self._port)
                    except MappingFailed as error:
                        logger.info("the mapping is left to expire: %s", error)

    async def _try(self) -> tuple[Method | None, Mapped | None]:
        reasons = []
        for method in self._methods:
            try:
                mapped = await method.map_port(self._port, self._lifetime_s)
            except MappingFailed as error:
                reasons.append(str(error))
                continue
            if not (self._private_allowed or _is_global(mapped.address.host)):
                # Nobody outside can use it, and it costs the router an entry.
                self.reason = f"the router's own address {mapped.address.host} is not public: another NAT is before it"
                return method, None
            logger.info("%s: the router forwards %s", method.name, mapped.address)
            return method, mapped
        self.reason = "; ".join(reasons) or "no private router to ask"
        logger.info("no port mapping: %s", self.reason)
        return None, None

    def _set(self, address: Address | None) -> None:
        if address != self.address:
            self.address = address
            if address is not None:
                self.on_notice(f"the router forwards {address} to this peer (--no-portmap turns this off)")
            self._on_change(address)
