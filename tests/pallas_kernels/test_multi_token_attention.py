"""The XLA path against the float32 reference over ragged batches."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.multi_token_attention import (
    api,
    multi_token_attention,
    plan_attention,
    reference_attention,
)


def make_batch(rng, lens, *, page_size=32, kv_heads=2, group=2, head_dim=16, spare=3, dtype=np.float32):
    """A pool full of NaN except the slots in use, rows over permuted pages, and the padded plan."""
    counts = [-(-kv_len // page_size) for _, kv_len in lens]
    num_pages = sum(counts) + spare
    pages = np.split(rng.permutation(num_pages)[: sum(counts)].astype(np.int32), np.cumsum(counts)[:-1])
    pool = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, dtype)
    for (_, kv_len), row_pages in zip(lens, pages, strict=True):
        for i, page in enumerate(row_pages):
            used = min(page_size, kv_len - i * page_size)
            pool[page, :, :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    total = sum(q for q, _ in lens)
    decode = all(q == 1 for q, _ in lens)
    plan = plan_attention(
        q_lens=[q for q, _ in lens],
        kv_lens=[kv for _, kv in lens],
        pages=pages,
        max_rows=len(lens) + 2,
        max_pages=max(counts) + 1,
        max_tokens=len(lens) + 2 if decode else total + 5,
    )
    tokens = len(lens) + 2 if decode else total + 5
    q = rng.standard_normal((tokens, kv_heads * group, head_dim)).astype(dtype)
    return q, pool, plan


rows = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 300)).map(lambda t: (t[0], t[0] + t[1])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(lens=rows, page_size=st.sampled_from([16, 32]), group=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_matches_reference(lens, page_size, group, seed):
    q, pool, plan = make_batch(np.random.default_rng(seed), lens, page_size=page_size, group=group)
    got = multi_token_attention(jnp.asarray(q), jnp.asarray(pool), plan)
    np.testing.assert_allclose(got, reference_attention(q, pool, plan), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"sliding_window": 20}, {"sliding_window": 1}, {"logit_soft_cap": 5.0}, {"scale": 0.5}]
)
@pytest.mark.parametrize("lens", [[(1, 600), (1, 3), (1, 257)], [(40, 700), (1, 90), (300, 300)]])
def test_options(lens, options):
    q, pool, plan = make_batch(np.random.default_rng(1), lens)
    got = multi_token_attention(jnp.asarray(q), jnp.asarray(pool), plan, **options)
    np.testing.assert_allclose(got, reference_attention(q, pool, plan, **options), rtol=2e-5, atol=2e-5)


def test_bfloat16():
    q, pool, plan = make_batch(np.random.default_rng(2), [(33, 333), (1, 64)])
    q, pool = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16)
    got = multi_token_attention(q, pool, plan)
    assert got.dtype == jnp.bfloat16
    want = reference_attention(np.asarray(q, np.float32), np.asarray(pool, np.float32), plan)
    assert np.abs(np.asarray(got, np.float32) - want).max() < 1e-2 * np.abs(want).max()


def test_rows_may_share_pages_and_split_a_prompt_anywhere():
    """A gap row and a later row over the same pages give what one long row gives (paper, figure 8)."""
    rng = np.random.default_rng(3)
    q, pool, plan = make_batch(rng, [(200, 200)])
    whole = np.asarray(multi_token_attention(jnp.asarray(q), jnp.asarray(pool), plan))
    pages = plan.page_table[0, :7]
    parts = plan_attention(
        q_lens=[50, 9], kv_lens=[50, 200], pages=[pages[:2], pages], max_rows=3, max_pages=8, max_tokens=64
    )
    pieces = np.concatenate([q[:50], q[191:200], q[:5]])
    got = np.asarray(multi_token_attention(jnp.asarray(pieces), jnp.asarray(pool), parts))
    np.testing.assert_allclose(got[:50], whole[:50], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[50:59], whole[191:200], rtol=1e-5, atol=1e-5)
    assert (got[59:] == 0).all()


def test_decode_batches_go_to_triton_unless_they_must_be_invariant(monkeypatch):
    chosen = []
    for name in api.IMPLEMENTATIONS:
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, lambda *_, name=name, **__: chosen.append(name))
        monkeypatch.setitem(dispatch.RUNS_HERE, name, lambda: True)
    pages = [np.zeros(3, np.int32)]
    sizes = {"kv_lens": [70], "pages": pages, "max_rows": 4, "max_pages": 3, "max_tokens": 4}
    for q_len, invariant, head_dim in ((1, False, 64), (1, True, 64), (3, False, 128), (3, False, 80)):
        pool, q = jnp.zeros((1, 2, 1, 32, head_dim)), jnp.zeros((4, 2, head_dim))
        plan = plan_attention(q_lens=[q_len], batch_invariant=invariant, **sizes)
        multi_token_attention(q, pool, plan)
    assert chosen == ["triton", "mosaic", "mosaic", "triton"]


def test_bad_arguments_are_refused():
    q, pool, plan = make_batch(np.random.default_rng(4), [(3, 40)])
    q, pool = jnp.asarray(q), jnp.asarray(pool)
    for match, call in [
        ("kv_pages: got head_dim", lambda: multi_token_attention(q[..., :8], pool, plan)),
        ("kv_pages: got dtype", lambda: multi_token_attention(q.astype(jnp.bfloat16), pool, plan)),
        ("divisor", lambda: multi_token_attention(q[:, :3], pool, plan)),
        ("q: got shape", lambda: multi_token_attention(q[0], pool, plan)),
        ("sliding_window", lambda: multi_token_attention(q, pool, plan, sliding_window=0)),
        ("implementation", lambda: multi_token_attention(q, pool, plan, implementation="abacus")),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
    one = np.zeros(1, np.int32)
    maxima = {"max_rows": 2, "max_pages": 1, "max_tokens": 8}
    with pytest.raises(ValueError, match="q_lens"):
        plan_attention(q_lens=[5], kv_lens=[4], pages=[one], **maxima)
    with pytest.raises(ValueError, match="rows, tokens"):
        plan_attention(q_lens=[9], kv_lens=[9], pages=[one], **maxima)
    with pytest.raises(ValueError, match="pages"):
        plan_attention(q_lens=[1], kv_lens=[40], pages=[np.zeros(2, np.int32)], **maxima)
