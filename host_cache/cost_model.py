"""What it costs to compute a chunk again (paper, section 4.3.1).

Cost(l) = Cost_attention(l) + c: attention grows with the context, the rest of the layers does not.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCost:
    """Seconds to recompute one chunk at a context length, interpolated between profiled points.

    Raises:
        ValueError: the points are not ascending or the lengths differ.
    """

    context_tokens: tuple[int, ...]
    """Context lengths that were profiled, ascending."""
    attention_s: tuple[float, ...]
    """Attention time of one chunk over all layers at each of them."""
    other_s: float
    """Time of everything else for one chunk: the constant c."""
    source: str
    """Where the numbers come from, for people to read."""
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Answers so far: planning asks for few context lengths, and often."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.context_tokens, self.context_tokens[1:], strict=False))
        if len(self.context_tokens) < 2 or not ascending:
            raise ValueError(f"context_tokens: got {self.context_tokens}, expected two or more, ascending")
        if len(self.attention_s) != len(self.context_tokens):
            raise ValueError(
                f"attention_s: got {len(self.attention_s)} points, expected one per context length"
            )

    def __call__(self, context_tokens: int) -> float:
        """Seconds to recompute a chunk that ends at this context length."""
        seconds = self._known.get(context_tokens)
        if seconds is None:
            seconds = self._known[context_tokens] = self._interpolated(context_tokens)
        return seconds

    def _interpolated(self, context_tokens: int) -> float:
        xs, ys = self.context_tokens, self.attention_s
        right = min(
            max(bisect.bisect_left(xs, context_tokens), 1), len(xs) - 1
        )  # past the end: the last slope
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        attention = ys[right - 1] + slope * (max(context_tokens, xs[0]) - xs[right - 1])
        return attention + self.other_s


def analytic_cost(
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_parameters: int,
    chunk_tokens: int,
    max_context_tokens: int,
    flops_per_s: float,
) -> RecomputeCost:
    """Estimate the cost from a model's dimensions, for where no profile was measured.

    A chunk of s tokens costs 2 * s * parameters operations outside attention, and
    4 * s * l * heads * head_dim per layer inside it.

    Args:
        num_layers: transformer layers.
        num_heads: query heads.
        head_dim: elements of a head.
        num_parameters: weights that a token passes through.
        chunk_tokens: tokens of a chunk.
        max_context_tokens: largest context to describe.
        flops_per_s: rate of the device. It scales all costs alike, so no order depends on it.

    Returns:
        a cost whose `source` says that it is an estimate.
    """
    lengths: Sequence[int] = (0, max(1, max_context_tokens))
    attention = tuple(
        4.0 * chunk_tokens * n * num_heads * head_dim * num_layers / flops_per_s for n in lengths
    )
    return RecomputeCost(
        context_tokens=tuple(lengths),
        attention_s=attention,
        other_s=2.0 * chunk_tokens * num_parameters / flops_per_s,
        source="estimated from the model's dimensions, not measured",
    )
