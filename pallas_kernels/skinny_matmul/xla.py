"""The products in plain JAX: for any shape and device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.skinny_matmul.epilogue import Epilogue


def skinny_matmul_xla(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    add: jax.Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: Any,
) -> list[jax.Array]:
    """As `skinny_matmul_mosaic`.

    float32 inputs are multiplied in float32, not in the reduced precision that a GPU takes by default.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    # Sums are float32 in any case; leaving the matrix unit as such costs traffic: only where a bias follows.
    rounded = x.dtype if epilogue.gated or epilogue.activation else out_dtype
    dtype = jnp.float32 if epilogue.biased else rounded

    def product(i: int) -> jax.Array:
        contracted = (((1,), (1,)), ((), ()))
        y = lax.dot_general(x, weights[i], contracted, precision=precision, preferred_element_type=dtype)
        y = y + biases[i].astype(jnp.float32) if epilogue.biased else y
        if epilogue.activation is not None and i < num_outs:
            y = epilogue.activation(y.astype(jnp.float32))
        return y

    num_outs = len(weights) // epilogue.together
    outs = [product(i) for i in range(num_outs)]
    if epilogue.gated:
        outs = [y * product(num_outs + i) for i, y in enumerate(outs)]
    outs = [y.astype(out_dtype) for y in outs]
    return outs if add is None else [outs[0] + add]
