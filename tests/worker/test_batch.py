"""From rows to padded arrays."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.multi_token_attention.schedule import ITEM_FIELDS
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.worker import batch
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, padded, planned_heads, sizes_up_to
from tests.tiny import SPEC


def shapes(**changes):
    usual = {"num_pages": 64, "page_tokens": 32, "max_rows": 8, "max_tokens": 64, "max_pages": 16}
    return BatchShapes(**{**usual, **changes})


PREVIOUS = PreviousSamples(token_ids=np.zeros(8, np.int32), places={})


def pack(rows, limits, chosen=(), places=None):
    previous = np.zeros(limits.max_samples, np.int32)
    previous[: len(chosen)] = chosen
    return batch.pack(rows, limits, PreviousSamples(token_ids=previous, places=places or {}))


def row(start, count, first_page=0):
    pages = np.arange(first_page, first_page + -(-(start + count) // 32), dtype=np.int32)
    return Row(0, np.arange(count, dtype=np.int32), start, pages, None)


def test_work_items_are_planned_where_their_kernel_runs(monkeypatch):
    """Planning them costs time at every step."""
    rows = [row(100, 1), row(0, 40, 8)]
    assert planned_heads(SPEC, 1) is None
    assert pack(rows, shapes())[0].attention.schedule is None
    monkeypatch.setattr(batch, "runs_here", lambda implementation: implementation == "mosaic")
    assert planned_heads(SPEC, 1) == (4, 2)
    heads = planned_heads(SPEC, 2)
    assert heads == (2, 1)
    schedule = pack(rows, shapes(planned_heads=heads))[0].attention.schedule
    assert schedule is not None
    assert (schedule.num_heads, schedule.num_kv_heads, schedule.max_tokens) == (2, 1, 64)


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariance_reaches_the_plan(invariant):
    """A long decode row alone is cut over the whole grid, unless the cuts may depend on the row alone."""
    long = row(32 * 300, 1)
    limits = shapes(num_pages=400, max_pages=400, planned_heads=(4, 2), batch_invariant=invariant)
    alone = pack([long], limits)[0].attention.schedule
    assert alone is not None
    merged = alone.items[:, ITEM_FIELDS.index("parts")].max()
    assert merged == 3 if invariant else merged > 20


def test_awaited_tokens_come_from_the_step_before():
    rows = [row(40, 1), row(70, 1, 4)._replace(request_id=7, awaited=True), row(0, 3, 8)]
    arrays, _ = pack(rows, shapes(), chosen=[11, 12, 13], places={7: 2, 9: 1})
    token_ids = np.asarray(arrays.token_ids).tolist()
    assert token_ids == [0, 13, 0, 1, 2] + [0] * 11


def test_sizes_are_few_and_near():
    assert sizes_up_to(256, 1) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    fine = sizes_up_to(256, 8, per_octave=2)
    assert fine == (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert sizes_up_to(100, 8, per_octave=2)[-2:] == (96, 104)
    assert sizes_up_to(2000, 64, per_octave=2)[-3:] == (1024, 1536, 2048)
    assert sizes_up_to(5, 1) == (1, 2, 4, 5)
    assert sizes_up_to(5, 16) == (16,)
    for sizes, waste in ((sizes_up_to(777, 1), 2), (fine, 1.5), (sizes_up_to(6000, 1, per_octave=4), 1.25)):
        assert all(padded(n, sizes) >= n for n in range(1, sizes[-1] + 1))
        assert max(padded(n, sizes) / n for n in range(16, sizes[-1] + 1)) <= waste


@given(
    q_lens=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_samples=st.integers(0, 8),
    invariant=st.booleans(),
    hopper=st.booleans(),
)
def test_blanks_have_the_shapes_of_all_batches(q_lens, num_samples, invariant, hopper):
    """So what compiles for blanks serves every batch."""
    limits = shapes(
        max_rows=8, max_tokens=320, batch_invariant=invariant, planned_heads=(8, 2) if hopper else None
    )
    choice = SampleRequest(SamplingParams(), 0, np.zeros(0, np.int32))
    rows = [
        row(64, q)._replace(request_id=i, sample=choice if i < num_samples else None)
        for i, q in enumerate(q_lens)
    ]
    arrays, samples = pack(rows, limits)
    assert len(samples) == min(num_samples, len(rows))
    decode = all(q == 1 for q in q_lens) and not invariant
    assert len(arrays.given_ids) in (limits.decode_sizes if decode else limits.prefill_sizes)
    blank = batch.blank(len(arrays.given_ids), limits, PREVIOUS, decode=decode)
    assert jax.tree.map(np.shape, blank) == jax.tree.map(np.shape, arrays)
    assert (blank.write_pages == limits.num_pages).all()
