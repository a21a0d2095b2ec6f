"""Choosing the next token of every row, on the device.

`sampling_arrays` turns a batch's requests into arrays on the host; `sample` is a pure function of logits
and those arrays, to be called under `jax.jit`. What no request of a batch asks for is `None` in the arrays,
so the structure of the pytree selects the compiled variant: a greedy batch computes one argmax and moves no
array.

The order is that of `transformers` and vLLM: logit bias, penalties, temperature, top-k, top-p, min-p, draw.
The draw is an argmax after adding Gumbel noise, whose key depends on the request's seed and on how many
tokens the turn has produced. Rows are independent of each other, so neither a row's position nor the rest
of the batch changes its token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import SampleRequest
from pensieve_jax.core.types import SampledToken, SamplingParams

MAX_TOP_LOGPROBS = 20
"""The most that `SamplingParams.logprobs` can ask for; always computed in full: one variant serves all."""

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Smaller temperatures are greedy: dividing by them overflows float32. vLLM's `_SAMPLING_EPS`."""

_MIN_BIAS_WIDTH = 8
_MIN_HISTORY_WIDTH = 128

# Named, because the default may be configured to one whose bits depend on the batch under vmap (rbg).
_PRNG = "threefry2x32"

type Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class BiasArrays:
    """Numbers added to single logits."""

    token_ids: Array
    """i32[S, B]: the vocabulary's size marks an unused entry."""
    values: Array
    """f32[S, B]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyArrays:
    """Penalties on tokens seen before, and the tokens that they look at."""

    token_ids: Array
    """i32[S, H]: tokens of the context, as far as the row's penalties need them; the vocabulary's size marks
    an unused entry."""
    output_starts: Array
    """i32[S]: entries of `token_ids` from here on were produced by this turn."""
    repetition: Array
    """f32[S]: 1 is neutral."""
    presence: Array
    """f32[S]: 0 is neutral."""
    frequency: Array
    """f32[S]: 0 is neutral."""
    sources: Array
    """i32[S]: the place among `previous` of the context's last token where only the device knows it;
    max_samples elsewhere."""
    awaited_places: Array
    """i32[S]: the place of that token in `token_ids`; H for rows that know all of their tokens."""
    previous: Array
    """i32[max_samples]: what the step before has chosen."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class FilterArrays:
    """Which of the likeliest tokens may be drawn."""

    top_k: Array
    """i32[S]: the vocabulary's size is neutral."""
    top_p: Array
    """f32[S]: 1 is neutral."""
    min_p: Array
    """f32[S]: 0 is neutral."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawArrays:
    """What the random choice needs."""

    temperature: Array
    """f32[S]: 0 marks a greedy row."""
    key_data: Array
    """u32[S, 2]: high and low half of the seed, which is the data of `jax.random.key(seed)`."""
    num_generated: Array
    """i32[S]: folded into the key."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """How to choose a batch's tokens. A part is None if no row needs it.

    A compiled variant depends on which parts are there, on the widths B and H (powers of two) and on the two
    flags, beside the shape of the logits.
    """

    bias: BiasArrays | None
    penalties: PenaltyArrays | None
    filters: FilterArrays | None
    draw: DrawArrays | None
    """None: every row is greedy."""
    logprobs: bool = field(metadata={"static": True})
    """Whether a row wants the log probability of its token."""
    top_logprobs: bool = field(metadata={"static": True})
    """Whether a row wants the likeliest alternatives too."""
    max_samples: int = field(metadata={"static": True})
    """Tokens that one step chooses at most."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """What `sample` chose.

    Log probabilities are those of the model's own distribution, before bias, penalties, temperature and
    filters; None where no row wants them.
    """

    token_ids: Array
    """i32[S]"""
    sound: Array
    """bool[S]: False where the logits hold NaN, so that the token means nothing."""
    for_next_step: Array | None
    """i32[max_samples]: the same, padded: one shape whatever S is."""
    logprobs: Array | None
    """f32[S]: of the chosen tokens."""
    top_ids: Array | None
    """i32[S, min(20, V)]: the likeliest tokens, in descending order."""
    top_logprobs: Array | None
    """f32[S, min(20, V)]"""


def sampling_arrays(
    requests: Sequence[SampleRequest],
    *,
    padded_rows: int,
    vocab_size: int,
    sources: np.ndarray,
    previous: Array,
) -> SamplingArrays:
    """Packs the requests of a batch for `sample`, on the host, with NumPy.

    Args:
        requests: request i describes row i; `params.seed` is set where the temperature is not 0.
        padded_rows: S, the number of rows of the logits, at least `len(requests)`. Rows past the requests get
            neutral settings.
        vocab_size: V, the width of the logits.
        sources: i32[S]: the place among `previous` of the last token of each row's context where only the
            device knows it; max_samples elsewhere.
        previous: i32[max_samples]: what the step before has chosen.

    Raises:
        InvalidArgumentError: a logit bias names a token outside the vocabulary, or there are fewer rows than
            requests.
    """
    if len(requests) > padded_rows:
        raise InvalidArgumentError(f"padded_rows: got {padded_rows}, expected at least {len(requests)}")
    params = [request.params for request in requests]
    sampled = [p for p in params if not _is_greedy(p)]
    biased = any(p.logit_bias for p in params)
    penalised = any(p.needs_history for p in params)
    filtered = any(0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0 for p in sampled)
    return SamplingArrays(
        bias=_bias_arrays(requests, padded_rows, vocab_size) if biased else None,
        penalties=_penalty_arrays(requests, padded_rows, vocab_size, sources, previous)
        if penalised
        else None,
        filters=_filter_arrays(requests, padded_rows, vocab_size) if filtered else None,
        draw=_draw_arrays(requests, padded_rows) if sampled else None,
        logprobs=any(p.logprobs is not None for p in params),
        top_logprobs=any(p.logprobs for p in params),
        max_samples=len(previous),
    )


def sample(logits: jax.Array, arrays: SamplingArrays) -> SampleOutput:
    """Chooses one token per row. Pure; of equal logits the lowest token id counts as the likelier one.

    Args:
        logits: f32[S, V]: the model's output.
        arrays: from `sampling_arrays` with the same S and V.

    Returns:
        The chosen tokens. Rows that stand for no request hold an arbitrary token of the vocabulary.
    """
    logits = logits.astype(jnp.float32)
    scores = logits
    if arrays.bias is not None:
        scores = _add_bias(scores, arrays.bias)
    if arrays.penalties is not None:
        scores = _penalise(scores, arrays.penalties)
    token_ids = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    # Of scores with NaN among them the first NaN counts as the largest.
    sound = ~jnp.isnan(jnp.take_along_axis(scores, token_ids[:, None], axis=-1)[:, 0])
    if arrays.draw is not None:
        drawn = _draw(scores, arrays.draw, arrays.filters)
        token_ids = jnp.where(jnp.asarray(arrays.draw.temperature) > 0, drawn, token_ids)

    logprobs = top_ids = top_logprobs = None
    if arrays.logprobs:
        log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = (jnp.take_along_axis(logits, token_ids[:, None], axis=-1) - log_total)[:, 0]
        if arrays.top_logprobs:
            top_logits, top_ids = jax.lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
            top_logprobs = top_logits - log_total
    return SampleOutput(
        token_ids=token_ids,
        sound=sound,
        for_next_step=jnp.pad(token_ids, (0, arrays.max_samples - len(token_ids))),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def to_sampled_tokens(output: SampleOutput, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """Brings the result of `sample` to the host, waiting for it, as one value per request.

    Args:
        output: of `sample`, with the arrays that were made from the same requests.
        requests: request i describes row i. Each gets only the log probabilities that it asked for.
    """
    host: SampleOutput = jax.device_get(output)
    token_ids = host.token_ids.tolist()
    logprobs = [] if host.logprobs is None else host.logprobs.tolist()
    tokens = []
    for row, request in enumerate(requests):
        wanted = request.params.logprobs
        top: tuple[tuple[int, float], ...] = ()
        if wanted and host.top_ids is not None and host.top_logprobs is not None:
            top_ids, top_logprobs = host.top_ids[row, :wanted], host.top_logprobs[row, :wanted]
            top = tuple(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
        logprob = None if wanted is None else logprobs[row]
        tokens.append(SampledToken(token_id=token_ids[row], logprob=logprob, top_logprobs=top))
    return tokens


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW_TEMPERATURE


def _width(entries: int, floor: int) -> int:
    """The width of an array that holds `entries`: a power of two, so that few widths are ever compiled."""
    return max(floor, 1 << (entries - 1).bit_length()) if entries else floor


def _padded(values: Iterable[float], padded_rows: int, neutral: float, dtype: type[np.generic]) -> np.ndarray:
    """One number per row; rows past the requests are neutral."""
    array = np.full(padded_rows, neutral, dtype)
    given = np.asarray(list(values), dtype)
    array[: len(given)] = given
    return array


def _bias_arrays(requests: Sequence[SampleRequest], padded_rows: int, vocab_size: int) -> BiasArrays:
    width = _width(max(len(request.params.logit_bias) for request in requests), _MIN_BIAS_WIDTH)
    token_ids = np.full((padded_rows, width), vocab_size, np.int32)
    values = np.zeros((padded_rows, width), np.float32)
    for row, request in enumerate(requests):
        bias = request.params.logit_bias
        outside = [token_id for token_id in bias if not 0 <= token_id < vocab_size]
        if outside:
            raise InvalidArgumentError(
                f"logit_bias: got token {outside[0]}, expected ids in [0, {vocab_size})"
            )
        token_ids[row, : len(bias)] = list(bias.keys())
        values[row, : len(bias)] = list(bias.values())
    return BiasArrays(token_ids=token_ids, values=values)


def _penalty_arrays(
    requests: Sequence[SampleRequest],
    padded_rows: int,
    vocab_size: int,
    sources: np.ndarray,
    previous: Array,
) -> PenaltyArrays:
    histories = [_penalised_history(request) for request in requests]
    width = _width(max(len(history) for history in histories), _MIN_HISTORY_WIDTH)
    token_ids = np.full((padded_rows, width), vocab_size, np.int32)
    for row, history in enumerate(histories):
        token_ids[row, : len(history)] = history
    starts = (
        len(history) - request.num_generated for history, request in zip(histories, requests, strict=True)
    )
    awaited_places = (
        len(history) - 1 if len(history) and source < len(previous) else width
        for history, source in zip(histories, sources, strict=False)
    )
    params = [request.params for request in requests]
    return PenaltyArrays(
        token_ids=token_ids,
        output_starts=_padded(starts, padded_rows, 0, np.int32),
        repetition=_padded((p.repetition_penalty for p in params), padded_rows, 1, np.float32),
        presence=_padded((p.presence_penalty for p in params), padded_rows, 0, np.float32),
        frequency=_padded((p.frequency_penalty for p in params), padded_rows, 0, np.float32),
        sources=sources,
        awaited_places=_padded(awaited_places, padded_rows, width, np.int32),
        previous=previous,
    )


def _penalised_history(request: SampleRequest) -> np.ndarray:
    """i32[n]: the end of the context that the request's penalties look at."""
    if request.params.repetition_penalty != 1.0:
        return request.context_ids
    # The other two look at this turn's output alone, which keeps the array narrow in long conversations.
    if request.params.needs_history:
        return request.context_ids[len(request.context_ids) - request.num_generated :]
    return request.context_ids[:0]


def _filter_arrays(requests: Sequence[SampleRequest], padded_rows: int, vocab_size: int) -> FilterArrays:
    params = [request.params for request in requests]
    top_k = (min(p.top_k, vocab_size) or vocab_size for p in params)
    return FilterArrays(
        top_k=_padded(top_k, padded_rows, vocab_size, np.int32),
        top_p=_padded((p.top_p for p in params), padded_rows, 1, np.float32),
        min_p=_padded((p.min_p for p in params), padded_rows, 0, np.float32),
    )


def _draw_arrays(requests: Sequence[SampleRequest], padded_rows: int) -> DrawArrays:
    temperature = np.zeros(padded_rows, np.float32)
    key_data = np.zeros((padded_rows, 2), np.uint32)
    for row, request in enumerate(requests):
        if not _is_greedy(request.params):
            seed = request.params.seed
            assert seed is not None, "the engine draws a seed for requests that come without one"
            temperature[row] = request.params.temperature
            key_data[row] = seed >> 32, seed & 0xFFFFFFFF
    generated = (request.num_generated for request in requests)
    return DrawArrays(
        temperature=temperature, key_data=key_data, num_generated=_padded(generated, padded_rows, 0, np.int32)
    )


def _add_bias(scores: jax.Array, bias: BiasArrays) -> jax.Array:
    rows = jnp.arange(scores.shape[0])[:, None]
    return scores.at[rows, bias.token_ids].add(jnp.asarray(bias.values), mode="drop")


def _penalise(scores: jax.Array, penalties: PenaltyArrays) -> jax.Array:
    """Repetition as in CTRL (arXiv 1909.05858) over the whole context, the other two as in OpenAI's API."""
    token_ids = jnp.asarray(penalties.token_ids)
    rows = jnp.arange(scores.shape[0])[:, None]
    awaited = jnp.asarray(penalties.previous).at[penalties.sources].get(mode="fill", fill_value=0)
    token_ids = token_ids.at[rows[:, 0], penalties.awaited_places].set(awaited, mode="drop")
    is_output = jnp.arange(token_ids.shape[1]) >= jnp.asarray(penalties.output_starts)[:, None]
    seen = jnp.zeros(scores.shape, jnp.bool_).at[rows, token_ids].set(True, mode="drop")
    zeros = jnp.zeros(scores.shape, jnp.int32)
    counts = zeros.at[rows, token_ids].add(is_output.astype(jnp.int32), mode="drop")

    repetition = jnp.asarray(penalties.repetition)[:, None]
    scores = jnp.where(seen, jnp.where(scores > 0, scores / repetition, scores * repetition), scores)
    scores -= jnp.asarray(penalties.frequency)[:, None] * counts.astype(jnp.float32)
    return scores - jnp.asarray(penalties.presence)[:, None] * (counts > 0).astype(jnp.float32)


def _draw(scores: jax.Array, draw: DrawArrays, filters: FilterArrays | None) -> jax.Array:
    """i32[S]: a token per row; meaningless for greedy rows."""
    temperature = jnp.asarray(draw.temperature)[:, None]
    # Relative to the largest, so that small temperatures overflow to -inf only, which is probability 0.
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    scores = scores / jnp.where(temperature > 0, temperature, 1.0)
    if filters is not None:
        scores = jnp.where(_allowed(scores, filters), scores, -jnp.inf)
    keys = jax.random.wrap_key_data(jnp.asarray(draw.key_data), impl=_PRNG)

    def noise(key: jax.Array, num_generated: jax.Array) -> jax.Array:
        # "high": with 23 random bits a token, large vocabularies would see the noise's upper tail cut off.
        key = jax.random.fold_in(key, num_generated)
        return jax.random.gumbel(key, scores.shape[1:], jnp.float32, mode="high")

    perturbed = scores + jax.vmap(noise)(keys, jnp.asarray(draw.num_generated))
    return jnp.argmax(perturbed, axis=-1).astype(jnp.int32)


def _allowed(scores: jax.Array, filters: FilterArrays) -> jax.Array:
    """bool[S, V]: tokens that pass top-k, then top-p among those, then min-p.

    Each filter keeps a prefix of the tokens in descending order, so after one sort the shortest prefix
    decides, and its last token, by score and id, is the border in the unsorted row.

    Args:
        scores: f32[S, V], the largest of each row 0.
        filters: the rows' settings.
    """
    vocab_size = scores.shape[-1]
    token_ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    # Stable, so that equal scores stay in ascending order of ids.
    negated, sorted_ids = jax.lax.sort((-scores, token_ids), dimension=-1, is_stable=True, num_keys=1)
    rank = token_ids
    weights = jnp.exp(-negated)

    top_k, top_p, min_p = (
        jnp.asarray(setting)[:, None] for setting in (filters.top_k, filters.top_p, filters.min_p)
    )
    sums = jnp.cumsum(jnp.where(rank < top_k, weights, 0.0), axis=-1)
    # A token is in the nucleus if those before it do not reach p. Rounding must not cut where p is 1.
    sums_before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
    in_nucleus = (sums_before < top_p * sums[:, -1:]) | (top_p >= 1.0)
    kept = jnp.sum((rank < top_k) & in_nucleus & (weights >= min_p), axis=-1, keepdims=True)

    border = jnp.clip(kept - 1, 0, vocab_size - 1)
    border_score = -jnp.take_along_axis(negated, border, axis=-1)
    border_id = jnp.take_along_axis(sorted_ids, border, axis=-1)
    return (scores > border_score) | ((scores == border_score) & (token_ids <= border_id))
