"""What the loader reads weights from, whatever the format of the files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError

FLOAT_DTYPES: tuple[np.dtype, ...] = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))
"""Dtypes in which a model can be held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of a checkpoint, before it is read.

    Attributes:
        shape: as transformers has it: matrices are [out, in].
        dtype: of the values that `read` returns.
        file: where it lies.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path


class TensorSource(Protocol):
    """The tensors of a checkpoint under the names that transformers gives them.

    Attributes:
        config: config.json, or what it would say.
        tensors: every tensor by its name.
        dtype: the floating dtype that the checkpoint is meant for.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    dtype: np.dtype

    def read(self, name: str) -> np.ndarray:
        """The values, possibly a read-only view of the file: copy what outlives it.

        Raises:
            CheckpointError: the file can't be read.
        """
        ...


def resolve_dtype(requested: Any, own: np.dtype) -> np.dtype:
    """The dtype to hold a model in: `own` for None and "auto", else the one that is asked for.

    Raises:
        InvalidArgumentError: not one of `FLOAT_DTYPES`.
    """
    if requested is None or (isinstance(requested, str) and requested == "auto"):
        return own
    for dtype in FLOAT_DTYPES:
        if requested in (dtype, dtype.type, str(dtype)):
            return dtype
    raise InvalidArgumentError(
        f"dtype={requested!r}: expected auto, {', '.join(map(str, FLOAT_DTYPES))} or None"
    )
