"""A sample of finished turns computed again, cold, from what the log has of them, and compared."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.core.types import SampledToken, SamplingParams
from pensieve_jax.engine.turn import Turn

logger = logging.getLogger(__name__)
NUM_CANDIDATES = 5
"""Likeliest tokens that a recomputation gives beside the one it chose."""
LEAST_TOLERANCE = 1e-3
"""Log probabilities closer than this count as equal: sums in another order differ so much in float32."""
TOLERANCE_PER_EPS = 16
"""For coarser dtypes: so many times the dtype's rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCounters:
    """What the engine has found out about itself since the start."""

    books_checked: int = 0
    """Times that the cache's books were found in order (`paranoid`)."""
    pages_summed: int = 0
    """Host pages whose checksum was taken as they came (`paranoid`)."""
    pages_verified: int = 0
    """Host pages that were checked before they went back to the device."""
    pages_damaged: int = 0
    """Those of them whose bytes had changed. They were not loaded, but recomputed."""
    turns_recomputed: int = 0
    """Finished turns that were computed again (`recompute_share`)."""
    turns_different: int = 0
    """Those of them that came out otherwise."""
    turns_unreadable: int = 0
    """Turns that were to be computed again and are damaged in the log, or not what was served."""
    faults_injected: int = 0
    """Copies that were made to go wrong (`transfer_faults`)."""


class Auditor:
    """Draws the turns and judges what their recomputation brings. Only greedy turns are drawn: two
    computations of one turn agree up to rounding, so what is compared is the choice that was made."""

    def __init__(self, share: float, seed: int, dtype: np.dtype, kv_dtype: KvDtype | None = None) -> None:
        """Args:
        share: of the greedy turns, in [0, 1].
        seed: draws them.
        dtype: of the model.
        kv_dtype: how keys and values are kept; None: in the model's dtype.
        """
        self._share = share
        self._random = np.random.default_rng([seed, 1])
        eps = float(jnp.finfo(dtype).eps)
        if kv_dtype is not None:
            # A key that the dtype rounds otherwise, by eps, becomes with a probability of eps / kv_eps
            # another one in 8 bits, by kv_eps: on average the root of this times kv_eps squared.
            eps = math.sqrt(eps * float(jnp.finfo(jnp.float8_e4m3fn).eps))
        self.tolerance = max(LEAST_TOLERANCE, TOLERANCE_PER_EPS * eps)
        """Nats."""
        self.turns_recomputed = self.turns_different = self.turns_unreadable = 0

    def draws(self, params: SamplingParams) -> bool:
        """Whether a turn that was sampled so is to be computed again."""
        plain = params.temperature == 0 and not params.needs_history and not params.logit_bias
        return self._share > 0 and plain and self._random.random() < self._share

    @staticmethod
    def params(num_tokens: int) -> SamplingParams:
        """How to compute a turn again that has so many output tokens."""
        return SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=NUM_CANDIDATES)

    def unreadable(self, conversation_id: str, why: object) -> None:
        """Note that the log doesn't give a turn as it was served."""
        self.turns_unreadable += 1
        logger.error(
            "conversation %r: the log has another last turn than was served: %s", conversation_id, why
        )

    def judge(self, conversation_id: str, served: Sequence[int], again: Turn) -> None:
        """Compare a turn with its recomputation, which has ended; a failed or cancelled one says nothing."""
        try:
            tokens = again.result().tokens
        except PensieveError:
            return
        if not tokens:
            return
        self.turns_recomputed += 1
        at = next((n for n, token in enumerate(tokens) if token.token_id != served[n]), None)
        if at is None or self._tie(tokens[at], served[at]):
            return  # after a tie both go their own ways
        self.turns_different += 1
        logger.error(
            "conversation %r: token %d of the last turn was %d and is %d when everything is computed again",
            conversation_id, at, served[at], tokens[at].token_id,
        )  # fmt: skip

    def _tie(self, chosen: SampledToken, served: int) -> bool:
        assert chosen.logprob is not None
        of_served = dict(chosen.top_logprobs).get(served)
        return of_served is not None and chosen.logprob - of_served <= self.tolerance


class Unattended:
    """The driver of a turn that nobody waits for or cancels."""

    has_thread = True

    def advance(self, turn: Turn, seen: int) -> None:
        """Nobody waits."""

    def cancel(self, turn: Turn) -> None:
        """Nobody cancels."""

    cancel_soon = cancel


def unattended_turn(conversation_id: str, when_done: Callable[[Turn], None]) -> Turn:
    """A turn that is given to a function when it has ended."""
    turn = Turn(Unattended(), conversation_id)
    turn.listen(lambda: when_done(turn) if turn.done else None)
    return turn
