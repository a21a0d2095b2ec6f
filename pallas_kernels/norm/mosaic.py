"""Norms of few rows for Hopper GPUs, in Pallas Mosaic GPU: a warpgroup has a row.

What it is for: it lets the kernel after it start while it runs. A product of few rows then has the first of
its weights in shared memory when its input is ready.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_support import interpreter

WARPGROUP = 128
VECTOR = 8
"""Elements that a thread loads at once: 16 bytes."""
MAX_FEATURES = 16384
"""Elements of a row, which stays in registers."""


def norm_mosaic(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    *,
    epsilon: float,
    interpret: Any = None,
) -> jax.Array:
    """The root-mean-square norm, or, with a bias, the layer norm.

    Args:
        x: [num_tokens, features], a multiple of 1024 features.
        scale: [features].
        bias: [features]; None for the root-mean-square norm, which takes no mean away and rounds before the
            scale.
        epsilon: added to the variance.
        interpret: `plgpu.InterpretGPUParams` on a machine without the GPU; None: compile.
    """
    kernel = plgpu.kernel(
        partial(_norm, epsilon, bias is not None, interpret is not None),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="norm",
        **interpreter(interpret),
    )
    return kernel(x, scale, *([] if bias is None else [bias]))


def _norm(epsilon: float, biased: bool, interpreted: bool, x: Any, *refs: Any) -> None:
    scale, bias, out = (refs[0], refs[1], refs[2]) if biased else (refs[0], None, refs[1])
    features = x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((features,), VECTOR)
    weight = plgpu.load(scale, layout=layout)
    if not interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    row = lax.axis_index("row")
    wide = plgpu.load(x.at[row], layout=layout).astype(jnp.float32)
    if bias is not None:
        wide -= jnp.sum(wide) / features
    wide *= lax.rsqrt(jnp.sum(wide * wide) / features + epsilon)
    if bias is None:
        out[row] = wide.astype(out.dtype) * weight
    else:
        wide = wide * weight.astype(jnp.float32) + plgpu.load(bias, layout=layout).astype(jnp.float32)
        out[row] = wide.astype(out.dtype)
