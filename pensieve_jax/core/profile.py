"""Measured times of one model on one device, and the one home of their file format.

`pensieve profile` writes such a file. The engine's cost of recomputing and the simulator's step time read it.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from host_cache.cost_model import RecomputeCost
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import ModelShape

FORMAT = 1
"""Version of the file format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Measured times of whole steps, over all layers. Points between are interpolated.

    Raises:
        InvalidArgumentError: points are not ascending, lengths differ, or a time is no number of at least 0.
    """

    model: ModelShape
    """What was measured."""
    device: str
    """What it was measured on: JAX's name of the kind of device."""
    tokens: tuple[int, ...]
    """Query tokens of steps without history, ascending."""
    other_s: tuple[float, ...]
    """Time of each such step: everything but attention to history. Beyond the last it grows in proportion."""
    chunk_tokens: int
    """Query tokens of a row in `attention_s`."""
    context_tokens: tuple[int, ...]
    """Context lengths at which attention was measured, ascending."""
    attention_s: tuple[float, ...]
    """Attention time of one row of `chunk_tokens` at each of them, among others like it."""
    pair_s: float
    """Attention time for each pair of a query token and a token it attends to, where computing limits."""
    kv_token_s: float
    """Attention time for each token read, where reading limits."""
    load_bytes_per_s: float
    """KV from the host to one device, as the engine copies it."""
    store_bytes_per_s: float
    """KV from one device to the host."""
    versions: Mapping[str, str]
    """Package -> version with which it was measured."""
    machine: str
    """The host's processor."""
    date: str
    """When it was measured, YYYY-MM-DD."""
    seed: int
    """Of the token ids, and of the weights where they are random."""

    def __post_init__(self) -> None:
        self._check_points("tokens", "other_s")
        self._check_points("context_tokens", "attention_s")
        if not (isinstance(self.chunk_tokens, int) and self.chunk_tokens >= 1):
            raise InvalidArgumentError(f"chunk_tokens: got {self.chunk_tokens!r}, expected an integer >= 1")
        for name in ("pair_s", "kv_token_s"):
            _check_numbers(name, [getattr(self, name)])
        for name in ("load_bytes_per_s", "store_bytes_per_s"):
            _check_numbers(name, [getattr(self, name)], positive=True)

    def _check_points(self, xs_name: str, ys_name: str) -> None:
        xs, ys = getattr(self, xs_name), getattr(self, ys_name)
        ascending = all(a < b for a, b in pairwise(xs))
        if len(xs) < 2 or not ascending or xs[0] < 0:
            raise InvalidArgumentError(f"{xs_name}: got {xs}, expected two or more, ascending")
        if len(ys) != len(xs):
            raise InvalidArgumentError(f"{ys_name}: got {len(ys)} points, expected one for each of {xs_name}")
        _check_numbers(ys_name, ys)

    @property
    def source(self) -> str:
        """Where the times come from, for people to read."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"measured for {self.model.name} on {self.device} ({self.machine}), {self.date}, {versions}"

    def step_s(self, tokens: int) -> float:
        """Time of a step of so many query tokens without history."""
        xs, ys = self.tokens, self.other_s
        if tokens >= xs[-1]:
            return ys[-1] * tokens / xs[-1]
        if tokens <= xs[0]:
            return ys[0]
        right = bisect_left(xs, tokens)
        part = (tokens - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + part * (ys[right] - ys[right - 1])

    def recompute_cost(self, chunk_tokens: int, attention_weight: float = 1.0) -> RecomputeCost:
        """What a chunk costs to compute again among the other tokens of a large step, since recomputed chunks
        don't come alone.

        Args:
            chunk_tokens: tokens of a chunk.
            attention_weight: multiplies the attention's part.
        """
        factor = attention_weight * chunk_tokens / self.chunk_tokens
        return RecomputeCost(
            context_tokens=self.context_tokens,
            attention_s=tuple(factor * seconds for seconds in self.attention_s),
            other_s=self.other_s[-1] * chunk_tokens / self.tokens[-1],
            source=self.source,
        )

    def check_fits(self, model: ModelShape, device: str) -> None:
        """Refuse to stand for another model or device.

        Args:
            model: the dimensions that are served; the name is free.
            device: JAX's name of the kind of device.

        Raises:
            InvalidArgumentError: it was measured for others.
        """
        wrong = self.model.differences(model)
        if self.device != device:
            wrong = (*wrong, f"device {self.device} and {device}")
        if wrong:
            raise InvalidArgumentError(
                f"profile: got one of {self.model.name} on {self.device}, expected one of {model.name} on "
                f"{device}; they differ in {', '.join(wrong)}"
            )


def read_profile(path: Path) -> StepProfile:
    """Read a profile.

    Raises:
        InvalidArgumentError: the file is no profile, or a field is missing or of the wrong kind.
        OSError: the file can't be read.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise InvalidArgumentError(f"format: got {value['format']!r}, expected {FORMAT}")
        given = {field.name: value[field.name] for field in fields(StepProfile)}
        given["model"] = ModelShape(**given["model"])
        for name in ("tokens", "other_s", "context_tokens", "attention_s"):
            given[name] = tuple(given[name])
        return StepProfile(**given)
    except KeyError as error:
        raise InvalidArgumentError(f"{path.name}: the field {error} is missing") from error
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"{path.name} is not a profile: {error}") from error


def write_profile(path: Path, profile: StepProfile) -> None:
    """Write a profile so that people can read it, too. Raises OSError."""
    value = {"format": FORMAT, **asdict(profile)}
    lines = [f" {json.dumps(name)}: {json.dumps(field)}" for name, field in value.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _check_numbers(name: str, values: Sequence[float], *, positive: bool = False) -> None:
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (positive and value == 0):
            expected = "above 0" if positive else "of at least 0"
            raise InvalidArgumentError(f"{name}: got {value!r}, expected a number {expected}")
