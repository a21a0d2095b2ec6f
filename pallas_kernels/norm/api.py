"""The public functions: check their arguments and pick an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import runs_here
from pallas_kernels.norm.mosaic import MAX_FEATURES, VECTOR, WARPGROUP, norm_mosaic
from pallas_kernels.norm.xla import layer_norm_xla, rms_norm_xla
from pallas_kernels.skinny_matmul import MAX_TOKENS


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32, rounded before the scale as transformers does.

    Args:
        x: [..., features].
        scale: [features].
        epsilon: added to the mean square.

    Returns:
        the shape and dtype of `x`.

    Raises:
        ValueError: the scale doesn't fit.
    """
    _check(x, scale=scale)
    if _has_kernel(x, scale):
        return _run_mosaic(x, scale, None, epsilon=epsilon)
    return rms_norm_xla(x, scale, epsilon=epsilon)


def layer_norm(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Layer norm over the last axis, in float32; without scale and bias where they are None.

    Args:
        x: [..., features].
        scale: [features]; None only with `bias`.
        bias: [features]; None only with `scale`.
        epsilon: added to the variance.

    Returns:
        the shape and dtype of `x`.

    Raises:
        ValueError: scale or bias don't fit.
    """
    _check(x, scale=scale, bias=bias)
    if scale is not None and bias is not None and _has_kernel(x, scale, bias):
        return _run_mosaic(x, scale, bias, epsilon=epsilon)
    return layer_norm_xla(x, scale, bias, epsilon=epsilon)


def _check(x: jax.Array, **parameters: jax.Array | None) -> None:
    for name, value in parameters.items():
        if value is not None and value.shape != x.shape[-1:]:
            raise ValueError(f"{name}: got shape {value.shape}, expected {x.shape[-1:]} as x's last axis")


def _has_kernel(x: jax.Array, *parameters: jax.Array) -> bool:
    """Where the products that follow have a kernel that can start early; else XLA fuses norms better."""
    return (
        runs_here("mosaic")
        and x.ndim == 2
        and x.shape[0] <= MAX_TOKENS
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and all(parameter.dtype == x.dtype for parameter in parameters)
        and x.shape[1] % (WARPGROUP * VECTOR) == 0
        and x.shape[1] <= MAX_FEATURES
    )


_run_mosaic: Any = jax.jit(norm_mosaic, static_argnames=("epsilon", "interpret"))
"""Traced and lowered once for all calls that are alike."""
