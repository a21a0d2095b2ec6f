"""A model run without pages: one conversation, all of its tokens at once."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pensieve_jax.models import ServableModel
from pensieve_jax.parallel import TENSOR_AXIS, partition_specs

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
SMALL_MODELS = sorted(path.parent.name for path in GOLDEN_FOLDER.glob("*/golden.npz"))


@dataclass(frozen=True, kw_only=True)
class DenseContext:
    """A `LayerContext` that keeps nothing: plain causal attention in float32 over the tokens given."""

    positions: jax.Array
    axis_name: str | None = None

    def attend(self, q, k, v, *, scale=None, sliding_window=None):
        groups = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        k, v = (jnp.repeat(x.astype(jnp.float32), groups, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k, precision="highest") * scale
        distance = self.positions[:, None] - self.positions[None, :]
        visible = distance >= 0
        if sliding_window is not None:
            visible &= distance < sliding_window
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest").astype(q.dtype)

    def rotate_and_attend(self, qkv, rotary, **options):
        q, k, v = qkv
        return self.attend(rotary(q, rotary.q_norm), rotary(k, rotary.k_norm), v, **options)


def run_model(model: ServableModel, token_ids: jax.Array, axis_name: str | None = None) -> jax.Array:
    """i32[T] -> f32[T, vocab]."""
    context = DenseContext(positions=jnp.arange(token_ids.shape[0]), axis_name=axis_name)
    x = model.embedding(token_ids, context)
    for layer in model.layers:
        x = layer(x, context)
    return model.head(x, context)


def logits(model: ServableModel, token_ids: np.ndarray) -> np.ndarray:
    """Logits on one device, part by part: layers of one structure are compiled once."""
    x = jnp.asarray(token_ids, jnp.int32)
    positions = jnp.arange(x.shape[0])
    for part in (model.embedding, *model.layers, model.head):
        x = _run_part(part, x, positions)
    return np.asarray(x)


@nnx.jit
def _run_part(part: nnx.Module, x: jax.Array, positions: jax.Array) -> jax.Array:
    return part(x, DenseContext(positions=positions))


def sharded_logits(model: ServableModel, token_ids: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Logits of a model whose weights lie on `mesh`."""
    structure, state = nnx.split(model)

    def run_shard(state, token_ids):
        return run_model(nnx.merge(structure, state), token_ids, TENSOR_AXIS)

    run = jax.shard_map(
        run_shard,
        mesh=mesh,
        in_specs=(partition_specs(state, num_shards=mesh.size), P()),
        out_specs=P(),
        check_vma=False,  # The gathered logits are equal on all shards, which JAX can't see.
    )
    return np.asarray(jax.jit(run)(state, jnp.asarray(token_ids, jnp.int32)))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest expected magnitude."""
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))
