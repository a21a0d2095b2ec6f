"""A turn as the scheduler sees it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pensieve_jax.core.types import SampledToken, SamplingParams

NO_PAGES = np.zeros(0, np.int32)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One turn of one conversation, from its arrival to its end. Only the scheduler changes it."""

    id: int
    """Ascending in the order of arrival."""
    conversation_id: str
    params: SamplingParams
    """`params.seed` and `params.max_tokens` are set."""
    stop_token_ids: frozenset[int]
    """All token ids that end the turn."""
    tokens: np.ndarray
    """i32[capacity]: history, new tokens and output; the first `num_tokens` are valid."""
    num_tokens: int
    """Awaited ones included."""
    num_prompt_tokens: int
    """Tokens before the first output token: history and new ones."""
    num_history_tokens: int
    """Tokens of earlier turns that were computed in those turns."""
    arrived_s: float
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    """Token ranges [start, end) that are still to be computed while it runs, ascending."""
    running: bool = False
    capacity_tokens: int = 0
    """While it runs: tokens that its pages hold."""
    page_ids: np.ndarray = field(default_factory=lambda: NO_PAGES)
    """i32[pages]: while it runs, its device pages."""
    num_computed: int = 0
    """Tokens up to the last one that this turn has computed."""
    counts: "AdmissionCounts | None" = None
    """Where the context came from when it was first admitted."""
    tokens_restored: int = 0
    suspensions: int = 0
    num_awaited: int = 0
    """Tokens at the end that a step under way chooses: their values are not known yet."""
    swap_in_wait_s: float = 0.0
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def num_known(self) -> int:
        """Tokens whose values are known."""
        return self.num_tokens - self.num_awaited

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far, awaited ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def decoding(self) -> bool:
        """Whether one token is left to compute before the next is chosen."""
        return len(self.pending) == 1 and self.pending[0][1] - self.pending[0][0] == 1

    def await_token(self) -> None:
        """Add the output token that a step under way chooses. It is the next to compute, unless it is the
        last one."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros(max(64, self.num_tokens), np.int32)])
        self.num_tokens += 1
        self.num_awaited += 1
        assert self.params.max_tokens is not None
        if self.num_output_tokens < self.params.max_tokens:
            self.pending.append((self.num_tokens - 1, self.num_tokens))

    def learn(self, token_id: int) -> None:
        """The value of the first awaited token has come."""
        self.tokens[self.num_known] = token_id
        self.num_awaited -= 1

    def forget_awaited(self) -> None:
        """The request has ended: nobody wants the tokens that are still to come."""
        self.num_tokens = self.num_known
        self.num_awaited = 0

    def pieces(self, budget: int) -> Iterator[tuple[int, int]]:
        """The next ranges to compute, of at most `budget` tokens in all."""
        for start, end in self.pending:
            if budget <= 0:
                return
            piece = min(end - start, budget)
            yield start, start + piece
            budget -= piece

    def computed(self, start: int, end: int) -> None:
        """Take a range that `pieces` gave off what is to be computed."""
        first, last = self.pending.popleft()
        assert first == start and end <= last, "ranges are computed in order"
        if end < last:
            self.pending.appendleft((end, last))
        self.num_computed = max(self.num_computed, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCounts:
    """Where a turn's context came from."""

    new: int
    from_device: int
    from_host: int
    recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step brought for one request."""

    request_id: int
    token: SampledToken
    finished: bool
    """A stop token (then `stopped`), or `max_tokens` are reached."""
    stopped: bool
