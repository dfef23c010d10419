"""What a peer says of its own training: a status to the swarm, events to the log, lines to the user.

It takes in what happens and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec
from swarm_peer.identity import Identity, short

from swarmtrain import control
from swarmtrain.connection_watch import ConnectionWatch
from swarmtrain.control import ToNode
from swarmtrain.events import EventLog
from swarmtrain.exchange_notices import ExchangeNotices
from swarmtrain.exchange_session import Report
from swarmtrain.live_members import LiveMembers
from swarmtrain.status import Status
from swarmtrain.workspace import duplicate_line

if TYPE_CHECKING:
    from swarmtrain.hivemind_bridge.bridge import BridgeState


class OwnAccount:
    """Keeps `status` up to date; `on_status` and `on_notice` are called at once, from whatever task brings the news."""

    def __init__(self, events: EventLog, members: LiveMembers, *, total_steps: int) -> None:
        self._events = events
        self._members = members
        self._notices = ExchangeNotices()
        self._connection = ConnectionWatch()
        self._is_finished = False
        self.status = Status(total_steps=total_steps)
        self.on_status: Callable[[Status], None] = lambda status: None
        self.on_notice: Callable[[str], None] = lambda line: None

    def update(self, **values: object) -> None:
        """Changes fields of the status."""
        self.status = msgspec.structs.replace(self.status, **values)
        self.on_status(self.status)

    def trainer_said(self, message: ToNode) -> None:
        """Takes in a message of the trainer."""
        match message:
            case control.Ready():
                self.update(step=message.step, validation_loss=message.validation_loss)
                self._events.write(
                    "ready",
                    step=message.step,
                    validation_loss=message.validation_loss,
                    device=message.device,
                    resumed_from=message.resumed_from,
                )
            case control.Progress():
                busy_s = message.train_s + message.exchange_s
                self.update(
                    step=message.step,
                    loss=message.loss,
                    tokens_total=message.tokens_total,
                    tokens_per_s=message.tokens_per_s,
                    exchange_share=message.exchange_s / busy_s if busy_s > 0 else 0.0,
                )
                self._events.write("progress", **msgspec.structs.asdict(message))
            case control.Evaluated() if not self._is_finished:
                self.update(validation_loss=message.validation_loss)
                self._events.write("evaluated", step=message.step, validation_loss=message.validation_loss)
            case control.RoundClosed():
                self._events.write("round", step=message.step, round=message.round, steps=message.round_steps)
                self._say(self._notices.round_closed(len(self._members.training())))
            case control.Saved():
                self._events.write("saved", step=message.step, path=message.path)
            case control.Finished():
                self._is_finished = True
                self.update(step=message.step, validation_loss=message.validation_loss)
                self._events.write("finished", step=message.step, validation_loss=message.validation_loss)
            case control.Stopped():
                self.update(step=message.step)
            case _:
                pass

    def exchange_ended(self, report: Report, *, is_relayed: bool) -> None:
        """Takes in one exchange or attempt; `is_relayed` says whether the partner is reached through a relay."""
        self._say(self._notices.exchange_ended(report.partner, report.outcome))
        if report.outcome == "mixed":
            self.update(
                exchanges=self.status.exchanges + 1,
                last_partner=report.partner[:4],
                last_relayed=is_relayed,
                staleness=report.staleness,
            )
        elif report.outcome not in ("busy", "too-soon", "not-ready"):
            self.update(rejected=self.status.rejected + 1)
        self._events.write(
            "exchange",
            partner=short(report.partner),
            initiated=report.initiated,
            relayed=is_relayed,
            outcome=report.outcome,
            staleness=report.staleness,
            weight=report.weight,
            clipped=report.clipped,
            patch=report.patch,
            payload_bytes_sent=report.payload_bytes_sent,
            payload_bytes_received=report.payload_bytes_received,
            seconds=round(report.seconds, 3),
        )

    def duplicate_seen(self, identity: Identity) -> None:
        """Takes in that another process uses this peer's identity."""
        self.on_notice(duplicate_line(identity))
        self._events.write("duplicate-identity", peer_id=identity.peer_id.hex())

    def count_traffic(self, *, bytes_sent: int, bytes_received: int, hivemind: BridgeState | Literal[""]) -> None:
        """Takes in the totals of the connections and the state of the optional bridge."""
        if hivemind != self.status.hivemind:
            self._events.write("hivemind", state=hivemind)
        self.status = msgspec.structs.replace(
            self.status, bytes_sent=bytes_sent, bytes_received=bytes_received, hivemind=hivemind
        )

    def look_at_connection(self, silent_s: float | None) -> None:
        """Takes in for how long nobody else was heard; None while nobody ever was."""
        if line := self._connection.look(silent_s):
            self.on_notice(line)
            self._events.write("offline" if self._connection.is_offline else "online", silent_s=silent_s)

    def _say(self, line: str | None) -> None:
        if line:
            self.on_notice(line)
