"""What the scheduler tells the worker, and what the worker answers. Values flow down, results come back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from host_cache.plan import PageCopy
from pensieve_jax.core.types import SampledToken, SamplingParams


class SampleRequest(NamedTuple):
    """How to choose the token that follows a row. A named tuple, since a step makes hundreds."""

    params: SamplingParams
    """`params.seed` is set."""
    num_generated: int
    """Tokens this turn has produced before; with the seed it fixes the random choice."""
    context_ids: np.ndarray
    """i32[context]: all tokens so far if a penalty needs them (`params.needs_history`), else empty.
    The last `num_generated` of them are this turn's output."""


class Row(NamedTuple):
    """A run of consecutive query tokens of one request (the paper's sub-request, section 4.3.4). A named
    tuple, since a step makes hundreds."""

    request_id: int
    token_ids: np.ndarray
    """i32[q_len]: the query tokens."""
    start: int
    """Position of the first query token; the row attends to positions 0 .. start + q_len - 1."""
    page_ids: np.ndarray
    """i32[ceil(kv_len / page_size)]: device pages that hold those positions."""
    sample: SampleRequest | None
    """Choose the next token after this row; None where more of the prompt follows."""
    awaited: bool = False
    """The row's only token is the one that the step before has chosen for this request. Its value is still on
    the device: what stands in `token_ids`, and last in `sample.context_ids`, means nothing."""

    @property
    def kv_len(self) -> int:
        """Tokens that the row's last query attends to, itself included."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One iteration over a batch of rows."""

    rows: tuple[Row, ...]
    """Rows of one request stand in ascending order of `start`."""
    swap_outs: tuple[PageCopy, ...]
    """Read before anything in this step writes: their device pages may be reused by this very step."""
    swap_ins: tuple[PageCopy, ...]
    """Each layer's pages arrive before that layer's attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """What is known of a step as soon as it was handed to the device. If `failed_swap_ins` is not empty, no
    row counts as computed."""

    failed_swap_ins: tuple[PageCopy, ...] = ()
    """Copies of this step whose device page holds nothing."""
    swap_in_wait_s: float = 0.0
    """Time that compute waited for swap-ins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step has brought."""

    samples: Mapping[int, SampledToken]
    """Request id -> the token chosen after its last row."""
    finished_swap_outs: tuple[PageCopy, ...]
    """Copies, of this step or earlier ones, whose bytes are in the host page now."""
    failed_swap_outs: tuple[PageCopy, ...]
    """Copies whose host page holds nothing."""
    unsound: frozenset[int] = frozenset()
    """Requests whose logits hold NaN: their tokens mean nothing."""
