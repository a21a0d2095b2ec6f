"""Small simulated servers and conversations for the tests of the simulator."""

from host_cache.config import CacheConfig
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from pensieve_jax.simulator import DEVICES, DeviceSpec, ModelShape, SimulationConfig, with_poisson_arrivals
from pensieve_jax.simulator.synthetic import SyntheticWorkload

SMALL_MODEL = ModelShape(
    name="small", num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64, num_parameters=10_000_000
)
SLOW_LINK = DeviceSpec(
    name="slow link",
    matmul_flops_per_s=1e12,
    attention_flops_per_s=5e11,
    memory_bytes_per_s=5e10,
    load_bytes_per_s=2e9,
    store_bytes_per_s=5e8,
    source="made up",
)
A100 = DEVICES["a100-80gb"]


def small_config(
    *,
    device_pages=60,
    host_pages=120,
    policy="retention-value",
    page_tokens=8,
    max_rows=8,
    step_tokens=64,
    keep_state=True,
    device=SLOW_LINK,
    swap_out_below=0.25,
    running_reserve=0.1,
    share_prefixes=True,
    load_s_per_page=None,
    **others,
):
    return SimulationConfig(
        model=SMALL_MODEL,
        device=device,
        cache=CacheConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            page_tokens=page_tokens,
            keep_finished=keep_state,
            swap_out_below=swap_out_below,
            running_reserve=running_reserve,
            share_prefixes=share_prefixes,
            load_s_per_page=load_s_per_page,
        ),
        scheduler=SchedulerConfig(step_tokens=step_tokens, max_rows=max_rows),
        policy=policy,
        **others,
    )


def small_workload(*, seed=0, conversations=30, rate=20.0, think_time_s=2.0, **others):
    made = SyntheticWorkload(
        conversations=conversations,
        mean_turns=3,
        mean_input_tokens=20,
        mean_output_tokens=30,
        sigma=0.8,
        **others,
    ).draw(seed)
    return with_poisson_arrivals(made, requests_per_s=rate, think_time_s=think_time_s, seed=seed)
