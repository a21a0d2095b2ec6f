"""The dimensions of a model that times and sizes depend on."""

from dataclasses import dataclass, fields
from typing import Literal, cast, get_args

from pensieve_jax.core.errors import InvalidArgumentError

type KvDtype = Literal["fp8_e4m3"]
"""How keys and values may be kept in place of the model's dtype: in 8-bit pages with scales."""
KV_DTYPES: tuple[str, ...] = get_args(KvDtype.__value__)
SCALE_TOKENS = 1
"""What the scales of an 8-bit page take, in tokens of the page."""


def check_kv_dtype(kv_dtype: str | None) -> KvDtype | None:
    """The same, known to be None or a `KvDtype`.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if kv_dtype is None or kv_dtype in KV_DTYPES:
        return cast(KvDtype | None, kv_dtype)
    raise InvalidArgumentError(
        f"kv_dtype: got {kv_dtype!r}, expected None or {' or '.join(map(repr, KV_DTYPES))}"
    )


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
    """Of weights, and of KV unless `kv_dtype` is given."""
    kv_dtype: KvDtype | None = None
    """How keys and values are kept; None: as the weights."""

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "kv_dtype") and not (isinstance(value, int) and value >= 1):
                raise InvalidArgumentError(f"{field.name}: got {value!r}, expected an integer >= 1")

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token over all layers, on one device, scales left out: what attention reads."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        bytes_per_value = self.bytes_per_value if self.kv_dtype is None else 1
        return values * bytes_per_value // self.num_devices

    def kv_page_bytes(self, page_tokens: int) -> int:
        """A page over all layers, on one device, with its scales: what is kept and moved."""
        scale_tokens = 0 if self.kv_dtype is None else SCALE_TOKENS
        return (page_tokens + scale_tokens) * self.kv_bytes_per_token

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
