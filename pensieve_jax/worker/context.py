"""The `LayerContext` that the worker gives to a model's modules."""

import jax

from pallas_kernels.kv_write import kv_write
from pallas_kernels.multi_token_attention import multi_token_attention
from pensieve_jax.worker.batch import BatchArrays


class PlainContext:
    """For modules outside the layers: positions, and no attention."""

    def __init__(self, batch: BatchArrays, axis_name: str | None) -> None:
        self.positions = batch.positions
        self.axis_name = axis_name

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **_: object) -> jax.Array:
        """Refuses: only layers attend."""
        raise TypeError("attend: only a layer may call it, not the embedding or the head")


class PagedContext:
    """For one layer: writes its keys and values into the pool and attends over the pages of each row.

    After the layer has run, `kv` is its pool with the batch's tokens written.
    """

    def __init__(self, kv: jax.Array, batch: BatchArrays, axis_name: str | None) -> None:
        self.positions = batch.positions
        self.axis_name = axis_name
        self.kv = kv
        self._batch = batch
        self._attended = False

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> jax.Array:
        """See `pensieve_jax.models.interface.LayerContext.attend`."""
        if self._attended:
            raise TypeError("attend: a layer calls it exactly once")
        self._attended = True
        batch = self._batch
        self.kv = kv_write(self.kv, k, v, batch.write_pages, batch.write_slots)
        return multi_token_attention(q, self.kv, batch.attention, scale=scale, sliding_window=sliding_window)
