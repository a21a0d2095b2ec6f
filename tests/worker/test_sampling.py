"""Sampling against a plain NumPy reference: distributions, penalties, and independence of rows."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import SampleRequest
from pensieve_jax.core.types import SampledToken, SamplingParams
from pensieve_jax.worker.sampling import SamplingArrays, sample, sampling_arrays, to_sampled_tokens

VOCAB = 40
DRAWS = 4096
jitted_sample = jax.jit(sample)


def make_request(
    params: SamplingParams, context: list[int] | None = None, generated: int = 0
) -> SampleRequest:
    context_ids = np.asarray(context if context is not None else [], np.int32)
    return SampleRequest(params=params, num_generated=generated, context_ids=context_ids)


def pack(requests: list[SampleRequest], **sizes: int) -> SamplingArrays:
    """For requests whose tokens the host knows."""
    rows = sizes["padded_rows"]
    return sampling_arrays(
        requests, sources=np.full(rows, rows, np.int32), previous=np.zeros(rows, np.int32), **sizes
    )


def run(
    logits: np.ndarray, requests: list[SampleRequest], padded_rows: int | None = None
) -> list[SampledToken]:
    """Samples with logits f32[len(requests), V]; padding rows are NaN, which must not reach a request."""
    padded_rows = padded_rows or len(requests)
    padded = np.full((padded_rows, logits.shape[1]), np.nan, np.float32)
    padded[: len(requests)] = logits
    arrays = pack(requests, padded_rows=padded_rows, vocab_size=logits.shape[1])
    return to_sampled_tokens(jitted_sample(jnp.asarray(padded), arrays), requests)


def run_ids(logits: np.ndarray, requests: list[SampleRequest], padded_rows: int | None = None) -> list[int]:
    return [token.token_id for token in run(logits, requests, padded_rows)]


def reference_scores(logits: np.ndarray, request: SampleRequest) -> np.ndarray:
    """f64[V]: one row after bias and penalties, token by token as the definitions read."""
    params = request.params
    scores = logits.astype(np.float64).copy()
    for token, value in params.logit_bias.items():
        scores[token] += value
    context = request.context_ids.tolist()
    output = context[len(context) - request.num_generated :]
    for token in set(context):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in output:
        scores[token] -= params.frequency_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty
    return scores


def reference_distribution(logits: np.ndarray, request: SampleRequest) -> np.ndarray:
    """f64[V]: the probability of each token."""
    params = request.params
    scores = reference_scores(logits, request)
    order = np.lexsort((np.arange(len(scores)), -scores))
    if params.temperature == 0:
        return np.eye(len(scores))[order[0]]
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / params.temperature)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    if params.top_p < 1:
        weights[order[before >= params.top_p]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


def assert_drawn_from(tokens: np.ndarray, expected: np.ndarray) -> None:
    """The counts fit the distribution: nothing outside its support, and chi-square under 5 sigma."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    # Rare tokens are counted together, as the test wants some five expected draws a cell.
    means = expected * len(tokens)
    rare = means < 5
    cells = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(means[~rare], means[rare].sum())
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    chi_square = ((cells - wanted) ** 2 / np.maximum(wanted, 1)).sum()
    freedom = max(len(cells) - 1, 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


DISTRIBUTIONS: Mapping[str, SamplingParams] = {
    "temperature_1": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_k_beyond_vocabulary": SamplingParams(temperature=1.0, top_k=1000),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "top_p_tiny": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2),
    "top_k_and_top_p": SamplingParams(temperature=1.0, top_k=6, top_p=0.6),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.5, 7: -100.0}),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.6),
    "rewarded": SamplingParams(temperature=1.0, frequency_penalty=-0.5, repetition_penalty=0.8),
    "all": SamplingParams(
        temperature=1.4,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={0: 1.0, 39: 2.0},
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_distribution(name: str) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32)
    context = [1, 1, 5, 8, 13, 8, 8, 21]
    requests = [
        make_request(dataclasses.replace(DISTRIBUTIONS[name], seed=seed), context, generated=4)
        for seed in range(DRAWS)
    ]
    drawn = np.asarray(run_ids(np.tile(logits, (DRAWS, 1)), requests))
    assert_drawn_from(drawn, reference_distribution(logits, requests[0]))


def test_draws_of_one_seed_follow_the_distribution_too() -> None:
    logits = np.random.default_rng(2).normal(0, 1.5, VOCAB).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=99)
    requests = [make_request(params, generated=generated) for generated in range(DRAWS)]
    drawn = np.asarray(run_ids(np.tile(logits, (DRAWS, 1)), requests))
    assert_drawn_from(drawn, reference_distribution(logits, requests[0]))
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.08


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0]), max_size=9),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_mixed_batches_draw_only_allowed_tokens_and_the_ones_drawn_alone(params, rng_seed) -> None:
    rng = np.random.default_rng(rng_seed)
    logits = rng.normal(0, 3, (len(params), VOCAB)).astype(np.float32)
    requests = []
    for row_params in params:
        length = int(rng.integers(0, 30))
        context = rng.integers(0, VOCAB, length).tolist()
        requests.append(make_request(row_params, context, generated=int(rng.integers(0, length + 1))))
    together = run_ids(logits, requests, padded_rows=8)
    for row, request in enumerate(requests):
        assert reference_distribution(logits[row], request)[together[row]] > 0
        assert together[row] == run_ids(logits[row : row + 1], [request])[0]


def test_a_seed_gives_the_same_tokens_wherever_its_row_stands() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (16, VOCAB)).astype(np.float32)
    requests = [
        make_request(SamplingParams(temperature=1.0, seed=seed, top_k=0 if seed % 2 else 7), generated=seed)
        for seed in range(16)
    ]
    expected = run_ids(logits, requests)
    order = rng.permutation(16)
    shuffled = run_ids(logits[order], [requests[row] for row in order], padded_rows=64)
    assert shuffled == [expected[row] for row in order]
    assert [run_ids(logits[row : row + 1], [requests[row]])[0] for row in range(16)] == expected


def test_all_bits_of_a_seed_count() -> None:
    logits = np.zeros((1, 1000), np.float32)
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    drawn = [run_ids(logits, [make_request(SamplingParams(temperature=1.0, seed=seed))])[0] for seed in seeds]
    assert len(set(drawn)) == len(seeds)


def test_greedy_takes_the_lowest_id_of_a_tie_and_top_k_of_one_equals_it() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [9, 4, 30]] = 2.0
    logits[1] = -3.0
    logits[2, 39] = 1e-3
    greedy = run_ids(logits, [make_request(SamplingParams())] * 3)
    assert greedy == [4, 0, 39]
    top_1 = [make_request(SamplingParams(temperature=2.0, top_k=1, seed=seed)) for seed in range(3)]
    assert run_ids(logits, top_1) == greedy


def test_ties_at_the_border_of_top_k_do_not_let_more_tokens_in() -> None:
    requests = [make_request(SamplingParams(temperature=1.0, top_k=3, seed=seed)) for seed in range(300)]
    assert set(run_ids(np.zeros((300, VOCAB), np.float32), requests)) == {0, 1, 2}


@pytest.mark.parametrize("ban", [-100.0, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_bans_all_but_one_token(ban: float, temperature: float) -> None:
    bias = {token: ban for token in range(VOCAB) if token != 17}
    params = SamplingParams(
        temperature=temperature, seed=5, logit_bias=bias, top_p=0.9, repetition_penalty=1.1
    )
    logits = np.random.default_rng(4).normal(0, 2, (1, VOCAB)).astype(np.float32)
    assert run_ids(logits, [make_request(params, [17, 3])]) == [17]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(0, 50, (1, VOCAB)).astype(np.float32)
    drawn = run_ids(logits, [make_request(SamplingParams(temperature=temperature, top_p=0.9, seed=1))])
    assert drawn == [int(logits.argmax())]


def test_log_probabilities_are_the_models_own() -> None:
    logits = np.random.default_rng(6).normal(0, 2, (3, VOCAB)).astype(np.float32)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    requests = [
        make_request(SamplingParams(temperature=5.0, seed=1, logprobs=4, logit_bias={2: 50.0})),
        make_request(SamplingParams(logprobs=0)),
        make_request(SamplingParams()),
    ]
    biased, plain, silent = run(logits, requests, padded_rows=4)
    assert biased.token_id == 2
    assert biased.logprob == pytest.approx(expected[0, 2], abs=1e-5)
    likeliest = np.argsort(-expected[0])[:4]
    assert [token for token, _ in biased.top_logprobs] == likeliest.tolist()
    assert [value for _, value in biased.top_logprobs] == pytest.approx(expected[0, likeliest], abs=1e-5)
    assert plain.logprob == pytest.approx(expected[1].max(), abs=1e-5)
    assert plain.top_logprobs == ()
    assert silent == SampledToken(token_id=int(logits[2].argmax()))


def test_more_alternatives_than_tokens() -> None:
    (token,) = run(np.arange(3, dtype=np.float32)[None], [make_request(SamplingParams(logprobs=20))])
    assert [token_id for token_id, _ in token.top_logprobs] == [2, 1, 0]


def test_a_greedy_batch_neither_sorts_nor_draws_nor_moves_arrays() -> None:
    def program(params: SamplingParams) -> tuple[SamplingArrays, str]:
        arrays = pack([make_request(params)] * 2, padded_rows=4, vocab_size=VOCAB)
        return arrays, jax.jit(sample).lower(jnp.zeros((4, VOCAB)), arrays).as_text()

    costly = ("stablehlo.sort", "stablehlo.exponential", "threefry")
    arrays, text = program(SamplingParams(top_p=0.5, top_k=3, seed=1))
    assert jax.tree.leaves(arrays) == []
    assert not [name for name in costly if name in text]
    _, text = program(SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=1))
    assert [name for name in costly if name in text] == list(costly)


def test_few_variants_are_compiled() -> None:
    jitted_sample.clear_cache()
    logits = np.zeros((2, VOCAB), np.float32)
    for length in range(1, 25):
        bias = dict.fromkeys(range(length), 1.0)
        params = SamplingParams(repetition_penalty=1.1, logit_bias=bias, temperature=0.1 * length, seed=1)
        run(logits, [make_request(params, list(range(length)), generated=length // 2)] * 2)
    assert jitted_sample._cache_size() == 3  # bias widths 8, 16 and 32


def test_only_the_output_travels_for_penalties_on_the_output() -> None:
    request = make_request(SamplingParams(presence_penalty=1.0), [1] * 5000 + [2], generated=1)
    arrays = pack([request], padded_rows=1, vocab_size=VOCAB)
    assert arrays.penalties is not None
    assert arrays.penalties.token_ids.shape == (1, 128)


def test_refuses_what_does_not_fit() -> None:
    biased = make_request(SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(InvalidArgumentError, match="logit_bias: got token 40"):
        pack([biased], padded_rows=1, vocab_size=VOCAB)
    with pytest.raises(InvalidArgumentError, match="padded_rows"):
        pack([biased] * 2, padded_rows=1, vocab_size=VOCAB)


def test_no_requests_at_all() -> None:
    assert run(np.zeros((0, VOCAB), np.float32), [], padded_rows=4) == []


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_on_a_token_that_only_the_device_knows(name: str) -> None:
    """Row 1 awaits its last token, which the step before has chosen as its sample 2; what the host has in its
    place means nothing. Rows 0 and 2 await nothing."""
    logits = np.random.default_rng(3).normal(size=(3, VOCAB)).astype(np.float32) + 2
    token = int(logits[1].argmax())
    params = SamplingParams(**{name: 1.9})
    known = [make_request(params, [5, 6, last], generated=2) for last in (8, token, 9)]
    guessed = [make_request(params, [5, 6, last], generated=2) for last in (8, 39, 9)]
    arrays = sampling_arrays(
        guessed,
        padded_rows=3,
        vocab_size=VOCAB,
        sources=np.array([4, 2, 4], np.int32),
        previous=np.array([1, 2, token, 3], np.int32),
    )
    output = jitted_sample(jnp.asarray(logits), arrays)
    assert to_sampled_tokens(output, guessed) == run(logits, known)
    assert run_ids(logits, known) != run_ids(logits, guessed), "the token matters"
    assert np.asarray(output.for_next_step).tolist() == [*np.asarray(output.token_ids).tolist(), 0]


def test_rows_with_nan_are_not_sound():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    logits[1, 7] = logits[3, 49] = np.nan
    logits[2, :49] = -np.inf
    requests = [make_request(SamplingParams(temperature=t, seed=1)) for t in (0.0, 0.0, 1.0, 1.0)]
    output = sample(jnp.asarray(logits), pack(requests, padded_rows=4, vocab_size=50))
    assert output.sound.tolist() == [True, False, True, False]
