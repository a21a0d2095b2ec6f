"""Norms in plain JAX: for any shape and device."""

import jax
import jax.numpy as jnp


def rms_norm_xla(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """As `pallas_kernels.norm.rms_norm`."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return scale * (wide * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)


def layer_norm_xla(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, epsilon: float
) -> jax.Array:
    """As `pallas_kernels.norm.layer_norm`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon)
    if scale is not None and bias is not None:
        y = y * scale.astype(jnp.float32) + bias.astype(jnp.float32)
    return y.astype(x.dtype)
