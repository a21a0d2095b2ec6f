"""Writing keys and values to their pages, and the pass that rotates them before, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.kv_write import Rotary, kv_write, rotate_and_write
from pallas_kernels.kv_write import triton as kv_write_triton
from tests.pallas_kernels.rotated import case, expected


def test_kv_write_puts_tokens_in_place_and_padding_nowhere():
    rng = np.random.default_rng(5)
    pool = rng.standard_normal((4, 2, 2, 8, 4)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, 2, 4)).astype(np.float32)
    got = jax.jit(kv_write, donate_argnums=0)(
        jnp.asarray(pool), k, v, np.array([2, 0, 4]), np.array([7, 0, 3])
    )
    want = pool.copy()
    want[2, 0, :, 7], want[2, 1, :, 7], want[0, 0, :, 0], want[0, 1, :, 0] = k[0], v[0], k[1], v[1]
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="dtypes"):
        kv_write(jnp.asarray(pool), k.astype(np.float16), v, np.zeros(3, int), np.zeros(3, int))
    with pytest.raises(ValueError, match="shapes"):
        kv_write(jnp.asarray(pool), k[:, :1], v, np.zeros(3, int), np.zeros(3, int))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (12, 8)])
def test_rotation_and_writing_in_one_pass(fused, norm, head_dim, rotary_dim):
    rng = np.random.default_rng(6)
    sizes = {"num_tokens": 9, "num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim}
    arguments = case(rng, rotary_dim=rotary_dim, norm=norm, fused=fused, **sizes)
    got = jax.jit(rotate_and_write, donate_argnums=0)(jnp.asarray(arguments[0]), *arguments[1:])
    for x, y in zip(got, expected(*arguments), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_what_does_not_fit_together_is_refused():
    pool, qkv, pages, slots, rotary = case(
        np.random.default_rng(7), num_tokens=5, num_heads=4, num_kv_heads=2, head_dim=8
    )
    norm = np.ones(8, np.float32)
    for match, call in [
        ("kv_pages: got shape", lambda: rotate_and_write(pool[:, 0], qkv, pages, slots, rotary)),
        ("qkv: got shapes", lambda: rotate_and_write(pool, qkv[..., :4], pages, slots, rotary)),
        ("qkv: got heads", lambda: rotate_and_write(pool, qkv[:, :4], pages, slots, rotary)),
        ("qkv: got heads", lambda: rotate_and_write(pool, (qkv, qkv, qkv), pages, slots, rotary)),
        ("qkv: got dtypes", lambda: rotate_and_write(pool, np.float16(qkv), pages, slots, rotary)),
        ("pages, slots", lambda: rotate_and_write(pool, qkv, pages[:3], slots, rotary)),
        ("rotary: got shapes", lambda: rotate_and_write(pool, qkv[:3], pages[:3], slots[:3], rotary)),
        (
            "rotary: got 5 pairs",
            lambda: rotate_and_write(
                pool, qkv, pages, slots, Rotary(cos=np.ones((5, 5)), sin=np.ones((5, 5)))
            ),
        ),
        (
            "expected both or none",
            lambda: rotate_and_write(pool, qkv, pages, slots, dataclasses.replace(rotary, q_norm=norm)),
        ),
        (
            "rotary: got a norm",
            lambda: rotate_and_write(
                pool, qkv, pages, slots, dataclasses.replace(rotary, q_norm=norm, k_norm=norm[:4])
            ),
        ),
        (
            "implementation",
            lambda: rotate_and_write(pool, qkv, pages, slots, rotary, implementation="abacus"),
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


def test_without_triton_its_implementation_is_refused(monkeypatch):
    monkeypatch.setattr(kv_write_triton, "rotate_and_write_kernel", None)
    arguments = case(np.random.default_rng(8), num_tokens=5, num_heads=4, num_kv_heads=2, head_dim=8)
    with pytest.raises(UnsupportedInputError, match="jax-triton"):
        rotate_and_write(*arguments, implementation="triton")
    rotate_and_write(jnp.asarray(arguments[0]), *arguments[1:])
