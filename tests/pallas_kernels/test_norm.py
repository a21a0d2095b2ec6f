"""Norms: the XLA path, and the Hopper kernel in the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm import layer_norm, rms_norm
from pallas_kernels.norm.mosaic import norm_mosaic

EPSILON = 1e-5


def inputs(dtype):
    rng = np.random.default_rng(0)
    x = (3 + rng.standard_normal((5, 1024))).astype(dtype)
    return x, *(1 + 0.1 * rng.standard_normal((2, 1024))).astype(dtype)


def expected(x, scale, bias, centred):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale + (bias if centred else 0)


@pytest.mark.parametrize("centred", [False, True])
def test_the_kernel_matches_float64(centred):
    x, scale, bias = inputs(np.float16)
    got = norm_mosaic(
        jnp.asarray(x),
        jnp.asarray(scale),
        jnp.asarray(bias) if centred else None,
        epsilon=EPSILON,
        interpret=plgpu.InterpretGPUParams(),
    )
    np.testing.assert_allclose(np.asarray(got, np.float64), expected(x, scale, bias, centred), atol=5e-3)


def test_the_xla_path_matches_float64():
    x, scale, bias = inputs(np.float32)
    np.testing.assert_allclose(
        rms_norm(x, scale, epsilon=EPSILON), expected(x, scale, bias, False), atol=1e-5
    )
    np.testing.assert_allclose(
        layer_norm(x, scale, bias, epsilon=EPSILON), expected(x, scale, bias, True), atol=1e-5
    )
    np.testing.assert_allclose(layer_norm(x, None, None, epsilon=EPSILON), expected(x, 1, 0, True), atol=1e-5)


def test_parameters_that_do_not_fit_are_refused():
    x, scale, bias = inputs(np.float32)
    with pytest.raises(ValueError, match="scale"):
        rms_norm(x, scale[:-1], epsilon=EPSILON)
    with pytest.raises(ValueError, match="bias"):
        layer_norm(x, scale, bias[:-1], epsilon=EPSILON)
