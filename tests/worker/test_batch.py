"""From rows to padded arrays."""

import numpy as np
import pytest

from pensieve_jax.core.plans import Row
from pensieve_jax.worker import batch
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, planned_heads
from tests.tiny import SPEC


def shapes(**changes):
    return BatchShapes(**{"num_pages": 64, "page_tokens": 32, "max_rows": 8, "max_pages": 16, **changes})


def pack(rows, given, chosen=(), places=None):
    previous = np.zeros(given.max_samples, np.int32)
    previous[: len(chosen)] = chosen
    return batch.pack(rows, given, PreviousSamples(token_ids=previous, places=places or {}))


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
    given = shapes(num_pages=400, max_pages=400, planned_heads=(4, 2), batch_invariant=invariant)
    alone = pack([long], given)[0].attention.schedule
    merged = alone.merges[:, 0].max()
    assert merged == 3 if invariant else merged > 20


def test_awaited_tokens_come_from_the_step_before():
    rows = [row(40, 1), row(70, 1, 4)._replace(request_id=7, awaited=True), row(0, 3, 8)]
    arrays, _ = pack(rows, shapes(), chosen=[11, 12, 13], places={7: 2, 9: 1})
    token_ids = np.asarray(arrays.token_ids).tolist()
    assert token_ids == [0, 13, 0, 1, 2] + [0] * 11
