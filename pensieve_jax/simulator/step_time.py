"""How long a step takes: from a model's dimensions and a device's rates, or from a measured profile."""

from collections.abc import Iterable
from typing import NamedTuple

from host_cache.cost_model import RecomputeCost
from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.core.plans import Row
from pensieve_jax.core.profile import StepProfile
from pensieve_jax.simulator.hardware import DeviceSpec

LONG_PROMPT_TOKENS = 2048
"""Enough query tokens that reading the weights no longer limits a step, on every device known here."""


class StepWork(NamedTuple):
    """What a step has to do, summed over its rows. A tuple, since one is made for every simulated step."""

    tokens: int
    """Query tokens."""
    pairs: int
    """Pairs of a query token and a token that it attends to."""
    kv_tokens: int
    """Tokens whose KV is read, once for each row."""


def work_of(rows: Iterable[Row]) -> StepWork:
    """The work of a step with these rows."""
    tokens = pairs = kv_tokens = 0
    for row in rows:
        count = len(row.token_ids)
        tokens += count
        pairs += count * row.start + count * (count + 1) // 2
        kv_tokens += row.start + count
    return StepWork(tokens, pairs, kv_tokens)


class StepTimeModel:
    """Seconds of compute of a step.

    Everything but attention computes 2 operations for each weight and token or reads the weights once,
    whichever takes longer; attention likewise: 4 * heads * head_dim operations for each pair and layer, or
    the KV of every row. Tensor parallelism divides both and adds two all-reduces a layer.
    """

    def __init__(self, model: ModelShape, device: DeviceSpec, profile: StepProfile | None = None) -> None:
        """Args:
        model: the dimensions.
        device: the rates.
        profile: measured times in place of the estimate.
        """
        self.model = model
        self.device = device
        self._profile = profile
        self._overhead_s = device.step_overhead_s
        all_reduces = 2 * model.num_layers if model.num_devices > 1 else 0
        hidden_bytes = model.num_heads * model.head_dim * model.bytes_per_value
        self._reduce_s = all_reduces * device.all_reduce_latency_s
        self._reduce_token_s = all_reduces * hidden_bytes / device.all_reduce_bytes_per_s
        flops = 2.0 * model.num_parameters / model.num_devices
        self._token_s = flops / device.matmul_flops_per_s
        self._weights_s = model.weight_bytes / device.memory_bytes_per_s
        self._pair_s = model.pair_flops / device.attention_flops_per_s
        self._kv_token_s = model.kv_bytes_per_token / device.memory_bytes_per_s
        if profile is not None:
            self._pair_s, self._kv_token_s = profile.pair_s, profile.kv_token_s

    @property
    def source(self) -> str:
        """Where the times come from, for people to read."""
        return f"estimated; {self.device.source}" if self._profile is None else self._profile.source

    def compute_s(self, work: StepWork) -> float:
        """Compute time of a step."""
        attention_s = max(work.pairs * self._pair_s, work.kv_tokens * self._kv_token_s)
        return self._other_s(work.tokens) + attention_s

    def recompute_cost(
        self, chunk_tokens: int, max_context_tokens: int, attention_weight: float = 1.0
    ) -> RecomputeCost:
        """What a chunk costs to compute again among other tokens of a step: its share of a long prompt's
        time, since recomputed chunks don't come alone.

        Args:
            chunk_tokens: tokens of a chunk.
            max_context_tokens: largest context to describe.
            attention_weight: multiplies the attention's part.
        """
        if self._profile is not None:
            return self._profile.recompute_cost(chunk_tokens, attention_weight)
        pairs_s = chunk_tokens * self._pair_s * attention_weight
        other_s = self._other_s(LONG_PROMPT_TOKENS) * chunk_tokens / LONG_PROMPT_TOKENS
        return RecomputeCost(
            context_tokens=(0, max_context_tokens),
            attention_s=(0.0, pairs_s * max_context_tokens),
            other_s=other_s,
            source=self.source,
        )

    def _other_s(self, tokens: int) -> float:
        if self._profile is not None:
            return self._profile.step_s(tokens)
        other_s = max(tokens * self._token_s, self._weights_s) + self._overhead_s
        return other_s + self._reduce_s + tokens * self._reduce_token_s
