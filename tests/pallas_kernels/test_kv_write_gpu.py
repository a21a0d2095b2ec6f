"""The pass over queries, keys and values on a GPU, against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_write import Rotary, rotate_and_write
from tests.pallas_kernels.rotated import case, expected

pytestmark = pytest.mark.gpu_kernel

run = jax.jit(rotate_and_write, donate_argnums=0, static_argnames="implementation")

CASES = [
    # tokens, heads, head_dim, rotary_dim, norm, fused, dtype
    (64, (40, 10), 128, 128, False, True, ml_dtypes.bfloat16),
    (1, (32, 8), 128, 128, True, False, ml_dtypes.bfloat16),
    (517, (9, 3), 64, 64, True, True, np.float16),
    (33, (8, 2), 80, 40, True, True, ml_dtypes.bfloat16),
    (100, (4, 4), 96, 96, False, False, np.float32),
    (7, (16, 1), 256, 256, False, True, ml_dtypes.bfloat16),
]


@pytest.mark.parametrize(("tokens", "heads", "head_dim", "rotary_dim", "norm", "fused", "dtype"), CASES)
def test_matches_numpy(tokens, heads, head_dim, rotary_dim, norm, fused, dtype):
    arguments = case(
        np.random.default_rng(),
        num_tokens=tokens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        norm=norm,
        fused=fused,
        dtype=dtype,
    )
    got = run(jnp.asarray(arguments[0]), *arguments[1:], implementation="triton")
    unit = float(ml_dtypes.finfo(dtype).eps)
    for x, y in zip(got, expected(*arguments), strict=True):
        # With a norm there are two more roundings on the way.
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=3 * unit, atol=6 * unit
        )


@pytest.mark.parametrize(("tokens", "heads", "head_dim", "rotary_dim", "norm", "fused", "dtype"), CASES)
def test_8_bit_pages(tokens, heads, head_dim, rotary_dim, norm, fused, dtype):
    """The same bytes as in NumPy, but where a key's own rounding makes it another number."""
    sizes = {"num_tokens": tokens, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    options = {"rotary_dim": rotary_dim, "norm": norm, "fused": fused, "dtype": dtype, "fp8": True}
    arguments = case(np.random.default_rng(), **sizes, **options)
    _, got = run(jnp.asarray(arguments[0]), *arguments[1:], implementation="triton")
    got, (_, want) = np.asarray(got), expected(*arguments)
    np.testing.assert_array_equal(got[:, 1], want[:, 1])
    assert (got[:, 0] != want[:, 0]).mean() < (0.05 if norm else 0.01)


def test_pool_beyond_two_to_the_31_elements():
    """Tokens go to the last pages, and nothing goes where a product of 32 bits would put them."""
    heads, page_size, head_dim = 8, 32, 128
    num_pages = 2**31 // (2 * heads * page_size * head_dim) + 64
    zeros = jax.jit(lambda: jnp.zeros((num_pages, 2, heads, page_size, head_dim), jnp.bfloat16))
    qkv = np.random.default_rng().standard_normal((3, 32 + 2 * heads, head_dim)).astype(ml_dtypes.bfloat16)
    still = Rotary(cos=np.ones((3, 64), np.float32), sin=np.zeros((3, 64), np.float32))
    pages = np.array([num_pages - 1, num_pages - 64, num_pages], np.int32)
    slots = np.array([31, 0, 5], np.int32)
    q, pool = run(zeros(), qkv, pages, slots, still, implementation="triton")
    np.testing.assert_array_equal(np.asarray(q), qkv[:, :32])
    np.testing.assert_array_equal(np.asarray(pool[pages[0], :, :, 31]), qkv[0, 32:].reshape(2, heads, -1))
    np.testing.assert_array_equal(np.asarray(pool[pages[1], :, :, 0]), qkv[1, 32:].reshape(2, heads, -1))
    assert int(jax.jit(lambda x: jnp.count_nonzero(x.any(-1)))(pool)) == 2 * 2 * heads
