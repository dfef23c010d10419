"""Everything that a codec of this package can raise: `CodecError` and its kinds."""

from __future__ import annotations


class CodecError(Exception):
    """A weight codec could not do what was asked."""


class CorruptPatch(CodecError):
    """The bytes are damaged, truncated, forged or not of this format."""


class UnsupportedFormat(CorruptPatch):
    """The bytes state a format version or codec that this release does not know."""


class LimitExceeded(CodecError):
    """The bytes ask for more memory than the caller's limits allow."""


class LayoutMismatch(CodecError):
    """Names, dtypes or shapes are not those that the operation needs."""


class WrongBase(CodecError):
    """The patch is relative to another state; fetch that one (or a patch against this one) and retry.

    `expected` is the state hash that the patch names, `found` that of the state it was applied to.
    """

    def __init__(self, expected: bytes, found: bytes) -> None:
        super().__init__(f"the patch is relative to state {expected.hex()[:16]}…, not to {found.hex()[:16]}…")
        self.expected = expected
        self.found = found


class WrongHistory(CodecError):
    """The patch needs the state before its base too; find that one (or a patch without history) and retry.

    `expected` is the state hash that the patch names, `found` that of the history at hand, None where there is none.
    """

    def __init__(self, expected: bytes, found: bytes | None) -> None:
        at_hand = f"state {found.hex()[:16]}… was given" if found else "none was given"
        super().__init__(f"the patch needs state {expected.hex()[:16]}… as the history of its base, but {at_hand}")
        self.expected = expected
        self.found = found


class NotFinite(CodecError):
    """A lossy encoder was given NaN or infinity."""
