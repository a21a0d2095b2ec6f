"""The least time of a step: bytes and operations over the rates that the device reaches."""

from dataclasses import dataclass

from pensieve_jax.bench.cases import Case
from pensieve_jax.bench.timing import Ceilings
from pensieve_jax.core.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The parts of a step's least time.

    Attributes:
        bytes: weights, and KV that is read.
        flops: operations.
        products_s: the layers' and the head's products: the longer of reading and computing.
        attention_s: attention, likewise.
    """

    bytes: float
    flops: float
    products_s: float
    attention_s: float

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.products_s + self.attention_s


def step_floor(case: Case, model: ModelShape, head_parameters: int, ceilings: Ceilings) -> Floor:
    """The floor of one step over a case's rows, which samples once per row.

    Args:
        case: rows and their tokens.
        model: dimensions, and how many devices it is spread over.
        head_parameters: of its weights, those of the head, on all devices.
        ceilings: of each device.
    """

    def least_s(num_bytes: float, flops: float) -> float:
        return max(num_bytes / ceilings.copy_bytes_per_s, flops / ceilings.matmul_flops)

    head = head_parameters // model.num_devices
    layers = (model.num_parameters - head_parameters) // model.num_devices
    layer_bytes, head_bytes = layers * model.bytes_per_value, head * model.bytes_per_value
    layer_flops, head_flops = 2 * layers * case.tokens, 2 * head * case.rows
    kv_bytes = case.rows * (case.past_tokens + case.new_tokens) * model.kv_bytes_per_token
    pairs = case.rows * case.new_tokens * (case.past_tokens + (case.new_tokens + 1) / 2)
    attention_flops = pairs * model.pair_flops
    return Floor(
        bytes=layer_bytes + head_bytes + kv_bytes,
        flops=layer_flops + head_flops + attention_flops,
        products_s=least_s(layer_bytes, layer_flops) + least_s(head_bytes, head_flops),
        attention_s=least_s(kv_bytes, attention_flops),
    )
