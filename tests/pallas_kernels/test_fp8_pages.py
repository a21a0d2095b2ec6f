"""Pages of 8-bit keys and values: written, read and moved as plain ones are, up to their rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fp8_pages
from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.kv_write import kv_write, rotate_and_write
from pallas_kernels.kv_write.triton import rotate_and_write_triton
from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention, reference_attention
from pallas_kernels.multi_token_attention.triton import attention_triton
from tests.pallas_kernels import fp8
from tests.pallas_kernels.ragged import ragged_batch, random_lens
from tests.pallas_kernels.rotated import case, expected

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
write = jax.jit(kv_write)


def tokens_of_pages(rng, dtype, *, heads=2, head_dim=12, page_size=8, spread=1.0):
    """Keys, values, pages and slots of 30 tokens over four of six pages, in their order."""
    k, v = (spread * rng.standard_normal((2, 30, heads, head_dim))).astype(dtype)
    pages = np.repeat(rng.permutation(6)[:4], page_size)[:30].astype(np.int32)
    slots = (np.arange(30) % page_size).astype(np.int32)
    pool = rng.integers(0, 256, (6, 2, heads, page_size + 1, head_dim), np.uint8)
    return pool, k, v, pages, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 200.0])
def test_writing_matches_numpy(dtype, spread):
    pool, k, v, pages, slots = tokens_of_pages(np.random.default_rng(0), dtype, spread=spread)
    pages[[3, 17]] = 6, 9  # padding
    want = fp8.written(pool, k, v, pages, slots)
    np.testing.assert_array_equal(write(pool, k, v, pages, slots), want)


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 29), max_size=4), seed=st.integers(0, 99))
def test_bits_do_not_depend_on_the_batches(cuts, seed):
    pool, k, v, pages, slots = tokens_of_pages(np.random.default_rng(seed), np.float32)
    whole = write(pool, k, v, pages, slots)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 30], strict=True):
        batch = (np.zeros((32, *k.shape[1:]), np.float32), np.zeros((32, *k.shape[1:]), np.float32))
        where = (np.full(32, 6, np.int32), np.zeros(32, np.int32))  # padding
        for padded, part in zip((*batch, *where), (k, v, pages, slots), strict=True):
            padded[: end - start] = part[start:end]
        pool = write(pool, *batch, *where)
    np.testing.assert_array_equal(pool, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_four_bits_and_read_exactly(dtype):
    pool, k, v, pages, slots = tokens_of_pages(np.random.default_rng(1), dtype)
    pool = np.asarray(write(pool, k, v, pages, slots))
    plain = np.asarray(fp8_pages.dequantized(pool, np.dtype(dtype)))
    assert plain.dtype == dtype
    np.testing.assert_array_equal(plain[pages, :, :, slots], fp8.plain_of(pool)[pages, :, :, slots])
    given_kv = np.stack([k, v], 1).astype(np.float32)
    errors = np.abs(plain[pages, :, :, slots].astype(np.float32) - given_kv)
    scales = np.asarray(fp8_pages.scales(pool[pages, :, :, -1, :1]))
    assert (errors <= np.maximum(np.abs(given_kv) / 16, scales * 2.0**-10)).all()


def test_what_later_tokens_may_be():
    """As large as the headroom says; beyond, the largest number there is. The first may be zero."""
    first = np.array([[[1.0, -2.0]], [[0.0, 0.0]]])  # two pages of one head
    kv = np.concatenate([first[:1], [[[448.0, 450.0]]], first[1:], [[[28.0, -30.0]]]]).astype(np.float32)
    pages, slots = np.array([0, 0, 1, 1], np.int32), np.array([0, 1, 0, 1], np.int32)
    pool = write(np.zeros((2, 2, 1, 3, 2), np.uint8), kv, kv, pages, slots)
    plain = np.asarray(fp8_pages.dequantized(pool, np.dtype(np.float32)))
    assert plain[0, 0, 0].tolist() == [[1, -2], [224, 224]], "2 is brought to 4, so 448 are 224"
    assert fp8_pages.HEADROOM == 448 / 8
    assert plain[1, 1, 0].tolist() == [[0, 0], [28, -28]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_no_number(bad):
    k = np.ones((2, 1, 4), np.float32)
    k[1, 0, 2] = bad
    pages, slots = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    pool = write(np.zeros((1, 2, 1, 5, 4), np.uint8), k, k, pages, slots)
    plain = np.asarray(fp8_pages.dequantized(pool, np.dtype(np.float32)))[0, 0, 0]
    np.testing.assert_array_equal(plain[:2], np.where(np.isfinite(k[:, 0]), k[:, 0], np.nan))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_rotation_and_writing_in_one_pass(fused, norm):
    rng = np.random.default_rng(6)
    sizes = {"num_tokens": 70, "num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "rotary_dim": 8}
    arguments = case(rng, norm=norm, fused=fused, fp8=True, **sizes)
    q, pool = jax.jit(rotate_and_write, donate_argnums=0)(jnp.asarray(arguments[0]), *arguments[1:])
    want_q, want = expected(*arguments)
    np.testing.assert_allclose(q, want_q, rtol=2e-5, atol=2e-5)
    assert (np.asarray(pool) != want).mean() < 1e-3, "a key between two numbers may go either way"


@pytest.mark.parametrize(("seed", "page_size", "group"), [(0, 16, 1), (1, 32, 3), (2, 32, 1), (3, 16, 3)])
def test_attention_is_that_over_the_numbers(seed, page_size, group):
    """Bit for bit what plain pages of the same numbers give. What isn't used isn't a number."""
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 16, "page_size": page_size, "dtype": np.float32}
    rng = np.random.default_rng(seed)
    q, pool, plan = ragged_batch(rng, random_lens(rng, 5, 400), fp8=True, **sizes)
    got = np.asarray(multi_token_attention(jnp.asarray(q), jnp.asarray(pool), plan))
    plain = jnp.asarray(fp8.plain_of(pool))
    np.testing.assert_array_equal(got, multi_token_attention(jnp.asarray(q), plain, plan))
    np.testing.assert_allclose(got, reference_attention(q, pool, plan), rtol=2e-5, atol=2e-5)


def test_attention_in_bfloat16():
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 32, "dtype": ml_dtypes.bfloat16}
    q, pool, plan = ragged_batch(np.random.default_rng(2), [(33, 333), (1, 64)], fp8=True, **sizes)
    got = multi_token_attention(jnp.asarray(q), jnp.asarray(pool), plan)
    assert got.dtype == jnp.bfloat16
    want = reference_attention(q.astype(np.float32), pool, plan)
    assert np.abs(np.asarray(got, np.float32) - want).max() < 1e-2 * np.abs(want).max()


def test_the_pool_is_written_in_place():
    pool = jax.ShapeDtypeStruct((1000, 2, 4, 33, 64), jnp.uint8)
    kv = jax.ShapeDtypeStruct((16, 4, 64), jnp.float32)
    place = jax.ShapeDtypeStruct((16,), jnp.int32)
    lowered = jax.jit(kv_write, donate_argnums=0).lower(pool, kv, kv, place, place)
    account = lowered.compile().memory_analysis()
    assert account is not None
    assert account.alias_size_in_bytes == 1000 * 2 * 4 * 33 * 64
    assert account.temp_size_in_bytes < 1e6


def test_kernels_without_8_bit_pages_refuse_them():
    rng = np.random.default_rng(3)
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 32, "dtype": np.float16, "fp8": True}
    q, pool, plan = ragged_batch(rng, [(3, 40)], num_heads=8, num_kv_heads=2, **sizes)
    q, pool = jnp.asarray(q), jnp.asarray(pool)
    with pytest.raises(UnsupportedInputError, match="kv_pages: got dtype uint8"):
        multi_token_attention(q, pool, plan, implementation="mosaic")
    options = {"scale": 0.1, "sliding_window": None, "logit_soft_cap": None, "compute_capability": 80}
    with pytest.raises(UnsupportedInputError, match="expected compute capability 89 or newer, not 80"):
        attention_triton(q, pool, plan, **options)
    arguments = case(rng, num_tokens=9, num_heads=4, num_kv_heads=2, head_dim=8, fp8=True)
    with pytest.raises(UnsupportedInputError, match="expected compute capability 89 or newer, not 80"):
        rotate_and_write_triton(*arguments, compute_capability=80)
    with pytest.raises(ValueError, match="head_dim"):
        multi_token_attention(q[..., :8], pool, plan)
    with pytest.raises(ValueError, match="k, v: got dtypes float32, float16"):
        kv_write(pool, jnp.zeros((1, 2, 64)), jnp.zeros((1, 2, 64), jnp.float16), np.zeros(1), np.zeros(1))


def test_a_plan_may_name_pages_that_hold_no_numbers():
    """Entries of the page table past a row's end are never used."""
    pool = np.full((3, 2, 1, 17, 16), 0xFF, np.uint8)
    k = np.ones((5, 1, 16), np.float32)
    pool = write(pool, k, k, np.full(5, 2, np.int32), np.arange(5, dtype=np.int32))
    plan = plan_attention(
        q_lens=[1], kv_lens=[5], pages=[np.array([2])], max_rows=2, max_pages=3, max_tokens=2
    )
    got = np.asarray(multi_token_attention(jnp.ones((2, 1, 16)), pool, plan))
    np.testing.assert_allclose(got, [[[1.0] * 16], [[0.0] * 16]], rtol=1e-6)
