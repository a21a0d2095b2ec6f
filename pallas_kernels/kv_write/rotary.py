"""What happens to queries and keys between their projection and the attention: a norm, then a rotation."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.norm.xla import rms_norm_xla

type Array = jax.Array | np.ndarray


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cos", "sin", "q_norm", "k_norm"],
    meta_fields=["epsilon"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary embedding at a batch's positions (arXiv 2104.09864), and the norms of heads before it."""

    cos: Array
    """f32[num_tokens, rotary_dim / 2]: of pair (i, i + rotary_dim / 2) of every head. Elements from
    rotary_dim on are not rotated."""
    sin: Array
    """f32[num_tokens, rotary_dim / 2]."""
    q_norm: Array | None = None
    """[head_dim]: scale of a root-mean-square norm of each query head (Qwen3); None: no norm."""
    k_norm: Array | None = None
    """[head_dim]: the same of each key head; given with `q_norm`."""
    epsilon: float = 0.0
    """What the norms add to the mean square."""

    def __call__(self, x: jax.Array, norm: Array | None) -> jax.Array:
        """Normalise and rotate in plain XLA operations, in float32.

        Args:
            x: [num_tokens, heads, head_dim].
            norm: `q_norm` or `k_norm`.

        Returns:
            The shape and dtype of `x`.
        """
        if norm is not None:
            x = rms_norm_xla(x, jnp.asarray(norm), epsilon=self.epsilon)
        half = self.cos.shape[-1]
        cos, sin = jnp.asarray(self.cos)[:, None], jnp.asarray(self.sin)[:, None]
        wide = x.astype(jnp.float32)
        first, second = wide[..., :half], wide[..., half : 2 * half]
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        rotated = rotated.astype(x.dtype)
        return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
