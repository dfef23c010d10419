"""Who is behind whom, and how far a partner's word about its step is believed.

Steps are claims of strangers: the median of the live training peers, which no single one can claim away, bounds them
on either side.
"""

from __future__ import annotations

from swarmtrain.exchange_messages import Offer
from swarmtrain.exchange_session import ExchangeConfig, Partners
from swarmtrain.round_pace import RoundPace
from swarmtrain.trainer_link import ClosedRound


class Staleness:
    """Compares schedule steps with those of a partner and of the swarm; all lengths in inner steps or in rounds."""

    def __init__(self, config: ExchangeConfig, partners: Partners, pace: RoundPace) -> None:
        self._config = config
        self._partners = partners
        self._pace = pace

    def credible_step(self, closed: ClosedRound, theirs: Offer) -> int:
        """Returns the partner's step, but at most a round beyond the swarm's median: a step is only a claim.

        A peer that is further than that already stays where it is.
        """
        own, ahead = closed.step, self._full_round_steps(closed, theirs)
        median = self._partners.swarm_step()
        return min(theirs.step, own + ahead if median is None else max(own, median + ahead))

    def of(self, closed: ClosedRound, theirs: Offer) -> int:
        """Returns the rounds by which the partner is behind us, or behind the swarm's median where we are ahead of it.

        A peer faster than all others would else find every one of them stale in the end, and train alone.
        """
        median = self._partners.swarm_step()
        here = closed.step if median is None else min(closed.step, median)
        return self.rounds_behind(here, theirs.step, self._full_round_steps(closed, theirs))

    def is_too_much(self, closed: ClosedRound, theirs: Offer) -> bool:
        """Says whether the partner is too far behind for an exchange."""
        return self.of(closed, theirs) > self._config.staleness_cutoff

    def rounds_behind(self, here: int, there: int, round_steps: int) -> int:
        """Returns the rounds, of `round_steps` or of a least real time, by which one step is behind another."""
        return self._pace.staleness(here, there, round_steps=round_steps, floor_s=self._config.staleness_floor_s)

    def _full_round_steps(self, closed: ClosedRound, theirs: Offer) -> int:
        """Returns the length of an own round; the partner's word counts only until there has been one."""
        return max(closed.round_steps, self._pace.steps or theirs.round_steps)
