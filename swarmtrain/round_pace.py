"""How long a peer's own rounds are: the measure of what "a while" and "behind" mean between peers.

Rounds last from a tenth of a second to days. A fixed pause is nothing in one run and hundreds of rounds in another,
and a count of rounds alone is an hour in one and less than a message's way in another.
"""

from __future__ import annotations

from swarmtrain.mixing import staleness_in_rounds

_RATE = 0.3


class RoundPace:
    """Length of this peer's rounds, smoothed. Only rounds that no partner cut short count: others must not be able
    to shrink it. All zero until there has been one.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0  # of the last one

    def record(self, seconds: float, steps: int) -> None:
        """Takes in a whole round."""
        self.seconds = seconds if self.seconds == 0.0 else (1.0 - _RATE) * self.seconds + _RATE * seconds
        self.steps = steps

    def at_most_a_round(self, seconds: float) -> float:
        """Returns `seconds`, or the length of a round where that is known and shorter."""
        return min(seconds, self.seconds) if self.seconds > 0.0 else seconds

    def steps_within(self, seconds: float) -> int:
        """Returns the inner steps that this peer makes in so many seconds; 0 if that is not yet known."""
        return int(self.steps * seconds / self.seconds) if self.seconds > 0.0 else 0

    def staleness(self, here: int, there: int, *, round_steps: int, floor_s: float) -> int:
        """Returns the rounds by which schedule step `there` is behind `here`.

        A round counts for at least `round_steps`, and for at least what is trained here in `floor_s`: a message is
        under way for so long that a peer of very short rounds would find everybody many rounds behind.
        """
        return staleness_in_rounds(here, there, max(round_steps, self.steps_within(floor_s)))
