"""From a step plan's rows to arrays of a few fixed shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.multi_token_attention import AttentionPlan, plan_attention, runs_here
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.models.interface import ModelSpec

SMALLEST_PREFILL = 16
"""Tokens of the smallest padded batch that is not all decode rows."""


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
    max_pages: int
    """Pages of one row at most."""
    planned_heads: tuple[int, int] | None = None
    """Query and KV heads on one device, for the work items of the Hopper kernel; None where it isn't run,
    so that no step plans them for nothing."""
    batch_invariant: bool = False
    """Whether a row's attention is the same bits whatever else is in the batch."""

    @property
    def max_samples(self) -> int:
        """Tokens that one step chooses at most, padding included."""
        return bucket(self.max_rows)


def planned_heads(spec: ModelSpec, num_shards: int) -> tuple[int, int] | None:
    """What `BatchShapes.planned_heads` is for a model on this machine."""
    if not runs_here("mosaic"):
        return None
    return spec.num_heads // num_shards, spec.num_kv_heads // num_shards


def bucket(n: int, smallest: int = 1) -> int:
    """The next power of two, at least `smallest`: few shapes, hence few compilations."""
    return max(smallest, 1 << (n - 1).bit_length()) if n > 0 else smallest


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

    A batch of decode rows is padded to a power of two of tokens and as many rows; any other to a power
    of two of tokens and `max_rows` rows, so that the number of shapes is logarithmic.

    Args:
        rows: at least one, at most `shapes.max_rows`.
        shapes: the limits.
        previous: where the tokens of awaited rows are.

    Returns:
        the arrays, and (request id, how to choose) for each entry of `sample_tokens` that isn't padding.
    """
    q_lens = [len(row.token_ids) for row in rows]
    total = sum(q_lens)
    if total == len(rows):
        num_tokens = num_rows = bucket(total)
    else:
        num_tokens, num_rows = bucket(total, SMALLEST_PREFILL), shapes.max_rows
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
    padded_samples = np.zeros(bucket(len(samples)), np.int32)
    padded_samples[: len(samples)] = sample_tokens
    num_heads, num_kv_heads = shapes.planned_heads or (None, None)
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
            batch_invariant=shapes.batch_invariant,
        ),
        sample_tokens=padded_samples,
    )
    return arrays, samples
