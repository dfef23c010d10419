"""Which elements of two tensors differ, found where the tensors are: on a GPU only what changed crosses the bus.

Bit patterns are compared, never values, so `+0` and `-0` differ and NaN payloads count. The result is what
`swarm_compression.stream_changes` takes, and the patch has the same bytes as one made on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from swarm_compression import Changes, Layout, State
from swarm_compression.tensors import Bits

from swarmtrain.errors import UserError, one_line

# The bits of an element of so many bytes, for torch, which has no unsigned integers to speak of.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A chunk needs up to 9 bytes an element beside the tensors, and once more the values: a mask, and positions and values
# where all differ. At this share of a tensor that stays below an eighth of it; small tensors are taken at once.
_CHUNK_SHARE = 128
_MIN_CHUNK = 1 << 14
_MAX_CHUNK = 1 << 26


def find_changes(new: torch.Tensor, base: torch.Tensor) -> Changes:
    """Returns where `new` differs from `base`, and the bits of `new` there, as NumPy arrays on the host.

    Both tensors are of one shape, dtype and device, and contiguous; any number of elements. Beside them, less than an
    eighth of one's memory is used on the device. Raises `ValueError` for tensors that cannot be compared.
    """
    if (new.shape, new.dtype, new.device) != (base.shape, base.dtype, base.device):
        raise ValueError("tensors of unequal shape, dtype or device")
    if not (new.is_contiguous() and base.is_contiguous()):
        raise ValueError("tensors that are not contiguous")
    width = new.element_size()
    new_bits, base_bits = (tensor.detach().reshape(-1).view(_BITS[width]) for tensor in (new, base))
    chunk = min(max(new_bits.numel() // _CHUNK_SHARE, _MIN_CHUNK), _MAX_CHUNK)
    positions, values = [np.empty(0, np.int64)], [np.empty(0, f"<u{width}")]
    # Python's integers count the chunks, so a tensor may have more elements than 32 bits can.
    for start in range(0, new_bits.numel(), chunk):
        part = new_bits[start : start + chunk]
        at = part.ne(base_bits[start : start + chunk]).nonzero().squeeze(1)
        if at.numel():
            positions.append(at.cpu().numpy() + np.int64(start))
            values.append(part.index_select(0, at).cpu().numpy().view(f"<u{width}"))
        del at  # or it would still be there while the next is made
    return Changes(np.concatenate(positions), np.concatenate(values))


def find_changes_of_state(
    new: State, base: State, layout: Layout, device: str, *, on_progress: Callable[[int], None] = lambda _: None
) -> dict[str, Changes]:
    """Returns the changes of each tensor of two states on the host (mapped files, say), compared on `device`.

    Slices of at most 128 MiB go there, so neither state has to fit. `on_progress` is told the elements of each.
    Raises `UserError` if the device cannot be used.
    """
    where = open_device(device)
    found = {}
    for spec in layout:
        sides = [state[spec.name].reshape(-1).view(f"u{spec.kind.width}") for state in (new, base)]
        step = (128 << 20) // spec.kind.width
        parts = [Changes(np.empty(0, np.int64), np.empty(0, spec.kind.bits_dtype))]
        for start in range(0, spec.elements, step):
            here = [_to_device(side[start : start + step], where) for side in sides]
            changes = find_changes(here[0], here[1])
            parts.append(Changes(changes.positions + start, changes.values))
            on_progress(here[0].numel())
        positions = np.concatenate([part.positions for part in parts])
        found[spec.name] = Changes(positions, np.concatenate([part.values for part in parts]))
    return found


def open_device(name: str) -> torch.device:
    """Returns the device if it works here. Raises `UserError` with one line that says why not."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(str(error).partition("\n")[0], 200)
        raise UserError(f"device {name!r} cannot be used: {reason}; leave out --device to compare on the CPU") from None
    return device


def _to_device(bits: Bits, device: torch.device) -> torch.Tensor:
    # A copy, because torch wants memory that it may write to; the file is mapped for reading.
    signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(signed.copy()).to(device)
