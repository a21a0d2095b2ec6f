"""Reading a curve of latency against throughput."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any


def throughput_at(rows: Iterable[Mapping[str, Any]], latency_s: float) -> float | None:
    """Requests/s served where the mean normalized latency crosses a bound, between two measured points.

    Args:
        rows: points of one server, with `normalized_latency_s_mean` and `served_requests_per_s`.
        latency_s: the bound.

    Returns:
        None if no two points are on either side of it.
    """
    points = ((row["normalized_latency_s_mean"], row["served_requests_per_s"]) for row in rows)
    pairs = sorted((x, y) for x, y in points if x is not None and not math.isnan(x))
    for (below, slow), (above, fast) in pairwise(pairs):
        if below <= latency_s <= above:
            return slow + (fast - slow) * (latency_s - below) / (above - below) if above > below else fast
    return None
