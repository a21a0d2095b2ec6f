"""The public function: checks its arguments and picks an implementation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import run_first
from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.skinny_matmul.epilogue import Epilogue
from pallas_kernels.skinny_matmul.mosaic import ACTIVATIONS, skinny_matmul_mosaic
from pallas_kernels.skinny_matmul.tiling import ALIGN, MAX_TOKENS, plan_tiling
from pallas_kernels.skinny_matmul.xla import skinny_matmul_xla


def products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    biases: Sequence[jax.Array] = (),
    activation: Callable[[jax.Array], jax.Array] | None = None,
    gated: bool = False,
    add: jax.Array | None = None,
    out_dtype: Any = None,
    overlap: bool = False,
    implementation: str | None = None,
) -> list[jax.Array]:
    """activation(x @ w.T + bias) + add for each of several matrices, in one launch. Sums are float32.

    Args:
        x: [num_tokens, contracted].
        weights: [features, contracted] each, in x's dtype.
        biases: [features] each, as many as there are weights; or none.
        activation: elementwise, of an array in float32; None: none.
        gated: there are two weights; what comes out is activation(first) * second.
        add: [num_tokens, features] in `out_dtype`; only where one array comes out.
        out_dtype: of the results; None: x's.
        overlap: whether the kernel may read weights while the one just before it on the device still writes.
            Only right for weights that are inputs of the whole computation.
        implementation: "mosaic" or "xla"; None: the first that runs on the default device and takes
            the input: the Hopper kernel takes up to `MAX_TOKENS` tokens. A named one is compiled for whatever
            device the call is lowered for.

    Returns:
        [num_tokens, features] for each matrix, or one for both if gated. A row doesn't depend on the other
        rows, and the same input gives the same bits.

    Raises:
        ValueError: shapes or dtypes don't fit together, or the implementation is unknown.
        UnsupportedInputError: the named implementation doesn't take the input.
    """
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    epilogue = Epilogue(biased=bool(biases), activation=activation, gated=gated, adds=add is not None)
    _check(x, weights, biases, add, epilogue, out_dtype)
    return run_first(
        {"mosaic": partial(_mosaic, overlap=overlap), "xla": skinny_matmul_xla},
        implementation,
        x,
        weights,
        biases,
        add,
        epilogue=epilogue,
        out_dtype=out_dtype,
    )


def _check(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    add: jax.Array | None,
    epilogue: Epilogue,
    out_dtype: Any,
) -> None:
    if x.ndim != 2:
        raise ValueError(f"x: got shape {x.shape}, expected [num_tokens, contracted]")
    if not weights or (epilogue.gated and len(weights) != 2):
        raise ValueError(f"weights: got {len(weights)}, expected {'2' if epilogue.gated else 'at least 1'}")
    if biases and len(biases) != len(weights):
        raise ValueError(f"biases: got {len(biases)}, expected {len(weights)} as weights, or none")
    for i, w in enumerate(weights):
        if w.ndim != 2 or w.shape[1] != x.shape[1] or w.dtype != x.dtype:
            expected = f"{x.dtype}[features, {x.shape[1]}] as x"
            raise ValueError(f"weights[{i}]: got {w.dtype}{list(w.shape)}, expected {expected}")
        if biases and biases[i].shape != w.shape[:1]:
            raise ValueError(f"biases[{i}]: got shape {biases[i].shape}, expected {w.shape[:1]}")
    if epilogue.gated and weights[0].shape != weights[1].shape:
        raise ValueError(f"weights: got shapes {weights[0].shape}, {weights[1].shape}, expected equal ones")
    if add is not None:
        expected = (x.shape[0], weights[0].shape[0])
        if len(weights) // epilogue.together != 1 or add.shape != expected or add.dtype != out_dtype:
            raise ValueError(
                f"add: got {add.dtype}{list(add.shape)}, expected {out_dtype}{list(expected)} and one output"
            )


def _mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    add: jax.Array | None,
    *,
    epilogue: Epilogue,
    out_dtype: Any,
    overlap: bool,
) -> list[jax.Array]:
    num_tokens, contracted = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedInputError(f"mosaic: x: got dtype {x.dtype}, expected bfloat16 or float16")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise UnsupportedInputError(f"mosaic: x: got {num_tokens} tokens, expected 1 to {MAX_TOKENS}")
    if epilogue.activation not in (None, *ACTIVATIONS):
        raise UnsupportedInputError("mosaic: activation: got another than jax.nn.silu and jax.nn.relu")
    padded = -(-num_tokens // ALIGN) * ALIGN
    tiling = plan_tiling(
        tokens=padded,
        sizes=[w.shape[0] for w in weights],
        contracted=contracted,
        together=epilogue.together,
        out_bytes=out_dtype.itemsize,
        adds=epilogue.adds,
    )
    if tiling is None:
        shapes = [w.shape for w in weights]
        raise UnsupportedInputError(f"mosaic: weights: got shapes {shapes}, which no tiling divides evenly")
    if padded != num_tokens:
        rows = ((0, padded - num_tokens), (0, 0))
        x, add = jnp.pad(x, rows), None if add is None else jnp.pad(add, rows)
    outs = run_mosaic(
        x,
        tuple(weights),
        tuple(biases),
        add,
        tiling=tiling,
        epilogue=epilogue,
        out_dtype=out_dtype,
        overlap=overlap,
    )
    return outs if padded == num_tokens else [out[:num_tokens] for out in outs]


# Traced and lowered once for all calls that are alike.
run_mosaic = jax.jit(
    skinny_matmul_mosaic, static_argnames=("tiling", "epilogue", "out_dtype", "overlap", "interpret")
)
