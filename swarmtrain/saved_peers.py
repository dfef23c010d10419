"""The peers of a run that this machine has met, kept for the next start: `STATE/peers/RUN-PEER.json`.

With them a peer finds back although the bootstrap peer is gone. One file per run and identity, so that several peers
of one user do not overwrite each other's; a reader takes all files of the run. Addresses are hints: who answers there
proves its identity as always. Private, bounded, and replaced as a whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from swarm_peer.addresses import MAX_ADDRESSES, Address, Contact
from swarm_peer.identity import PeerId

from swarmtrain.durable import write_durably
from swarmtrain.invite import EntryPoint
from swarmtrain.naming import RunReference

logger = logging.getLogger("swarmtrain.saved_peers")

MAX_SAVED: Final = 200
MAX_FILES_READ: Final = 64
MAX_FILE_BYTES: Final = 256 * 1024
# How many are dialled at a start. The rest serves when these are gone.
TRIED_AT_ONCE: Final = 8
FIRST_SAVE_S: Final = 10.0
SAVE_INTERVAL_S: Final = 120.0

_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _SavedPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Hex32
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `peers` begins with those met last."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    run_id: _Hex32
    name: Annotated[str, msgspec.Meta(max_length=63)]
    creator: _Hex32
    peers: Annotated[tuple[_SavedPeer, ...], msgspec.Meta(max_length=MAX_SAVED)]


class SavedPeers:
    """The file of one run and one identity. What an earlier start has saved is kept until better is known."""

    def __init__(self, state: Path, *, run_id: bytes, name: str, creator: bytes, own_id: bytes) -> None:
        self.path = state / "peers" / f"{run_id.hex()[:16]}-{own_id.hex()[:8]}.json"
        self._run_id = run_id
        self._name = name
        self._creator = creator
        self._own_id = own_id
        earlier = _read(self.path)
        self._peers: dict[bytes, tuple[Address, ...]] = {}
        if earlier is not None and earlier.run_id == run_id.hex():
            self._peers = {bytes.fromhex(peer.id): peer.addresses for peer in earlier.peers}
        self._saved: bytes | None = None

    def note(self, contacts: Iterable[Contact]) -> None:
        """Takes peers that are there now; they come before those of earlier."""
        met = {c.peer_id: c.addresses for c in contacts if c.addresses and c.peer_id != self._own_id}
        kept = {peer_id: addresses for peer_id, addresses in self._peers.items() if peer_id not in met}
        self._peers = dict(list({**met, **kept}.items())[:MAX_SAVED])

    def save(self) -> None:
        """Writes the file if something has changed; a disk that refuses is logged and costs nothing else."""
        content = _File(
            version=1,
            run_id=self._run_id.hex(),
            name=self._name,
            creator=self._creator.hex(),
            peers=tuple(_SavedPeer(peer_id.hex(), addresses) for peer_id, addresses in self._peers.items()),
        )
        data = msgspec.json.encode(content)
        if data == self._saved or not self._peers:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self.path, [data])
            os.chmod(self.path, 0o600)
        except OSError as error:
            logger.warning("the list of peers is not saved: %s", error)
            return
        self._saved = data

    async def keep(self, met: Callable[[], Sequence[Contact]]) -> None:
        """Saves now and then until cancelled, and once more then."""
        try:
            await trio.sleep(FIRST_SAVE_S)
            while True:
                self.note(met())
                await trio.to_thread.run_sync(self.save)
                await trio.sleep(SAVE_INTERVAL_S)
        finally:
            self.note(met())
            self.save()


def saved_entries(state: Path, reference: RunReference) -> tuple[EntryPoint, ...]:
    """Returns the entry points that earlier starts have saved for the run that is meant: one address of each of at
    most `TRIED_AT_ONCE` peers. What cannot be read counts as not there.

    If the files are of several runs that `reference` may mean, nothing is returned: the wrong one must not be taken.
    """
    found = [
        content
        for path in sorted((state / "peers").glob("*.json"))[:MAX_FILES_READ]
        if (content := _read(path)) is not None
        and reference.matches(content.name, bytes.fromhex(content.creator), bytes.fromhex(content.run_id))
    ]
    if len({content.run_id for content in found}) != 1:
        return ()
    peers: dict[str, _SavedPeer] = {}
    # In turn from each file, so that every identity's newest come first.
    for rank in range(MAX_SAVED):
        for content in found:
            if rank < len(content.peers):
                peers.setdefault(content.peers[rank].id, content.peers[rank])
    chosen = [peer for peer in peers.values() if peer.addresses][:TRIED_AT_ONCE]
    return tuple((PeerId(bytes.fromhex(peer.id)), peer.addresses[0]) for peer in chosen)


def all_saved(state: Path) -> dict[str, tuple[EntryPoint, ...]]:
    """Returns the saved entry points of every run, under the run's name and the start of its id."""
    contents = [c for path in sorted((state / "peers").glob("*.json"))[:MAX_FILES_READ] if (c := _read(path))]
    runs = {content.run_id: f"{content.name} ({content.run_id[:8]})" for content in contents}
    return {name: saved_entries(state, RunReference(run_id=bytes.fromhex(run))) for run, name in runs.items()}


def _read(path: Path) -> _File | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError, ValueError) as error:
        logger.warning("%s is not read: %s", path.name, error)
        return None
