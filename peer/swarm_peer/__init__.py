"""Who a peer is, how to reach it, and how to move named blobs and signed records between peers."""

from __future__ import annotations

from swarm_peer.addresses import Address as Address
from swarm_peer.addresses import Contact as Contact
from swarm_peer.addresses import parse_address as parse_address
from swarm_peer.addresses import parse_contact as parse_contact
from swarm_peer.connection import ConnectionLimits as ConnectionLimits
from swarm_peer.endpoint import Endpoint as Endpoint
from swarm_peer.endpoint_limits import EndpointLimits as EndpointLimits
from swarm_peer.endpoint_limits import EndpointStats as EndpointStats
from swarm_peer.errors import ConnectError as ConnectError
from swarm_peer.errors import DeadlineExpired as DeadlineExpired
from swarm_peer.errors import Disconnected as Disconnected
from swarm_peer.errors import PeerError as PeerError
from swarm_peer.errors import ProtocolError as ProtocolError
from swarm_peer.errors import Refusal as Refusal
from swarm_peer.identity import Identity as Identity
from swarm_peer.identity import PeerId as PeerId
from swarm_peer.identity import short as short
from swarm_peer.memory import MemoryNetwork as MemoryNetwork
from swarm_peer.memory_stream import Link as Link
from swarm_peer.rpc import Caller as Caller
from swarm_peer.rpc import Method as Method
from swarm_peer.rpc import Priority as Priority
from swarm_peer.tcp import AcceptLimits as AcceptLimits
from swarm_peer.tcp import TlsTransport as TlsTransport
