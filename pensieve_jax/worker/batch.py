"""From a step plan's rows to arrays of a few fixed shapes."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import runs_here
from pallas_kernels.multi_token_attention import BLOCK_Q, AttentionPlan, plan_attention, tile_tokens
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.worker.sampling import SamplingArrays, sampling_arrays

SMALLEST_DECODE, SMALLEST_DECODE_HOPPER = 1, 8
"""Rows of the smallest padded batch of decode rows; all sizes are multiples of it. The kernels for Hopper
take 8 rows at once."""
FEW = 8
"""Below it, sizes are powers of two: what padding adds then is little."""
SMALLEST_PREFILL, SMALLEST_PREFILL_HOPPER = 16, 64
"""Tokens of the smallest padded batch that is not all decode rows; all sizes are multiples of it. Fewer
tokens would take a GPU as long."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "given_ids",
        "sources",
        "previous",
        "positions",
        "write_pages",
        "write_slots",
        "attention",
        "sample_tokens",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArrays:
    """A padded batch. Padding tokens write nowhere and belong to no row."""

    given_ids: jax.Array | np.ndarray
    """i32[num_tokens]: the tokens that the host knows."""
    sources: jax.Array | np.ndarray
    """i32[num_tokens]: the place among `previous` of a token that only the device knows; max_samples for
    the others."""
    previous: jax.Array | np.ndarray
    """i32[max_samples]: what the step before has chosen."""
    positions: jax.Array | np.ndarray
    """i32[num_tokens]: absolute positions."""
    write_pages: jax.Array | np.ndarray
    """i32[num_tokens]: the device page of each token's KV; the pool's size for padding."""
    write_slots: jax.Array | np.ndarray
    """i32[num_tokens]: the place in that page."""
    attention: AttentionPlan
    sample_tokens: jax.Array | np.ndarray
    """i32[num_samples]: the token after which each sampling row's next token is chosen."""

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return len(self.given_ids)

    @property
    def token_ids(self) -> jax.Array:
        """i32[num_tokens]: all tokens, those that only the device knows included."""
        return jnp.asarray(self.previous).at[self.sources].get(mode="fill", fill_value=0) + self.given_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """The limits that fix the padded shapes."""

    num_pages: int
    """Pages of the device pool."""
    page_tokens: int
    max_rows: int
    """Rows of a batch at most."""
    max_tokens: int
    """Query tokens of a batch at most."""
    max_pages: int
    """Pages of one row at most."""
    planned_heads: tuple[int, int] | None = None
    """Query and KV heads on one device, for the work items of the Hopper kernel; None where it isn't run,
    so that no step plans them for nothing."""
    block_q: int = BLOCK_Q
    """Query tokens of a tile of attention."""
    batch_invariant: bool = False
    """Whether a row's output is the same bits whatever else is in the batch. All batches then have one shape,
    since products of other shapes may sum in another order."""
    kv_dtype: KvDtype | None = None
    """How keys and values are kept; None: in the model's dtype."""

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Rows that a batch of decode rows is padded to."""
        if self.planned_heads is None:
            return sizes_up_to(self.max_rows, SMALLEST_DECODE)
        return sizes_up_to(self.max_rows, SMALLEST_DECODE_HOPPER, per_octave=2)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Tokens that any other batch is padded to. It is padded to `max_samples` rows."""
        sizes = sizes_up_to(self.max_tokens, SMALLEST_PREFILL)
        if self.planned_heads is not None:
            sizes = sizes_up_to(self.max_tokens, SMALLEST_PREFILL_HOPPER, per_octave=2)
        return sizes[-1:] if self.batch_invariant else sizes

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Pages that a copy between the tiers is padded to."""
        return sizes_up_to(self.num_pages, 1, per_octave=1 if self.planned_heads is None else 4)

    @property
    def max_samples(self) -> int:
        """Tokens that one step chooses at most, padding included."""
        return self.decode_sizes[-1]


def planned_heads(spec: ModelSpec, num_shards: int) -> tuple[int, int] | None:
    """What `BatchShapes.planned_heads` is for a model on this machine."""
    if not runs_here("mosaic"):
        return None
    return spec.num_heads // num_shards, spec.num_kv_heads // num_shards


def query_block(spec: ModelSpec) -> int:
    """What `BatchShapes.block_q` is for a model on this machine."""
    return tile_tokens(spec.num_heads // spec.num_kv_heads) if runs_here("triton") else BLOCK_Q


@lru_cache
def sizes_up_to(most: int, smallest: int, *, per_octave: int = 1) -> tuple[int, ...]:
    """Sizes to pad to: few, so that all can be compiled ahead, and near enough to each other that padding
    costs little.

    Args:
        most: the last size, or the next multiple of `smallest`.
        smallest: the first size; all are multiples of it.
        per_octave: sizes from each power of two to the next, from `FEW` on. One saves compiling where that
            takes longer than the padding ever will, as on a CPU.
    """
    last = -(-most // smallest) * smallest
    powers = [1 << octave for octave in range(last.bit_length())]
    between = [p * (per_octave + i) // per_octave for p in powers if p >= FEW for i in range(1, per_octave)]
    return (*sorted(size for size in powers + between if size < last and size % smallest == 0), last)


def padded(n: int, sizes: tuple[int, ...]) -> int:
    """The first of the ascending sizes that holds n."""
    return sizes[bisect.bisect_left(sizes, n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousSamples:
    """What the step before has chosen, still on the device."""

    token_ids: jax.Array | np.ndarray
    """i32[max_samples]"""
    places: Mapping[int, int]
    """Request id -> place of its token."""


def pack(
    rows: Sequence[Row], shapes: BatchShapes, previous: PreviousSamples
) -> tuple[BatchArrays, list[tuple[int, SampleRequest]]]:
    """Lay out the rows of a step.

    A batch of decode rows is padded to one of `decode_sizes`, any other to one of `prefill_sizes`. As many
    tokens are chosen as there are padded rows, so the tokens' number alone tells the shapes.

    Args:
        rows: at least one, at most `shapes.max_rows`.
        shapes: the limits.
        previous: where the tokens of awaited rows are.

    Returns:
        the arrays, and (request id, how to choose) for each entry of `sample_tokens` that isn't padding.
    """
    q_lens = [len(row.token_ids) for row in rows]
    total = sum(q_lens)
    if total == len(rows) and not shapes.batch_invariant:
        num_tokens = num_rows = padded(total, shapes.decode_sizes)
    else:
        num_tokens, num_rows = padded(total, shapes.prefill_sizes), shapes.max_samples
    given_ids = np.zeros(num_tokens, np.int32)
    sources = np.full(num_tokens, shapes.max_samples, np.int32)
    positions = np.zeros(num_tokens, np.int32)
    write_pages = np.full(num_tokens, shapes.num_pages, np.int32)
    write_slots = np.zeros(num_tokens, np.int32)
    samples: list[tuple[int, SampleRequest]] = []
    sample_tokens: list[int] = []
    at = 0
    for row, q_len in zip(rows, q_lens, strict=True):
        here = slice(at, at + q_len)
        where = np.arange(row.start, row.start + q_len)
        if row.awaited:
            sources[at] = previous.places[row.request_id]
        else:
            given_ids[here] = row.token_ids
        positions[here] = where
        write_pages[here] = row.page_ids[where // shapes.page_tokens]
        write_slots[here] = where % shapes.page_tokens
        at += q_len
        if row.sample is not None:
            samples.append((row.request_id, row.sample))
            sample_tokens.append(at - 1)
    padded_samples = np.zeros(num_rows, np.int32)
    padded_samples[: len(samples)] = sample_tokens
    num_heads, num_kv_heads = shapes.planned_heads or (None, None)
    if shapes.kv_dtype is not None:  # the Hopper kernel of attention has no 8-bit pages
        num_heads = num_kv_heads = None
    arrays = BatchArrays(
        given_ids=given_ids,
        sources=sources,
        previous=previous.token_ids,
        positions=positions,
        write_pages=write_pages,
        write_slots=write_slots,
        attention=plan_attention(
            q_lens=q_lens,
            kv_lens=[row.kv_len for row in rows],
            pages=[row.page_ids for row in rows],
            max_rows=num_rows,
            max_pages=shapes.max_pages,
            max_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_q=shapes.block_q,
            batch_invariant=shapes.batch_invariant,
        ),
        sample_tokens=padded_samples,
    )
    return arrays, samples


def batch_sampling(
    batch: BatchArrays, requests: Sequence[SampleRequest], *, vocab_size: int
) -> SamplingArrays:
    """How to choose the tokens of a batch from `pack`: request i describes its i-th sampling row."""
    return sampling_arrays(
        requests,
        padded_rows=len(batch.sample_tokens),
        vocab_size=vocab_size,
        sources=np.asarray(batch.sources)[batch.sample_tokens],
        previous=batch.previous,
    )


def blank(num_tokens: int, shapes: BatchShapes, previous: PreviousSamples, *, decode: bool) -> BatchArrays:
    """A padded batch that writes nowhere and means nothing: to compile what runs its like.

    Args:
        num_tokens: one of `shapes.decode_sizes` or `shapes.prefill_sizes`.
        shapes: the limits.
        previous: of a step.
        decode: all rows are decode rows.
    """
    longest = shapes.max_pages * shapes.page_tokens
    rows: list[Row] = []
    left = min(num_tokens, shapes.max_rows if decode else shapes.max_tokens)
    while left:
        count = 1 if decode else min(left, longest)
        pages = np.zeros(-(-count // shapes.page_tokens), np.int32)
        rows.append(Row(0, np.zeros(count, np.int32), 0, pages, None))
        left -= count
    batch, _ = pack(rows, shapes, previous)
    return replace(batch, write_pages=np.full_like(batch.write_pages, shapes.num_pages))
