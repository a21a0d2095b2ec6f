"""The `LayerContext` that the worker gives to a model's modules."""

import jax

from pallas_kernels.kv_write import Rotary, kv_write, rotate_and_write
from pallas_kernels.multi_token_attention import multi_token_attention
from pensieve_jax.worker.batch import BatchArrays


class PlainContext:
    """For modules outside the layers: positions, and no attention."""

    def __init__(self, batch: BatchArrays, axis_name: str | None) -> None:
        self.positions = batch.positions
        self.axis_name = axis_name

    def attend(self, *_: object, **__: object) -> jax.Array:
        """Refuses: only layers attend."""
        raise TypeError("attend: only a layer may call it, not the embedding or the head")

    rotate_and_attend = attend


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
        batch = self._batch
        self.kv = kv_write(self.kv, k, v, batch.write_pages, batch.write_slots)
        return self._attend(q, scale, sliding_window)

    def rotate_and_attend(
        self,
        qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
        rotary: Rotary,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> jax.Array:
        """See `pensieve_jax.models.interface.LayerContext.rotate_and_attend`."""
        batch = self._batch
        q, self.kv = rotate_and_write(self.kv, qkv, batch.write_pages, batch.write_slots, rotary)
        return self._attend(q, scale, sliding_window)

    def _attend(self, q: jax.Array, scale: float | None, sliding_window: int | None) -> jax.Array:
        if self._attended:
            raise TypeError("attend: a layer calls it exactly once")
        self._attended = True
        attention = self._batch.attention
        return multi_token_attention(q, self.kv, attention, scale=scale, sliding_window=sliding_window)
