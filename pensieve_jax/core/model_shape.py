"""The dimensions of a model that times and sizes depend on."""

from dataclasses import dataclass, fields

from pensieve_jax.core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the time of a step and the size of its KV depend on.

    Raises:
        InvalidArgumentError: a dimension is not at least 1.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    """Weights that a token passes through; the input embedding isn't one of them."""
    num_devices: int = 1
    """Devices that it is spread over by tensor parallelism; the tiers' sizes and rates are per device."""
    bytes_per_value: int = 2
    """Of weights and KV."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int) and value >= 1):
                raise InvalidArgumentError(f"{field.name}: got {value!r}, expected an integer >= 1")

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token over all layers, on one device."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return values * self.bytes_per_value // self.num_devices

    @property
    def weight_bytes(self) -> int:
        """Weights on one device."""
        return self.num_parameters * self.bytes_per_value // self.num_devices

    @property
    def pair_flops(self) -> float:
        """Operations of attention for a pair of a query token and a token that it attends to, over all
        layers, on one device."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim / self.num_devices

    def differences(self, other: "ModelShape") -> tuple[str, ...]:
        """Dimensions in which another shape differs, each with both values; names don't count."""
        names = (field.name for field in fields(self) if field.name != "name")
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in names)
        return tuple(f"{name} {mine} and {yours}" for name, mine, yours in pairs if mine != yours)
