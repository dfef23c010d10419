"""Who a peer is, how to reach it, and how to move named blobs and signed records between peers."""

from __future__ import annotations

from swarm_peer.addresses import Address as Address
from swarm_peer.addresses import Contact as Contact
from swarm_peer.addresses import parse_address as parse_address
from swarm_peer.addresses import parse_contact as parse_contact
from swarm_peer.errors import PeerError as PeerError
from swarm_peer.identity import Identity as Identity
from swarm_peer.identity import PeerId as PeerId
from swarm_peer.rpc import Caller as Caller
from swarm_peer.rpc import Method as Method
from swarm_peer.rpc import Priority as Priority
