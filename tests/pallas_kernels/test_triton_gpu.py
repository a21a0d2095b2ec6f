"""Attention in Triton on a GPU against the reference: fresh random batches, NaN in unused slots."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention, reference_attention
from pallas_kernels.multi_token_attention.plan import tile_tokens
from tests.pallas_kernels.ragged import ragged_batch, random_lens

pytestmark = pytest.mark.gpu_kernel

TOLERANCES = {np.dtype(ml_dtypes.bfloat16): 1e-2, np.dtype(np.float16): 2e-3, np.dtype(np.float32): 1e-5}
CASES = [
    # heads, head_dim, page_size, dtype, options
    ((32, 8), 128, 32, ml_dtypes.bfloat16, {}),
    ((4, 4), 128, 16, np.float16, {}),
    ((28, 4), 64, 64, np.float16, {"sliding_window": 200}),
    ((16, 1), 80, 128, ml_dtypes.bfloat16, {"logit_soft_cap": 20.0}),
    ((11, 1), 96, 32, np.float16, {}),
    ((10, 2), 256, 32, ml_dtypes.bfloat16, {"sliding_window": 1000}),
    ((6, 2), 64, 32, np.float32, {}),
]
attend = jax.jit(
    functools.partial(multi_token_attention, implementation="triton"),
    static_argnames=("sliding_window", "logit_soft_cap"),
)


@pytest.mark.parametrize(("heads", "head_dim", "page_size", "dtype", "options"), CASES)
def test_matches_reference(heads, head_dim, page_size, dtype, options):
    rng = np.random.default_rng()
    for lens in (random_lens(rng, 6, 1500), [(1, 1), (1, 3001), (1, 128), (1, 257)]):
        q, pool, plan = ragged_batch(
            rng,
            lens,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            block_q=tile_tokens(heads[0] // heads[1]),
        )
        got = np.asarray(attend(q, pool, plan, **options), np.float32)
        want = reference_attention(q.astype(np.float32), pool.astype(np.float32), plan, **options)
        assert np.linalg.norm(got - want) < TOLERANCES[np.dtype(dtype)] * np.linalg.norm(want), lens
        np.testing.assert_array_equal(got, np.asarray(attend(q, pool, plan, **options), np.float32))


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "dtype", "options"),
    [
        ((32, 8), 128, 32, ml_dtypes.bfloat16, {}),
        ((28, 4), 64, 64, np.float16, {"sliding_window": 200}),
        ((16, 1), 80, 16, ml_dtypes.bfloat16, {"logit_soft_cap": 20.0}),
        ((10, 2), 256, 32, ml_dtypes.bfloat16, {}),
        ((6, 2), 64, 32, np.float32, {}),
    ],
)
def test_8_bit_pages(heads, head_dim, page_size, dtype, options):
    """Scales and numbers of unused slots and pages are no numbers."""
    rng = np.random.default_rng()
    for lens in (random_lens(rng, 6, 1500), [(1, 1), (1, 3001), (1, 128), (1, 257)]):
        sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
        block_q = tile_tokens(heads[0] // heads[1])
        q, pool, plan = ragged_batch(rng, lens, dtype=dtype, block_q=block_q, fp8=True, **sizes)
        got = np.asarray(attend(q, pool, plan, **options), np.float32)
        want = reference_attention(q.astype(np.float32), pool, plan, **options)
        assert np.linalg.norm(got - want) < TOLERANCES[np.dtype(dtype)] * np.linalg.norm(want), lens


def test_pool_beyond_two_to_the_31_elements():
    num_pages = 2**31 // (2 * 8 * 32 * 128) + 64
    rng = np.random.default_rng()
    content = rng.standard_normal((4, 2, 8, 32, 128)).astype(ml_dtypes.bfloat16)
    zeros = jnp.zeros((num_pages, 2, 8, 32, 128), jnp.bfloat16)
    pool = jax.jit(lambda p, c: p.at[-4:].set(c), donate_argnums=0)(zeros, content)
    far = np.arange(num_pages - 4, num_pages, dtype=np.int32)
    near = np.arange(4, dtype=np.int32)
    sizes = {"q_lens": [1, 70], "kv_lens": [100, 128], "max_rows": 2, "max_pages": 4, "max_tokens": 72}
    q = rng.standard_normal((72, 32, 128)).astype(ml_dtypes.bfloat16)
    got = attend(q, pool, plan_attention(pages=[far, far], **sizes))
    want = attend(q, content, plan_attention(pages=[near, near], **sizes))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
