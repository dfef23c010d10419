"""The last step of a run: every peer fetches the others' final replicas, merges them and writes the model."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

from swarm_peer.errors import PeerError
from swarm_peer.identity import short
from swarm_peer.members import Member

from swarmtrain import __version__
from swarmtrain.donor import Joiner
from swarmtrain.export import ExportCard, export_model
from swarmtrain.layout import FlatLayout
from swarmtrain.manifest import SignedManifest
from swarmtrain.merge import Merge, WeightedReplica
from swarmtrain.model_config import parameter_specs
from swarmtrain.snapshots import Payload, PayloadInvalid
from swarmtrain.status import decode_status

logger = logging.getLogger("swarmtrain.merge")

# In a larger swarm each peer merges a random sample: gossip has brought the replicas close by then.
MAX_MERGED_REPLICAS = 32


async def fetch_final_replicas(
    members: Sequence[Member], joiner: Joiner, *, rng: random.Random, most_tokens: int, deadline_s: float
) -> list[WeightedReplica]:
    """Fetches what finished members have published; whoever cannot deliver is left out.

    A peer's own count of its tokens weighs at most `most_tokens`.
    """
    finals = [(member, final) for member in members if (final := decode_status(member.status).final) is not None]
    rng.shuffle(finals)
    replicas = []
    for member, final in finals[: MAX_MERGED_REPLICAS - 1]:
        payload = Payload(final.snapshot, b"", final.blob, final.size_bytes)
        try:
            snapshot = await joiner.fetch_payload(payload, member.contact, deadline_s=deadline_s)
        except (PeerError, PayloadInvalid) as error:
            logger.warning("final replica of %s not merged: %s", short(member.contact.peer_id), error)
            continue
        replicas.append(WeightedReplica(snapshot.bits, min(final.tokens, most_tokens)))
    return replicas


def export_merge(folder: Path, signed: SignedManifest, merge: Merge, validation_loss: float) -> None:
    """Writes the merged model as a Hugging Face folder.  Raises ExportError."""
    manifest = signed.manifest
    config = manifest.model.config()
    spans = FlatLayout.of(parameter_specs(config)).spans
    state = {span.name: merge.weights[span.start : span.stop].reshape(span.shape) for span in spans}
    card = ExportCard(
        run_name=manifest.name,
        run_id=signed.run_id,
        peers=merge.replicas,
        tokens=merge.tokens,
        merge="token-weighted mean of the final replicas",
        spread=merge.spread,
        validation_loss=validation_loss if math.isfinite(validation_loss) else None,
        command=f"swarmtrain join --run-id {manifest.name} --peer HOST:PORT",
        swarmtrain_version=__version__,
    )
    export_model(folder, state, config, card)
