"""Loops over elements that NumPy has no single operation for. Compiled by numba; the bytes are the same without.

Blocks of 64 elements are looked at as bit masks: which of them changed, and which have a context of at least a
class's lower bound. The member of a class is then a bit, a rank a count of bits below, and both sides find members
in a few instructions. All arrays are contiguous; element counts of a call stay far below 2^31.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import NDArray

from swarm_compression.vector import (
    LANES,
    as_mask,
    at_least,
    compile_inline,
    compile_loop,
    count_ones,
    differing,
    fill_contexts,
    lowest_one,
)

Array: TypeAlias = NDArray[Any]
# A rank that no element has.
NEVER = 1 << 62


@compile_loop
def find_changes(new: Array, base: Array, positions: Array) -> int:
    """Write the ascending positions at which two arrays differ; return how many there are."""
    found = 0
    whole = new.size // LANES * LANES
    for start in range(0, whole, LANES):
        changed = differing(new, base, start)
        while changed != 0:
            positions[found] = start + lowest_one(changed)
            found += 1
            changed &= changed - as_mask(1)
    for at in range(whole, new.size):
        if new[at] != base[at]:
            positions[found] = at
            found += 1
    return found


@compile_loop
def gap_symbols(positions: Array, escape: int, symbols: Array) -> int:
    """Write the gap symbols of ascending positions (see `positions`); return how many there are."""
    written = 0
    last = -1
    for index in range(positions.size):
        gap = positions[index] - last - 1
        last = positions[index]
        while gap >= escape:
            symbols[written] = escape
            written += 1
            gap -= escape
        symbols[written] = gap
        written += 1
    return written


@compile_loop
def positions_of(symbols: Array, escape: int, population: int, positions: Array) -> int:
    """Invert `gap_symbols`; return the number of positions, or -1 if they are not exactly what `positions` holds."""
    found = 0
    last = -1
    pending = False
    for index in range(symbols.size):
        symbol = int(symbols[index])
        pending = symbol == escape
        if pending:
            last += escape
            continue
        last += symbol + 1
        if found == positions.size or last >= population:
            return -1
        positions[found] = last
        found += 1
    return -1 if pending or found != positions.size else found


@compile_loop
def rank_changes(
    base: Array,
    bounds: Array,
    class_of: Array,
    collected: Array,
    positions: Array,
    new_changed: Array,
    index: int,
    offset: int,
    totals: Array,
    slots: Array,
    ranks: Array,
    old_bits: Array,
    new_bits: Array,
    masks: Array,
    contexts: Array,
    members: Array,
) -> int:
    """Rank the changes of one slice among the members of their classes; return the number of collected members.

    `base` are the old bits, a multiple of 64 elements, from position `offset` of the slice on; `bounds` (uint8) the
    lower bounds of classes 1 … t and `class_of` the class of each context. `positions` and `new_changed` are those of
    the slice's changes, of which `index` is the first to look at. A change goes to the next slot of its class, in
    `slots`: its rank to `ranks`, its bits to `old_bits` and `new_bits`. `totals` (t + 2 counts) carries over from slice
    to slice how many elements reach each bound. Members of the classes listed in `collected` go to the columns of
    `members` (3, as many as `base`) instead: class, old and new bits. `masks` (t + 2, uint64) is scratch but for the
    last, 0, and the first, which tells the elements of a block that count: all but in the last block of a slice.
    `contexts` (64, uint8) is scratch.
    """
    found = 0
    for start in range(0, base.size, LANES):
        fill_contexts(base, start, contexts)
        for number in range(bounds.size):
            masks[number + 1] = at_least(contexts, 0, bounds[number])
        inside = as_mask(0)
        for entry in range(collected.size):
            inside |= masks[collected[entry]] & ~masks[collected[entry] + 1]
        before = found
        left = inside
        while left != 0:
            lane = lowest_one(left)
            members[0, found] = class_of[contexts[lane]]
            members[1, found] = base[start + lane]
            members[2, found] = base[start + lane]
            found += 1
            left &= left - as_mask(1)
        while index < positions.size and positions[index] - offset < start + LANES:
            lane = positions[index] - offset - start
            number = class_of[contexts[lane]]
            lower = (as_mask(1) << as_mask(lane)) - as_mask(1)
            if (inside >> as_mask(lane)) & as_mask(1):
                members[2, before + count_ones(inside & lower)] = new_changed[index]
            else:
                slot = slots[number]
                slots[number] = slot + 1
                below = masks[number] & ~masks[number + 1] & lower
                ranks[slot] = totals[number] - totals[number + 1] + count_ones(below)
                old_bits[slot] = base[start + lane]
                new_bits[slot] = new_changed[index]
            index += 1
        totals[0] += count_ones(masks[0])
        for number in range(bounds.size):
            totals[number + 1] += count_ones(masks[number + 1])
    return found


@compile_inline
def _select(bits: int, rank: int) -> int:
    """Return the index of the set bit that has `rank` set bits below it."""
    offset = 0
    half = 32
    while half:
        low = count_ones((bits >> as_mask(offset)) & ((as_mask(1) << as_mask(half)) - as_mask(1)))
        if rank >= low:
            rank -= low
            offset += half
        half >>= 1
    return offset


@compile_inline
def _step(bits: int, step: int, top: int) -> int:
    """Move a float's bit pattern by `step` units in the last place; `top` is its sign bit."""
    full = 2 * top - 1
    ordered = bits ^ full if bits & top else bits ^ top
    ordered = (ordered + step) & full
    return ordered ^ top if ordered & top else ordered ^ full


@compile_loop
def apply_at(target: Array, positions: Array, offset: int, steps: Array, top: int) -> None:
    """Move the elements at `positions + offset` by `steps` (modulo 2 * top), in place."""
    for index in range(positions.size):
        at = positions[index] + offset
        target[at] = _step(int(target[at]), int(steps[index]), top)


@compile_loop
def apply_ranked(
    target: Array,
    bounds: Array,
    collected: Array,
    totals: Array,
    due: Array,
    slots: Array,
    ends: Array,
    ranks: Array,
    steps: Array,
    top: int,
    masks: Array,
    contexts: Array,
) -> bool:
    """Apply the changes of all classes to one slice in place; return False if a class has too few steps.

    As in `rank_changes`. Class `c` owns `ranks` and `steps` from `slots[c]` (carried on) to `ends[c]`, where its ranks
    end in NEVER, and `due[c]` is its next rank. Every member of the classes listed in `collected` takes the next step
    instead.
    """
    for start in range(0, target.size, LANES):
        fill_contexts(target, start, contexts)
        totals[0] += count_ones(masks[0])
        for number in range(bounds.size):
            mask = at_least(contexts, 0, bounds[number])
            masks[number + 1] = mask
            totals[number + 1] += count_ones(mask)
        hits = as_mask(0)
        for number in range(due.size):
            hits |= as_mask(due[number] < totals[number] - totals[number + 1]) << as_mask(number)
        while hits != 0:
            number = lowest_one(hits)
            inside = masks[number] & ~masks[number + 1]
            limit = totals[number] - totals[number + 1]
            slot = slots[number]
            at = start + _select(inside, due[number] - limit + count_ones(inside))
            target[at] = _step(int(target[at]), int(steps[slot]), top)
            slots[number] = slot + 1
            due[number] = ranks[slot + 1]
            hits &= ~(as_mask(ranks[slot + 1] >= limit) << as_mask(number))
        for entry in range(collected.size):
            number = collected[entry]
            slot = slots[number]
            inside = masks[number] & ~masks[number + 1]
            while inside != 0:
                if slot == ends[number]:
                    return False
                at = start + lowest_one(inside)
                target[at] = _step(int(target[at]), int(steps[slot]), top)
                slot += 1
                inside &= inside - as_mask(1)
            slots[number] = slot
    return True
