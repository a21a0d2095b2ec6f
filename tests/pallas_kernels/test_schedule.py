"""The schedule of the Hopper kernel: all work is dealt out once, in equal shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.multi_token_attention.schedule import (
    ALIGN,
    BLOCK_KV,
    CACHED_KEYS,
    INVARIANT_SPLIT_BLOCKS,
    ITEM_FIELDS,
    NARROW_COST,
    PARTIAL,
    TILE_Q,
    WIDE,
    narrow_stride,
    plan_schedule,
)

rows = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 300)), st.integers(0, 3000)).map(
        lambda t: (t[0], t[0] + t[1])
    ),
    max_size=8,
)


def make(lens, *, heads, kv_heads, spare=0, num_ctas=132, **options):
    return plan_schedule(
        q_lens=[q for q, _ in lens],
        kv_lens=[kv for _, kv in lens],
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_rows=len(lens) + 1,
        max_tokens=sum(q for q, _ in lens) + spare,
        num_ctas=num_ctas,
        **options,
    )


def items_of(schedule):
    items = schedule.items[: schedule.runs[-1, -1], : len(ITEM_FIELDS)]
    return [dict(zip(ITEM_FIELDS, map(int, line), strict=True)) for line in items]


@settings(max_examples=60, deadline=None)
@given(
    lens=rows,
    heads=st.sampled_from([(8, 2), (6, 2), (3, 3), (16, 1), (11, 1)]),
    num_ctas=st.sampled_from([1, 7, 132]),
    spare=st.sampled_from([0, 1, 70]),
    batch_invariant=st.booleans(),
)
def test_every_query_sees_its_keys_once(lens, heads, num_ctas, spare, batch_invariant):
    num_heads, kv_heads = heads
    group = num_heads // kv_heads
    schedule = make(
        lens,
        heads=num_heads,
        kv_heads=kv_heads,
        spare=spare,
        num_ctas=num_ctas,
        batch_invariant=batch_invariant,
    )
    total = sum(q for q, _ in lens)
    starts = np.cumsum([0] + [q for q, _ in lens])
    position = np.concatenate([np.arange(kv - q, kv) for q, kv in lens] + [np.zeros(0)])
    row_of = np.repeat(np.arange(len(lens)), [q for q, _ in lens])
    blocks = np.zeros((total + spare, num_heads), int)  # blocks of keys computed for each query
    written = np.zeros((total + spare, num_heads), int)
    merges = {}
    for item in items_of(schedule):
        if item["kind"] == WIDE:
            assert item["token"] % ALIGN == 0
            heads_of = [item["head"], item["head"] + 1] if group % 2 == 0 else [item["head"]]
        else:
            assert item["skip"] == 0 and item["stop"] * narrow_stride(group) <= TILE_Q
            heads_of = range(item["head"], item["head"] + group)
        assert item["begin"] < item["end"] and item["begin"] <= item["full"] <= item["end"]
        for at in range(item["token"] + item["skip"], item["token"] + item["stop"]):
            written[at, list(heads_of)] += item["kind"] != PARTIAL
            if at >= total:
                assert item["position"] + item["stop"] <= 0  # sees no key: zeros
                continue
            assert item["row"] == row_of[at] and item["kv_len"] == lens[item["row"]][1]
            assert item["position"] + at - item["token"] == position[at]
            assert item["full"] * BLOCK_KV <= position[at] + 1 or item["full"] == item["begin"]
            blocks[at, list(heads_of)] += min(item["end"], -(-int(position[at] + 1) // BLOCK_KV)) - min(
                item["begin"], -(-int(position[at] + 1) // BLOCK_KV)
            )
        assert all(h // group == item["kv_head"] for h in heads_of)
        if item["kind"] == PARTIAL:
            same = tuple(item[name] for name in ("head", "token", "stop", "first_part", "parts"))
            assert 0 <= item["part"] - item["first_part"] < item["parts"]
            merges.setdefault(item["merge"], (same, set()))
            assert merges[item["merge"]][0] == same
            merges[item["merge"]][1].add(item["part"])
    want = np.concatenate([-(-(position + 1) // BLOCK_KV), np.zeros(spare)])
    np.testing.assert_array_equal(blocks, np.repeat(want[:, None], num_heads, axis=1))
    for (head, token, stop, first, count), parts in merges.values():
        assert parts == set(range(first, first + count))
        written[token : token + stop, head : head + group] += 1
    assert set(merges) == set(range(len(merges))) and len(merges) <= len(schedule.arrived)
    assert (written == 1).all() and starts[-1] == total and not schedule.arrived.any()
    kinds = schedule.items[:, 0]
    for first, narrow, rest, end in schedule.runs:
        assert (kinds[first:narrow] == WIDE).all() and (kinds[rest:end] == WIDE).all()
        assert (kinds[narrow:rest] != WIDE).all()


@pytest.mark.parametrize(
    "lens", [[(1, 1024)] * 16, [(1, 131072)], [(1, 4096)] * 64, [(512, 4608)] * 4 + [(1, 2048)] * 60]
)
def test_shares_are_equal(lens):
    schedule = make(lens, heads=40, kv_heads=10)
    items = items_of(schedule)
    cta = np.searchsorted(schedule.runs[:, 0], np.arange(len(items)), side="right") - 1
    blocks = np.array([i["end"] - i["begin"] for i in items]) * [
        1.0 if i["kind"] == WIDE else NARROW_COST for i in items
    ]
    loads = np.bincount(cta, blocks, minlength=132)
    assert loads.max() <= loads.mean() * 1.05 + 1


@pytest.mark.parametrize("lens", [[(4096, 4096)] * 4, [(16384, 16384)], [(1024, 1024)] * 16])
def test_keys_that_are_read_at_one_time_fit_in_the_cache(lens):
    schedule = make(lens, heads=40, kv_heads=10)
    items = items_of(schedule)
    parts = 20
    read = [set() for _ in range(parts)]
    for first, _, _, end in schedule.runs:
        blocks = np.array([i["end"] - i["begin"] for i in items[first:end]])
        when = (np.cumsum(blocks) - blocks) * parts // blocks.sum()
        for part, item in zip(when, items[first:end], strict=True):
            read[part].add((item["row"], item["kv_head"]))
    keys = [sum(lens[row][1] for row, _ in part) for part in read]
    assert max(keys) <= 3 * CACHED_KEYS < sum(kv for _, kv in lens) * 10


def test_shapes_depend_on_the_maxima_alone():
    a = make([(1, 3000)] * 9, heads=32, kv_heads=8)
    b = make([(1, 7)] * 9, heads=32, kv_heads=8)
    assert [x.shape for x in (a.items, a.arrived, a.runs)] == [x.shape for x in (b.items, b.arrived, b.runs)]


def test_batch_invariant_cuts_depend_on_the_row_alone():
    def cuts(lens):
        schedule = make(lens, heads=8, kv_heads=2, batch_invariant=True)
        return sorted((i["kv_head"], i["begin"], i["end"]) for i in items_of(schedule) if i["kv_len"] == 9001)

    alone = cuts([(1, 9001)])
    assert alone == cuts([(1, 9001), (1, 50), (300, 700)])
    assert max(end - begin for _, begin, end in alone) == INVARIANT_SPLIT_BLOCKS
