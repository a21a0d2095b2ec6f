"""The host tier's memory: a NumPy array per layer and shard, registered with the device for direct copies."""

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil

from host_cache.errors import TransferError

type Device = Any
"""A `jax.Device`; jax gives type checkers no name for it."""

logger = logging.getLogger(__name__)
PIECE_BYTES = 1 << 28
"""Memory is touched in pieces of this size, by several threads."""
TOUCH_THREADS = 8
"""One thread takes 0.3 s per GB: each page of memory is made when it is touched."""
OS_PAGE_BYTES = 4096
CAN_USE_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM in the CUDA driver's interface."""


def register_pinned(array: np.ndarray, device: Device) -> bool:
    """Register an array's memory with a device, so that copies go at the link's full rate.

    Undo it with `unregister_pinned` before the array's memory is freed.

    Returns:
        False on backends without such a call, a CPU for one; copies work all the same.

    Raises:
        TransferError: the device refuses the memory.
    """
    if device.platform == "cpu":
        return False
    try:
        device.client.dma_map(array.ctypes.data, array.nbytes)
    except Exception as error:
        raise TransferError(
            f"host memory: the device refuses to pin {array.nbytes} bytes: {error}"
        ) from error
    return True


def unregister_pinned(array: np.ndarray, device: Device) -> None:
    """Undo `register_pinned`, before the array's memory is freed."""
    if device.platform != "cpu":
        device.client.dma_unmap(array.ctypes.data)


def kernels_read_pinned(device: Device) -> bool:
    """Whether kernels on a device read registered memory under the address that it has in this process."""
    if device.platform != "gpu":
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value = ctypes.c_int(0)
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), CAN_USE_HOST_POINTER, device.local_hardware_id)
    return failed == 0 and value.value == 1


class PinnedPool:
    """Host pages of all layers.

    `layers[layer][shard]` is [num_pages, *page_shape]: a page of one layer and shard is one run of bytes.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_shape: tuple[int, ...],
        dtype: np.dtype,
        devices: list[Device],
        check_memory: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Allocate and register the whole pool.

        Args:
            num_layers: layers of the model.
            num_pages: pages of the host tier.
            page_shape: shape of a page of one layer on one shard.
            dtype: dtype of the KV.
            devices: one per shard.
            check_memory: refuse a pool larger than the memory that is available now. Turn off on machines
                whose memory grows as it is used.
            progress: called with (bytes done, bytes in all).

        Raises:
            TransferError: the machine can't give that much memory.
        """
        self.num_pages = num_pages
        self.page_bytes = num_layers * int(np.prod(page_shape)) * np.dtype(dtype).itemsize
        """Of a page of all layers, on one shard."""
        total = num_pages * self.page_bytes * len(devices)
        available = psutil.virtual_memory().available
        if check_memory and total > available:
            raise TransferError(
                f"host tier: {num_pages} pages need {total / 1e9:.1f} GB of memory, "
                f"{available / 1e9:.1f} GB are available: ask for fewer pages"
            )
        self.layers: list[list[np.ndarray]] = []
        self._devices = list(devices)
        done = 0
        try:
            for _ in range(num_layers):
                self.layers.append([])
                for device in devices:
                    array = self._allocate((num_pages, *page_shape), dtype, device)
                    self.layers[-1].append(array)
                    done += array.nbytes
                    if progress is not None:
                        progress(done, total)
        except BaseException:
            self.close()
            raise
        logger.info("host tier: %d pages, %.2f GB", num_pages, total / 1e9)

    def close(self) -> None:
        """Free the memory. Nothing may be copied from or to it any more."""
        for shards in self.layers:
            for array, device in zip(shards, self._devices, strict=False):  # fewer if one was refused
                if array.nbytes:
                    unregister_pinned(array, device)
        self.layers = []

    @staticmethod
    def _allocate(shape: tuple[int, ...], dtype: np.dtype, device: Device) -> np.ndarray:
        try:
            array = np.empty(shape, dtype)
        except MemoryError as error:
            raise TransferError(f"host tier: no memory for an array of shape {shape}") from error
        if array.nbytes and device.platform != "cpu":  # a CPU pins nothing: memory comes as it is used
            touch(array)
            register_pinned(array, device)
        return array


def touch(array: np.ndarray) -> None:
    """Write to each page of an array's memory, so that the memory is really there."""
    flat = array.reshape(-1).view(np.uint8)

    def touch_piece(start: int) -> None:
        flat[start : start + PIECE_BYTES : OS_PAGE_BYTES] = 0

    with ThreadPoolExecutor(TOUCH_THREADS) as threads:
        list(threads.map(touch_piece, range(0, flat.size, PIECE_BYTES)))
