"""Which of the live peers to meet next: anybody, but those at the end of a slow path less often."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from swarm_peer.addresses import Contact


def choose_partner(
    able: Sequence[Contact], preference: Callable[[Contact], float], rng: random.Random
) -> Contact | None:
    """A random one of `able`, in proportion to `preference` (above 0); None if there is none.

    Nobody is left out: replicas that are never mixed drift apart, however slow the path between them is.
    """
    weights = [preference(contact) for contact in able]
    if len(set(weights)) <= 1:
        return rng.choice(able) if able else None
    return rng.choices(able, weights)[0]
