"""The Hopper kernel on a GPU against the float32 reference: fresh random batches, NaN in unused slots."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention, reference_attention

pytestmark = pytest.mark.gpu_kernel

OPTIONS = ("implementation", "scale", "logit_soft_cap", "sliding_window")
run = jax.jit(multi_token_attention, static_argnames=OPTIONS)


def random_batch(rng, lens, *, heads, kv_heads, head_dim, page_size, dtype, max_rows, max_tokens, **options):
    counts = [-(-kv_len // page_size) for _, kv_len in lens]
    num_pages = sum(counts) + 3
    pages = np.split(rng.permutation(num_pages)[: sum(counts)].astype(np.int32), np.cumsum(counts)[:-1])
    pool = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, dtype)
    for (_, kv_len), row_pages in zip(lens, pages, strict=True):
        for i, page in enumerate(row_pages):
            used = min(page_size, kv_len - i * page_size)
            pool[page, :, :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    plan = plan_attention(
        q_lens=[q for q, _ in lens],
        kv_lens=[kv for _, kv in lens],
        pages=pages,
        max_rows=max_rows,
        max_pages=max(counts) + 1,
        max_tokens=max_tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **options,
    )
    q = rng.standard_normal((max_tokens, heads, head_dim)).astype(dtype)
    return q, pool, plan


def random_lens(rng, count, longest):
    kinds = rng.integers(0, 4, count)
    lens = []
    for kind in kinds:
        q_len = [1, rng.integers(2, 16), rng.integers(16, 300), 64 * rng.integers(1, 4)][kind]
        lens.append((int(q_len), int(q_len + rng.integers(0, longest))))
    return lens


CASES = [
    ((32, 8), 128, 32, ml_dtypes.bfloat16),
    ((40, 10), 128, 32, np.float16),
    ((4, 4), 128, 32, ml_dtypes.bfloat16),
    ((12, 12), 64, 16, np.float16),
    ((28, 4), 128, 64, ml_dtypes.bfloat16),
    ((24, 8), 64, 128, ml_dtypes.bfloat16),
    ((16, 1), 128, 32, np.float16),
    ((11, 1), 128, 32, np.float16),
    ((64, 8), 64, 32, ml_dtypes.bfloat16),
    ((32, 32), 80, 32, ml_dtypes.bfloat16),
    ((16, 1), 80, 16, np.float16),
    ((9, 3), 80, 128, ml_dtypes.bfloat16),
    ((32, 32), 96, 32, ml_dtypes.bfloat16),
    ((24, 8), 96, 64, np.float16),
    ((11, 1), 96, 16, ml_dtypes.bfloat16),
    ((16, 8), 256, 32, ml_dtypes.bfloat16),
    ((16, 16), 256, 128, np.float16),
    ((28, 4), 256, 64, ml_dtypes.bfloat16),
    ((11, 1), 256, 16, np.float16),
]


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype"), CASES)
def test_matches_reference(heads, head_dim, page_size, dtype):
    rng = np.random.default_rng()
    for lens in (random_lens(rng, 9, 2500), [(1, 1), (1, 3001), (1, 128), (2, 129), (777, 777)]):
        q, pool, plan = random_batch(
            rng,
            lens,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            max_rows=12,
            max_tokens=-(-sum(n for n, _ in lens) // 8) * 8 + 16,
        )
        got = np.asarray(run(q, pool, plan, implementation="mosaic"), np.float32)
        want = reference_attention(np.asarray(q, np.float32), pool.astype(np.float32), plan)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert error < (1e-2 if dtype == ml_dtypes.bfloat16 else 2e-3), lens
        again = np.asarray(run(q, pool, plan, implementation="mosaic"), np.float32)
        np.testing.assert_array_equal(got, again)


def test_soft_cap_and_batch_invariance():
    rng = np.random.default_rng()
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": 128, "page_size": 32, "dtype": np.float16}
    lens = [(1, 9000), (1, 700), (100, 900)]
    q, pool, plan = random_batch(rng, lens, max_rows=4, max_tokens=112, batch_invariant=True, **sizes)
    got = np.asarray(run(q, pool, plan, implementation="mosaic", logit_soft_cap=20.0), np.float32)
    want = reference_attention(np.asarray(q, np.float32), pool.astype(np.float32), plan, logit_soft_cap=20.0)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3
    alone = plan_attention(
        q_lens=[1],
        kv_lens=[9000],
        pages=[np.asarray(plan.page_table[0])],
        max_rows=1,
        max_pages=plan.page_table.shape[1],
        max_tokens=8,
        num_heads=16,
        num_kv_heads=4,
        batch_invariant=True,
    )
    one = run(q[:8], pool, alone, implementation="mosaic", logit_soft_cap=20.0)
    np.testing.assert_array_equal(np.asarray(one[0], np.float32), got[0])


@pytest.mark.parametrize("window", [1, 100, 1000])
def test_sliding_window(window):
    rng = np.random.default_rng()
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": 128, "page_size": 32, "dtype": np.float16}
    lens = [(1, 9000), (1, 700), (100, 900), (300, 2500)]
    q, pool, plan = random_batch(rng, lens, max_rows=4, max_tokens=408, **sizes)
    got = np.asarray(run(q, pool, plan, implementation="mosaic", sliding_window=window), np.float32)
    want = reference_attention(
        np.asarray(q, np.float32), pool.astype(np.float32), plan, sliding_window=window
    )
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


def test_many_short_items_in_a_row_end():
    """One consumer may run ahead of the other by as many items as the ring holds, again and again."""
    sizes = {"heads": 40, "kv_heads": 10, "head_dim": 128, "page_size": 32, "dtype": ml_dtypes.bfloat16}
    lens = [(60, 60), (100, 100), (70, 90)] * 8 + [(200, 1000)] * 2
    q, pool, plan = random_batch(np.random.default_rng(), lens, max_rows=40, max_tokens=6144, **sizes)

    @jax.jit
    def many(q, pool, plan):
        def again(_, q):
            out = multi_token_attention(q, pool, plan, implementation="mosaic")
            return jnp.where(jnp.isfinite(out), q, out)  # q, unless something is wrong

        return jax.lax.fori_loop(0, 5000, again, q)

    np.testing.assert_array_equal(np.asarray(many(q, pool, plan)), q)


def test_pool_beyond_two_to_the_31_elements():
    num_pages = 2**31 // (2 * 8 * 32 * 128) + 64
    pool = jnp.zeros((num_pages, 2, 8, 32, 128), jnp.bfloat16)
    rng = np.random.default_rng()
    content = rng.standard_normal((4, 2, 8, 32, 128)).astype(ml_dtypes.bfloat16)
    pool = jax.jit(lambda p, c: p.at[-4:].set(c), donate_argnums=0)(pool, content)
    sizes = {"q_lens": [1, 70], "kv_lens": [100, 128], "max_rows": 2, "max_pages": 4, "max_tokens": 72}
    far = np.arange(num_pages - 4, num_pages, dtype=np.int32)
    near = np.arange(4, dtype=np.int32)
    plan = plan_attention(pages=[far, far], num_heads=32, num_kv_heads=8, **sizes)
    small = plan_attention(pages=[near, near], num_heads=32, num_kv_heads=8, **sizes)
    q = rng.standard_normal((72, 32, 128)).astype(ml_dtypes.bfloat16)
    got = run(q, pool, plan, implementation="mosaic")
    want = run(q, content, small, implementation="mosaic")
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
