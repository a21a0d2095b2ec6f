"""What the cache manager answers: values that say which pages move and which tokens must be computed."""

from dataclasses import dataclass
from typing import NamedTuple


class PageCopy(NamedTuple):
    """One page to copy between the tiers, for all layers. Only page ids cross to the transfer code."""

    device_page: int
    host_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The answer to an admission: every page is allocated and every copy listed, or nothing happened."""

    swap_ins: tuple[PageCopy, ...]
    """Host pages to load. Their device pages are valid once the copies have ended."""
    missing: tuple[tuple[int, int], ...]
    """Token ranges [start, end) to compute, ascending, disjoint and not touching: gaps first, the new
    tokens' range last (a gap that touches the new tokens is part of that last range)."""
    tokens_from_device: int
    """Cached tokens that were in the device tier."""
    tokens_from_host: int
    """Cached tokens that `swap_ins` loads."""
    tokens_recomputed: int
    """Tokens of the history that are in no tier, hence in `missing`."""
    tokens_new: int
    """Tokens that were never computed before, in `missing` too."""
    gaps: int
    """Runs of recomputed tokens of at most one chunk."""
    long_gaps: int
    """Runs of recomputed tokens of more than one chunk."""
    tokens_shared: int
    """Cached tokens, from either tier, that another conversation has computed."""
