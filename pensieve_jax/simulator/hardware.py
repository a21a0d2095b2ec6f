"""Dimensions of models and rates of devices, by name. Rates are what programs reach, not what is printed on
the box; each says where it comes from."""

import math
from dataclasses import dataclass

from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.core.profile import StepProfile

MATMUL_SHARE = 716 / 989
"""Share of a device's dense 16-bit peak that programs reach, as in a jitted chain of 8192^3 products on an
H200."""
MEMORY_SHARE = 3.35 / 4.8
"""Share of its memory rate that decode steps reach, as XLA's own did for a 13B model on an H200."""
ATTENTION_SHARE = 0.5
"""Rate of prefill attention over paged KV, as a share of that of matrix products: a plain kernel's on an
H200, 355 to 369 of 716 TFLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Rates of one device, and of its link to the host."""

    name: str
    matmul_flops_per_s: float
    """Of matrix products in 16 bit."""
    attention_flops_per_s: float
    """Of attention of many query tokens."""
    memory_bytes_per_s: float
    """Of reading weights and KV."""
    load_bytes_per_s: float
    """Host to device, alone."""
    store_bytes_per_s: float
    """Device to host, alone."""
    both_ways_share: float = 0.8
    """What is left of either rate while both directions run: 18 to 20 % are lost (paper, section 5)."""
    step_overhead_s: float = 0.0
    """Time of a step that depends on nothing."""
    all_reduce_latency_s: float = 25e-6
    """Of one all-reduce of few bytes (measured, 2 H200: 22 to 27 us)."""
    all_reduce_bytes_per_s: float = 200e9
    """Of large all-reduces (measured, 2 H200: 134 MB in 567 us; halved for more devices and NVLink 3)."""
    source: str
    """Where the numbers come from, for people to read."""


MODELS = {
    shape.name: shape
    for shape in (
        # OPT (arXiv 2205.01068, table 1); weights of the layers and the tied output embedding.
        ModelShape(
            name="opt-13b",
            num_layers=40,
            num_heads=40,
            num_kv_heads=40,
            head_dim=128,
            num_parameters=12_853_000_000,
        ),
        ModelShape(
            name="opt-66b",
            num_layers=64,
            num_heads=72,
            num_kv_heads=72,
            head_dim=128,
            num_parameters=65_700_000_000,
            num_devices=4,
        ),
        # Llama 2 (arXiv 2307.09288) with KV heads reduced from 40 to 10, as the paper does (section 6.1):
        # 12.85 billion less 2 * 5120 * 3840 in each layer.
        ModelShape(
            name="llama2-13b-kv10",
            num_layers=40,
            num_heads=40,
            num_kv_heads=10,
            head_dim=128,
            num_parameters=11_279_000_000,
        ),
        ModelShape(
            name="llama2-70b",
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            num_parameters=68_714_000_000,
            num_devices=4,
        ),
    )
}
"""Models by name."""

DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            name="a100-80gb",
            matmul_flops_per_s=312e12 * MATMUL_SHARE,
            attention_flops_per_s=312e12 * MATMUL_SHARE * ATTENTION_SHARE,
            memory_bytes_per_s=1935e9 * MEMORY_SHARE,
            load_bytes_per_s=25e9,
            store_bytes_per_s=25e9,
            source="data sheet of the A100 80GB PCIe (Azure NC A100 v4: 312 TFLOP/s, 1935 GB/s), of which "
            "the shares that were measured on an H200 are reached; PCIe 4.0 x16: 25 of 32 GB/s (assumed)",
        ),
        DeviceSpec(
            name="h200",
            matmul_flops_per_s=655e12,
            attention_flops_per_s=555e12,
            memory_bytes_per_s=3.6e12,
            load_bytes_per_s=50.7e9,
            store_bytes_per_s=52.0e9,
            source="what steps of a 13B model and the attention kernel reached on an H200 with jax 0.11.2 "
            "(benchmarks/results): products 655 TFLOP/s, prefill attention 555, decode steps 3.6 TB/s; "
            "pinned host memory 50.7 and 52.0 GB/s",
        ),
    )
}
"""Devices by name."""


def device_of(profile: StepProfile) -> DeviceSpec:
    """The device of a profile: its link as measured, and the rates that its times come to."""
    shape = profile.model
    step_flops = 2.0 * shape.num_parameters * profile.tokens[-1] / shape.num_devices
    return DeviceSpec(
        name=profile.device,
        matmul_flops_per_s=_rate(step_flops, profile.other_s[-1]),
        attention_flops_per_s=_rate(shape.pair_flops, profile.pair_s),
        memory_bytes_per_s=_rate(shape.kv_bytes_per_token, profile.kv_token_s),
        load_bytes_per_s=profile.load_bytes_per_s,
        store_bytes_per_s=profile.store_bytes_per_s,
        source=profile.source,
    )


def _rate(work: float, seconds: float) -> float:
    return work / seconds if seconds else math.inf
