from __future__ import annotations

import random
from collections import Counter

from swarm_peer.addresses import Contact

from swarmtrain.partner_choice import choose_partner
from swarmtrain.relaying import RELAYED_PREFERENCE

DIRECT = [Contact(bytes([number]) * 32, ()) for number in range(2)]
RELAYED = [Contact(bytes([number]) * 32, ()) for number in range(10, 14)]


def preference(contact: Contact) -> float:
    return 1.0 if contact in DIRECT else RELAYED_PREFERENCE


def test_direct_paths_are_preferred_and_nobody_is_left_out() -> None:
    rng = random.Random(1)
    counts = Counter(choose_partner(DIRECT + RELAYED, preference, rng) for _ in range(3000))
    # Two with weight 1 and four with a quarter: two thirds and one third.
    assert 1900 < sum(counts[contact] for contact in DIRECT) < 2100
    assert all(200 < counts[contact] < 300 for contact in RELAYED)


def test_among_equals_everybody_has_the_same_chance() -> None:
    rng = random.Random(1)
    counts = Counter(choose_partner(RELAYED, preference, rng) for _ in range(4000))
    assert all(900 < counts[contact] < 1100 for contact in RELAYED)
    assert choose_partner([], preference, rng) is None
