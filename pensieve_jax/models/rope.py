"""Rotary position embeddings (arXiv 2104.09864) and the ways in which checkpoints stretch them.

Frequencies follow `transformers/modeling_rope_utils.py`; they are computed once, with numpy in float32 as
there, so that angles agree to the last bits even at large positions.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by parts and `attention_factor` on cosine and sine."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own: how GGUF files store the scaling of Llama 3.1."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of heads of `head_dim` elements; `scaling` None is the plain one."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None

    def inverse_frequencies(self) -> np.ndarray:
        """f32[head_dim / 2], radians per position."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        wavelengths = np.float32(self.theta) ** exponents
        plain = (np.float32(1.0) / wavelengths).astype(np.float32)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor=factor):
                return plain / np.float32(factor)
            case FrequencyFactors(factors=factors):
                return plain / np.asarray(factors, np.float32)
            case Llama3Scaling():
                return _llama3_frequencies(plain, self.scaling)
            case YarnScaling():
                return _yarn_frequencies(wavelengths, self.head_dim, self.theta, self.scaling)

    def amplitude(self) -> float:
        """Factor of cosine and sine; 1 but for YaRN."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0

    def __call__(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of the angle of each pair (i, i + head_dim / 2).

        Args:
            positions: i32[num_tokens].

        Returns:
            twice f32[num_tokens, head_dim / 2].
        """
        angles = positions.astype(jnp.float32)[:, None] * self.inverse_frequencies()
        return jnp.cos(angles) * self.amplitude(), jnp.sin(angles) * self.amplitude()


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The attention factor that YaRN takes when a checkpoint names none."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = np.where(wavelengths > context / low, plain / scaling.factor, plain)
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn_frequencies(
    wavelengths: np.ndarray, head_dim: int, theta: float, scaling: YarnScaling
) -> np.ndarray:
    def dimension_of(num_rotations: float) -> float:
        ratio = scaling.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # The ramp would divide by zero; the value is that of transformers.
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    extrapolated = np.float32(1.0) / wavelengths
    interpolated = np.float32(1.0) / (np.float32(scaling.factor) * wavelengths)
    return (interpolated * ramp + extrapolated * (1 - ramp)).astype(np.float32)
