"""Who may fetch which blob: what everybody needs in order to join, and what only members get."""

from __future__ import annotations

from swarm_peer.addresses import Contact
from swarm_peer.blobs import ChunkRequest, DescriptorRequest
from swarm_peer.gated import Gate
from swarm_peer.identity import PeerId


class BlobDoor:
    """Open until a gate is set.  With one, all blobs but the published ones are for the members of its run."""

    def __init__(self) -> None:
        self._public: set[bytes] = set()
        self._reserved: dict[bytes, Gate] = {}
        self._gate: Gate | None = None

    def publish(self, *blob_ids: bytes) -> None:
        """Lets everybody fetch some blobs."""
        self._public.update(blob_ids)

    def reserve(self, gate: Gate, *blob_ids: bytes) -> None:
        """Keeps some blobs for the members of one run; without `blob_ids`, all that are not published."""
        if not blob_ids:
            self._gate = gate
        for blob_id in blob_ids:
            self._reserved[blob_id] = gate

    def check(self, remote: PeerId, request: DescriptorRequest | ChunkRequest) -> None:
        """Raises Refusal for a blob that `remote` may not have."""
        gate = self._reserved.get(request.blob_id, self._gate)
        if gate is not None and request.blob_id not in self._public:
            gate.check(remote)

    async def introduce(self, holder: Contact) -> None:
        """Makes us known to a holder that may ask for it.  Raises PeerError."""
        if self._gate is not None:
            await self._gate.introduce(holder)
