"""Measures a profile: whole steps as the engine runs them; what differs between two steps is what a cause
costs. Steps take turns, so that a machine that becomes busier slows all of them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import numpy as np

from host_cache.config import CHUNK_TOKENS
from pensieve_jax.config import TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KvDtype, check_kv_dtype
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.core.profile import StepProfile
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.build import tier_sizes
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.models.shape import shape_of
from pensieve_jax.parallel import make_mesh
from pensieve_jax.versions import package_version, processor
from pensieve_jax.worker.batch import BatchShapes, planned_heads, query_block
from pensieve_jax.worker.timing import Dispatch, StepTimer, repeats, seconds

MAX_ROWS = 64
"""Rows of the padded batches, as the scheduler has them unless told otherwise."""
TOKENS_FACTOR = 8
"""From one number of query tokens to the next; between, times are nearly straight lines."""
CONTEXT_HALVINGS = 5
"""The largest context is halved so often."""
LINK_PAGES = 64
"""Pages that are copied at once to measure the link: a step's swap-outs at most."""

PACKAGES = ("pensieve-jax", "jax", "jaxlib")
"""Whose versions decide how fast a step is."""

type Rows = tuple[Row, ...]
type Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """How a profile is measured.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    step_tokens: int
    """Query tokens of the largest step."""
    cost_rows: int
    """Rows of a chunk that run together when recomputing is measured; fewer if memory is short."""
    decode_rows: int
    """Rows of one token that run together when the rate of reading KV is measured."""
    max_context_tokens: int | None = None
    """Longest context; None: the model's."""
    rounds: int = 5
    """Measurements of each step, of which the median is taken."""
    seed: int = 0
    """Of the token ids."""
    kv_dtype: KvDtype | None = None
    """How keys and values are kept; None: in the model's dtype."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        least = 2 * CHUNK_TOKENS
        check(self.step_tokens >= least, "step_tokens", f"at least {least}")
        check(1 <= self.cost_rows <= MAX_ROWS, "cost_rows", f"1 to {MAX_ROWS}")
        check(1 <= self.decode_rows <= MAX_ROWS, "decode_rows", f"1 to {MAX_ROWS}")
        limit = self.max_context_tokens
        check(limit is None or limit >= least, "max_context_tokens", f"None or at least {least}")
        check(self.rounds >= 1, "rounds", "at least 1")
        check(self.seed >= 0, "seed", "at least 0")
        check_kv_dtype(self.kv_dtype)

    @classmethod
    def for_platform(cls, platform: str, **settings: Any) -> "ProfileConfig":
        """Sizes that fill a GPU, or that a CPU gets through; what is given and not None holds."""
        sizes = {"step_tokens": 2048, "cost_rows": 16, "decode_rows": 64}
        if platform == "cpu":
            sizes = {"step_tokens": 256, "cost_rows": 2, "decode_rows": 8}
        return cls(**{**sizes, **{name: value for name, value in settings.items() if value is not None}})


def measure_profile(
    model: ServableModel, config: ProfileConfig, *, num_shards: int = 1, progress: Progress | None = None
) -> StepProfile:
    """Measure a model on the devices of this process.

    Args:
        model: its weights are used in place; random ones do.
        config: what is measured.
        num_shards: devices to spread over.
        progress: called with (steps timed, steps in all); before the first round a step is compiled.

    Raises:
        InvalidArgumentError: the model doesn't divide over the shards, or not even one row of the longest
            context fits the device.
    """
    spec, mesh = model.spec, make_mesh(num_shards)
    device = mesh.devices.flat[0]
    limit = spec.context_limit(config.max_context_tokens)
    cost_rows, num_pages = _fit(model, config, limit, num_shards, device)
    tokens = _token_counts(config)
    shapes = BatchShapes(
        num_pages=num_pages,
        page_tokens=CHUNK_TOKENS,
        max_rows=MAX_ROWS,
        max_tokens=max(tokens[-1], cost_rows * CHUNK_TOKENS, MAX_ROWS),
        max_pages=-(-limit // CHUNK_TOKENS),
        planned_heads=planned_heads(spec, num_shards),
        block_q=query_block(spec),
        kv_dtype=config.kv_dtype,
    )
    timer = StepTimer(model, shapes=shapes, mesh=mesh, layered=device.platform == "cpu")
    rows = _RowMaker(num_pages, spec.vocab_size, config.seed)
    contexts = _contexts(limit)
    steps: dict[str, Rows] = {f"tokens {n}": rows.step_of(n, config.decode_rows, limit) for n in tokens}
    steps |= {f"context {n}": rows.make(cost_rows, CHUNK_TOKENS, n) for n in contexts}
    decode_context = min(limit, num_pages * CHUNK_TOKENS // config.decode_rows)
    steps["decode, short"] = rows.make(config.decode_rows, 1, 1)
    steps["decode"] = rows.make(config.decode_rows, 1, decode_context)
    long_row = min(tokens[-1], limit)
    steps["prompt"] = rows.make(tokens[-1] // long_row, long_row, long_row)
    times = _times({name: timer.step(step) for name, step in steps.items()}, config.rounds, progress)

    def extra_s(name: str, without: str) -> float:
        return max(0.0, float(np.median(times[name] - times[without])))

    more = (extra_s(f"context {n}", f"context {contexts[0]}") / cost_rows for n in contexts)
    pairs = _pairs(steps["prompt"]) - _pairs(steps[f"tokens {tokens[-1]}"])
    load, store = timer.link_rates(min(LINK_PAGES, num_pages), config.rounds)
    return StepProfile(
        model=shape_of(model, num_shards, kv_dtype=config.kv_dtype),
        device=device.device_kind,
        tokens=tokens,
        other_s=_rising(float(np.median(times[f"tokens {n}"])) for n in tokens),
        chunk_tokens=CHUNK_TOKENS,
        context_tokens=contexts,
        attention_s=tuple(accumulate(more, max)),  # more context never costs less: what does is noise
        pair_s=extra_s("prompt", f"tokens {tokens[-1]}") / max(1, pairs),
        kv_token_s=extra_s("decode", "decode, short") / (config.decode_rows * max(1, decode_context - 1)),
        load_bytes_per_s=load,
        store_bytes_per_s=store,
        versions={name: package_version(name) for name in PACKAGES},
        machine=processor(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        seed=config.seed,
    )


def _rising(times: Iterable[float]) -> tuple[float, ...]:
    """Times of ever more work, none longer than a later one: what seems so is noise, which only adds."""
    return tuple(accumulate(reversed(tuple(times)), min))[::-1]


def _times(steps: Mapping[str, Dispatch], rounds: int, progress: Progress | None) -> dict[str, np.ndarray]:
    """Seconds of each step in each round, f64[rounds]."""
    done, total = 0, len(steps) * (rounds + 1)

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    counts = {}
    for name, dispatch in steps.items():
        counts[name] = repeats(dispatch)
        advance()
    times = {name: np.zeros(rounds) for name in steps}
    for number in range(rounds):
        for name, dispatch in steps.items():
            times[name][number] = seconds(dispatch, counts[name])
            advance()
    return times


def _fit(
    model: ServableModel, config: ProfileConfig, limit: int, num_shards: int, device: Any
) -> tuple[int, int]:
    """Rows of a chunk that run together, and pages of the pool."""
    tiers = TierConfig(host_pages=0, kv_dtype=config.kv_dtype)
    room = tier_sizes(model.spec, tiers, device, num_shards).device_pages
    row_pages = -(-limit // CHUNK_TOKENS)
    step_pages = max(MAX_ROWS, -(-config.step_tokens // CHUNK_TOKENS))
    if row_pages > room or step_pages > room:
        raise InvalidArgumentError(
            f"max_context_tokens: {limit} tokens of context and a step of {config.step_tokens} need "
            f"{max(row_pages, step_pages)} pages, the device has room for {room}"
        )
    cost_rows = min(config.cost_rows, room // row_pages)
    return cost_rows, max(cost_rows * row_pages, step_pages)


def _token_counts(config: ProfileConfig) -> tuple[int, ...]:
    """1 to the largest step, a multiple of a chunk."""
    largest = config.step_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    counts = [1]
    while counts[-1] * TOKENS_FACTOR < largest:
        counts.append(counts[-1] * TOKENS_FACTOR)
    return (*counts, largest)


def _contexts(limit: int) -> tuple[int, ...]:
    """A chunk without history, then doubling contexts up to the limit."""
    halved = {limit >> n for n in range(CONTEXT_HALVINGS)}
    return (CHUNK_TOKENS, *sorted(n for n in halved if n > CHUNK_TOKENS))


def _pairs(rows: Rows) -> int:
    """Pairs of a query token and a token that it attends to."""
    counts = (len(row.token_ids) for row in rows)
    return sum(n * row.start + n * (n + 1) // 2 for n, row in zip(counts, rows, strict=True))


class _RowMaker:
    """Rows of random tokens over pages of their own, each step from the pool's first page on."""

    def __init__(self, num_pages: int, vocab_size: int, seed: int) -> None:
        self._num_pages = num_pages
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def make(self, count: int, q_len: int, kv_len: int) -> Rows:
        """Rows of `q_len` tokens that end at `kv_len`. Decoding rows sample; of others, the last."""
        pages = -(-kv_len // CHUNK_TOKENS)
        assert count * pages <= self._num_pages, "the pool is sized for every step"
        sample = SampleRequest(SamplingParams(seed=0), 0, np.zeros(0, np.int32))
        return tuple(
            Row(
                request_id=number,
                token_ids=self._rng.integers(self._vocab_size, size=q_len).astype(np.int32),
                start=kv_len - q_len,
                page_ids=np.arange(number * pages, (number + 1) * pages, dtype=np.int32),
                sample=sample if q_len == 1 or number == count - 1 else None,
            )
            for number in range(count)
        )

    def step_of(self, tokens: int, decode_rows: int, limit: int) -> Rows:
        """So many tokens without history: decoding rows, or else chunks, longer ones if they are many."""
        if tokens <= decode_rows:
            return self.make(tokens, 1, 1)
        length = min(tokens, limit, max(CHUNK_TOKENS, tokens // MAX_ROWS))
        return self.make(tokens // length, length, length)
