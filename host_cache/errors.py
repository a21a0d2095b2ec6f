"""The faults this package raises. A full cache is a normal answer, not one of them."""


class CacheError(Exception):
    """Root of the cache's own errors."""


class IntegrityError(CacheError):
    """The books don't add up: a page is owned twice, lost or freed twice. Always a fault of this package."""


class TransferError(CacheError):
    """A copy between the tiers failed, or a tier can't be had at the size that was asked for."""
